"""The cached probe of this machine, and what is known of a card without one.

A probe belongs to a card, a driver, a torch and a number of cores. It is kept as a machine's YAML file in the cache folder (OUTSIZE_CACHE; empty turns
it off), with that identity among its figures. A file of another driver or torch is stale: it is passed over, which is said.
"""

import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from outsize.base.errors import ConfigError
from outsize.base.log import log
from outsize.hardware.catalog import CATALOG
from outsize.hardware.machine import Machine, read_machine, write_machine
from outsize.hardware.spec import HardwareSpec

ASSUMED = "rtx3090"
"""A middling card of the catalog: its rates stand in where nothing is known."""
HOW_TO = "`outsize probe` measures this machine"


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    gpu: str
    driver: str
    torch: str
    cores: int
    """That torch and updates on the host may use."""


def probe_path(identity: Identity) -> Path | None:
    """Where the probe of this card is kept; None without a cache."""
    folder = os.environ.get("OUTSIZE_CACHE", str(Path.home() / ".cache" / "outsize"))
    card = re.sub(r"[^a-z0-9]+", "-", identity.gpu.lower()).strip("-")
    return Path(folder) / "machines" / f"{card}-{identity.cores}-cores.yaml" if folder else None


def keep_probe(machine: Machine, identity: Identity) -> Path | None:
    """Write a probe to the cache; the identity goes among its figures. None, and a word why, where that cannot be."""
    path = probe_path(identity)
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(write_machine(replace(machine, measured={"identity": asdict(identity), **machine.measured})), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        log.warning("the probe is not cached: %s. Set OUTSIZE_CACHE to a folder that can be written", error)
        return None
    return path


def find_probe(identity: Identity) -> HardwareSpec | None:
    """What `outsize probe` found on this machine, if it was asked to and still holds."""
    path = probe_path(identity)
    if path is None or not path.exists():
        return None
    try:
        machine = read_machine(path)
    except ConfigError as error:
        log.warning("the probe of this machine is passed over and its rates are assumed; run `outsize probe` again: %s", error)
        return None
    then = machine.measured.get("identity")
    changed = [
        f"{name} was {then.get(name) if isinstance(then, dict) else None!r} and is {now!r}"
        for name, now in asdict(identity).items() if not isinstance(then, dict) or then.get(name) != now
    ]  # fmt: skip
    if changed:
        log.warning("the probe %s is stale (%s) and passed over; run `outsize probe` again", path, "; ".join(changed))
        return None
    return machine.spec


def describe(identity: Identity, *, gpu_bytes: int, host_bytes: int) -> HardwareSpec:
    """This machine: the rates of its probe if there is one, else the catalog's where the card is known, else a middling card's. Sizes are as given."""
    probed = find_probe(identity)
    if probed is not None:
        return replace(probed, gpu_bytes=gpu_bytes, host_bytes=host_bytes)
    words = re.sub(r"geforce|nvidia|\s", "", identity.gpu.lower())
    known = [spec for name, spec in CATALOG.items() if name.split("-")[0] in words]
    base = min(known, key=lambda spec: abs(spec.gpu_bytes - gpu_bytes)) if known else CATALOG[ASSUMED]
    origin = base.provenance if known else f"assumed as of {base.name}: this card is not in the catalog"
    return replace(base, name=identity.gpu, gpu_bytes=gpu_bytes, host_bytes=host_bytes, provenance=f"{origin} ({HOW_TO})")
