"""Machines one may not have, a YAML file each in machines/: most of them rates from datasheets times the efficiency
seen in practice, marked estimated.

`lookup` answers a catalog name, the path of such a file, or a byte size such as `64MiB`: the same small machine with
that much memory, for tests and for trying a budget.
"""

import dataclasses
import difflib
from pathlib import Path

from outsize.base.errors import ConfigError, tell
from outsize.base.units import parse_bytes
from outsize.hardware.machine import read_machine
from outsize.hardware.spec import HardwareSpec

GiB = 2**30
MACHINES = Path(__file__).parent / "machines"
CATALOG: dict[str, HardwareSpec] = {path.stem: read_machine(path).spec for path in sorted(MACHINES.glob("*.yaml"))}

_TINY = HardwareSpec(
    name="custom",
    gpu_bytes=0,
    host_bytes=16 * GiB,
    flops=1e12,
    gpu_bytes_per_second=100e9,
    h2d_bytes_per_second=10e9,
    d2h_bytes_per_second=10e9,
    host_bytes_per_second=20e9,
    host_adam_params_per_second=0.5e9,
    gpu_adam_params_per_second=4e9,
    launch_seconds=1e-6,
    provenance="invented: a small machine whose compute and transfers weigh about the same",
    context_bytes=0,
    allocator_share=0.0,
)


def lookup(name: str) -> HardwareSpec:
    """Of the catalog, a file or a size, in this order. Paths are relative to the working directory."""
    if not isinstance(name, str):
        raise ConfigError(
            tell("hardware is a name, a file or a size such as '24GiB'", f"{name!r} was given", "Write it as a text")
        )
    plain = name.lower().replace(" ", "").replace("_", "-")
    if plain in CATALOG:
        return CATALOG[plain]
    if Path(name).suffix in (".yaml", ".yml") or len(Path(name).parts) > 1:
        return read_machine(name).spec
    if name[:1].isdigit():
        return dataclasses.replace(_TINY, name=name, gpu_bytes=parse_bytes(name, name="device size"))
    nearest = [known for known in CATALOG if plain and known.startswith(plain)] or difflib.get_close_matches(
        plain, CATALOG, n=1, cutoff=0.5
    )
    do = (
        f"Did you mean {' or '.join(nearest)}? `outsize probe --save` writes a file of this machine"
        if nearest
        else "Choose one of them"
    )
    raise ConfigError(
        tell(
            f"a machine of the catalog ({', '.join(CATALOG)}), a .yaml file of one, or a size such as 64MiB",
            f"{name!r} was given",
            do,
        )
    )
