"""The cached probe of this machine, what training has taught since, and what is known of a card without either.

A probe belongs to a card, a driver, a torch and a number of cores. It is kept as a machine's YAML file in the cache
folder (OUTSIZE_CACHE; empty turns it off), with that identity among its figures. A file of another driver or torch is
stale: it is passed over, which is said.

Beside it lie the rates of the lanes as training saw them, under the same identity. They go before the probe's: a probe
runs every lane at full load for a moment, training runs them as plans do. A run moves them half-way, so that an odd one
does not spoil the plans after it.
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
from outsize.hardware.machine import Machine, read_machine, write_machine
from outsize.hardware.spec import HardwareSpec

ASSUMED = "rtx3090"
"""A middling card of the catalog: its rates stand in where nothing is known."""
HOW_TO = "`outsize probe` measures this machine"
CALIBRATED_RATES = ("h2d_bytes_per_second", "d2h_bytes_per_second", "host_adam_params_per_second")
"""Of HardwareSpec. What the GPU computes is measured for every model."""
MOST_FACTOR = 4.0
"""No machine is so much faster or slower than it was taken for: then it is the measurement that is wrong."""
CLOSE_SHARE = 0.03
"""By which a rate may be off without anything being changed: plans stay what they were, and runs differ by as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    gpu: str
    driver: str
    torch: str
    cores: int
    """That torch and updates on the host may use."""


def probe_path(identity: Identity) -> Path | None:
    """Where the probe of this card is kept; None without a cache."""
    folder = cache_folder()
    card = re.sub(r"[^a-z0-9]+", "-", identity.gpu.lower()).strip("-")
    return folder / "machines" / f"{card}-{identity.cores}-cores.yaml" if folder is not None else None


def keep_probe(machine: Machine, identity: Identity) -> Path | None:
    """Write a probe to the cache; the identity goes among its figures. None, and a word why, where that cannot be. What
    was learnt before is forgotten.
    """
    path = probe_path(identity)
    if path is None:
        return None
    try:
        write_whole(path, write_machine(replace(machine, measured={"identity": asdict(identity), **machine.measured})))
        _calibration_path(path).unlink(missing_ok=True)
    except OSError as error:
        log.warning("the probe is not cached: %s. Set OUTSIZE_CACHE to a folder that can be written", error)
        return None
    return path


def _changed(then: Any, identity: Identity) -> list[str]:
    """How the identity in a file differs from this one, in words."""
    was = then if isinstance(then, dict) else {}
    return [
        f"{name} was {was.get(name)!r} and is {now!r}" for name, now in asdict(identity).items() if was.get(name) != now
    ]


def find_probe(identity: Identity) -> HardwareSpec | None:
    """What `outsize probe` found on this machine, if it was asked to and still holds."""
    path = probe_path(identity)
    if path is None or not path.exists():
        return None
    try:
        machine = read_machine(path)
    except ConfigError as error:
        log.warning(
            "the probe of this machine is passed over and its rates are assumed; run `outsize probe` again: %s", error
        )
        return None
    if changed := _changed(machine.measured.get("identity"), identity):
        log.warning("the probe %s is stale (%s) and passed over; run `outsize probe` again", path, "; ".join(changed))
        return None
    return machine.spec


def _calibration_path(probe: Path) -> Path:
    return probe.with_suffix(".learnt.yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibratedRates:
    rates: dict[str, float]
    """Some of CALIBRATED_RATES."""
    date: str
    """Of the last run that changed them."""


def save_calibration(seen: Mapping[str, float], identity: Identity, spec: HardwareSpec) -> None:
    """Move rates half-way to those that training saw, for the plans to come. `spec`: of this machine, for its sizes."""
    path = probe_path(identity)
    if path is None:
        return
    untrained = _describe_untrained(identity, gpu_bytes=spec.gpu_bytes, host_bytes=spec.host_bytes)
    learnt = load_calibration(identity, untrained)
    known = learnt.rates if learnt is not None else {}
    new = {}
    for name, rate in seen.items():
        now = known.get(name, getattr(untrained, name))
        if not _is_plausible(name, rate, untrained):
            before = getattr(untrained, name)
            log.warning(
                "%s was %.3g in training and %.3g before: too far off to learn from; `outsize probe` measures it",
                name,
                rate,
                before,
            )
        elif abs(rate - now) > CLOSE_SHARE * now:
            new[name] = float(f"{(now + rate) / 2:.4g}")
    if new:
        data = {"identity": asdict(identity), "date": date.today().isoformat(), "rates": {**known, **new}}
        try:
            write_whole(_calibration_path(path), yaml.safe_dump(data, sort_keys=False))
        except OSError as error:
            log.warning(
                "the rates of this run are not kept: %s. Set OUTSIZE_CACHE to a folder that can be written", error
            )


def _is_plausible(name: str, rate: float, untrained: HardwareSpec) -> bool:
    """Held against what is known without training, not against what was learnt last: small steps must not lead
    anywhere.
    """
    return getattr(untrained, name) / MOST_FACTOR <= rate <= getattr(untrained, name) * MOST_FACTOR


def load_calibration(identity: Identity, untrained: HardwareSpec) -> CalibratedRates | None:
    """What training has taught about this machine, if it still holds. The next run replaces what does not: nobody need
    be warned.
    """
    probe = probe_path(identity)
    if probe is None or not (path := _calibration_path(probe)).exists():
        return None
    try:
        data, _ = load_yaml(read_text(path), where=str(path))
    except ConfigError as error:
        log.info("what training has taught about this machine is passed over: %s", error)
        return None
    data = data if isinstance(data, dict) else {}
    if changed := _changed(data.get("identity"), identity):
        log.info("%s is stale (%s) and passed over", path, "; ".join(changed))
        return None
    rates = data.get("rates")
    if not isinstance(rates, dict) or not all(
        name in CALIBRATED_RATES and isinstance(rate, float) and _is_plausible(name, rate, untrained)
        for name, rate in rates.items()
    ):
        log.info("%s holds %r where rates are expected, and is passed over", path, rates)
        return None
    return CalibratedRates(rates=rates, date=str(data.get("date")))


def describe(identity: Identity, *, gpu_bytes: int, host_bytes: int) -> HardwareSpec:
    """This machine as plans take it: its probe or what stands in for one, with the rates of lanes that training has
    seen since. Sizes are as given.
    """
    spec = _describe_untrained(identity, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    learnt = load_calibration(identity, spec)
    if learnt is None:
        return spec
    return replace(spec, **learnt.rates, provenance=f"{spec.provenance}, lanes as seen in training on {learnt.date}")  # type: ignore[arg-type]


def _describe_untrained(identity: Identity, *, gpu_bytes: int, host_bytes: int) -> HardwareSpec:
    """The rates of its probe if there is one, else the catalog's where the card is known, else a middling card's."""
    probed = find_probe(identity)
    if probed is not None:
        return replace(probed, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    words = re.sub(r"geforce|nvidia|\s", "", identity.gpu.lower())
    known = [spec for name, spec in CATALOG.items() if name.split("-")[0] in words]
    base = min(known, key=lambda spec: abs(spec.gpu_bytes - gpu_bytes)) if known else CATALOG[ASSUMED]
    origin = base.provenance if known else f"assumed as of {base.name}: this card is not in the catalog"
    return replace(
        base, name=identity.gpu, gpu_bytes=gpu_bytes, host_bytes=host_bytes, provenance=f"{origin} ({HOW_TO})"
    )
