"""The rates that plans use for this machine, and the files that keep measured rates between runs.

Rates come from three sources, each overriding the one before: the catalog, a probe, earlier training steps.
`machine_spec` is the only place that applies this order.

A probe is a machine's YAML file in the cache folder (OUTSIZE_CACHE; empty turns it off). It belongs to a GPU, a driver,
a torch version and a number of cores, which it records. A file of another driver or torch is stale and ignored.

The rates of training steps lie beside it, under the same identity. They override the probe because training
uses the lanes as plans do, a probe only for a moment. Each run moves a rate half-way, so one odd run does not spoil
the plans after it.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from outsize.base.cache_folder import cache_folder, write_whole
from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.config.source import load_yaml, read_text
from outsize.hardware.catalog import CATALOG
from outsize.hardware.lanes import LANE_FACTS, Lane
from outsize.hardware.machine import Machine, read_machine, write_machine
from outsize.hardware.spec import HardwareSpec
from outsize.native.build import UPDATES, can_have_kernel

ASSUMED = "rtx3090"
"""The catalog entry whose rates are assumed for an unknown GPU."""
CALIBRATED_RATES: dict[Lane, str] = {
    lane: facts.copy_rate or facts.update_rate for lane, facts in LANE_FACTS.items() if lane != "compute"
}
"""Fields of HardwareSpec that training steps measure, by lane. GPU compute is profiled for every model."""
TORCH_SLOWDOWN = 15
"""Factor by which updates on the host take longer in torch than in C. Measured with AdamW on one core."""
MAX_FACTOR = 4.0
"""A rate that differs from the catalog's or the probe's by more than this is a wrong measurement."""
TOLERANCE = 0.03
"""Relative difference that changes nothing: runs differ by as much, and plans should not change between them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """The machine and software that measured rates are valid for."""

    gpu: str
    driver: str
    torch: str
    cores: int
    """Cores that torch and host updates may use."""


def machine_spec(identity: Identity, *, gpu_bytes: int, host_bytes: int) -> HardwareSpec:
    """The spec that plans for this machine use: catalog < probe < earlier training steps. Sizes are as given."""
    spec = _probe_or_catalog(identity, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    steps = load_step_rates(identity, spec)
    if steps is None:
        return spec
    provenance = f"{spec.provenance}; copies and CPU updates measured in training on {steps.date}"
    return replace(spec, **steps.rates, provenance=provenance)  # type: ignore[arg-type]


def _probe_or_catalog(identity: Identity, *, gpu_bytes: int, host_bytes: int) -> HardwareSpec:
    probed = load_probe(identity)
    if probed is not None:
        return replace(probed, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    gpu = re.sub(r"geforce|nvidia|\s", "", identity.gpu.lower())
    known = [spec for name, spec in CATALOG.items() if name.split("-")[0] in gpu]
    base = min(known, key=lambda spec: abs(spec.gpu_bytes - gpu_bytes)) if known else CATALOG[ASSUMED]
    origin = base.provenance if known else f"assumed equal to {base.name}: this GPU is not in the catalog"
    rate = base.host_adam_params_per_second
    if not can_have_kernel(UPDATES):
        rate /= TORCH_SLOWDOWN
        origin += f"; CPU updates {TORCH_SLOWDOWN} times slower: there is no C compiler, so they run in torch"
    return replace(
        base,
        host_adam_params_per_second=rate,
        name=identity.gpu,
        gpu_bytes=gpu_bytes,
        host_bytes=host_bytes,
        provenance=f"{origin} (`outsize probe` measures this machine)",
    )


# The probe's file.


def probe_path(identity: Identity) -> Path | None:
    """The file of this machine's probe; None without a cache."""
    folder = cache_folder()
    gpu = re.sub(r"[^a-z0-9]+", "-", identity.gpu.lower()).strip("-")
    return folder / "machines" / f"{gpu}-{identity.cores}-cores.yaml" if folder is not None else None


def save_probe(machine: Machine, identity: Identity) -> Path | None:
    """Write a probe to the cache and delete the rates of earlier training steps. None if there is no writable cache."""
    path = probe_path(identity)
    if path is None:
        return None
    try:
        write_whole(path, write_machine(replace(machine, measured={"identity": asdict(identity), **machine.measured})))
        _step_rates_path(path).unlink(missing_ok=True)
    except OSError as error:
        log.warning("the probe is not saved: %s. Set OUTSIZE_CACHE to a writable folder.", error)
        return None
    return path


def load_probe(identity: Identity) -> HardwareSpec | None:
    """The result of `outsize probe` on this machine, unless there is none or it is stale."""
    path = probe_path(identity)
    if path is None or not path.exists():
        return None
    try:
        machine = read_machine(path)
    except ConfigError as error:
        log.warning("the probe of this machine is ignored: %s Run `outsize probe` again.", error)
        return None
    if changed := _changes(machine.measured.get("identity"), identity):
        log.warning("the probe %s is stale (%s) and ignored. Run `outsize probe` again.", path, "; ".join(changed))
        return None
    return machine.spec


def _changes(saved: Any, identity: Identity) -> list[str]:
    """How the identity in a file differs from this machine's."""
    was = saved if isinstance(saved, dict) else {}
    return [
        f"{name} was {was.get(name)!r} and is {now!r}" for name, now in asdict(identity).items() if was.get(name) != now
    ]


# The file of earlier training steps.


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRates:
    rates: dict[str, float]
    """Some of CALIBRATED_RATES."""
    date: str
    """Date of the last run that changed the rates."""


def _step_rates_path(probe: Path) -> Path:
    return probe.with_suffix(".steps.yaml")


def save_step_rates(measured: Mapping[str, float], identity: Identity, spec: HardwareSpec) -> None:
    """Move the saved rates half-way to those that training steps measured. Only the sizes of `spec` are used."""
    path = probe_path(identity)
    if path is None:
        return
    base = _probe_or_catalog(identity, gpu_bytes=spec.gpu_bytes, host_bytes=spec.host_bytes)
    steps = load_step_rates(identity, base)
    known = steps.rates if steps is not None else {}
    new = {}
    for name, rate in measured.items():
        now = known.get(name, getattr(base, name))
        if not _is_plausible(name, rate, base):
            log.warning(
                "%s was %.3g in training and %.3g before. The difference is too large to be kept; "
                "`outsize probe` measures it.",
                name,
                rate,
                getattr(base, name),
            )
        elif abs(rate - now) > TOLERANCE * now:
            new[name] = float(f"{(now + rate) / 2:.4g}")
    if new:
        data = {"identity": asdict(identity), "date": date.today().isoformat(), "rates": {**known, **new}}
        try:
            write_whole(_step_rates_path(path), yaml.safe_dump(data, sort_keys=False))
        except OSError as error:
            log.warning("the rates of this run are not saved: %s. Set OUTSIZE_CACHE to a writable folder.", error)


def _is_plausible(name: str, rate: float, base: HardwareSpec) -> bool:
    """Compared with the probe or the catalog, not with the last saved rate, so that rates cannot drift away."""
    return getattr(base, name) / MAX_FACTOR <= rate <= getattr(base, name) * MAX_FACTOR


def load_step_rates(identity: Identity, base: HardwareSpec) -> StepRates | None:
    """The rates that earlier training steps measured on this machine, unless stale or broken. The next run replaces
    those, so this is no warning.
    """
    probe = probe_path(identity)
    if probe is None or not (path := _step_rates_path(probe)).exists():
        return None
    try:
        data, _ = load_yaml(read_text(path), where=str(path))
    except ConfigError as error:
        log.info("rates of earlier training steps are ignored: %s", error)
        return None
    data = data if isinstance(data, dict) else {}
    if changed := _changes(data.get("identity"), identity):
        log.info("%s is stale (%s) and ignored", path, "; ".join(changed))
        return None
    rates = data.get("rates")
    if not isinstance(rates, dict) or not all(
        name in CALIBRATED_RATES.values() and isinstance(rate, float) and _is_plausible(name, rate, base)
        for name, rate in rates.items()
    ):
        log.info("%s has no valid rates (%r) and is ignored", path, rates)
        return None
    return StepRates(rates=rates, date=str(data.get("date")))
