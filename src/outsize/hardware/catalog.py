"""The catalog of machines, a YAML file each in machines/. Most rates are the datasheet's times the efficiency seen in
practice, marked as estimated.

`lookup` returns the spec of a catalog name, of the path of such a file, or of a size such as `64MiB`: a small machine
with that much memory, for tests and for trying a budget.
"""

import dataclasses
import difflib
from pathlib import Path

from outsize.base.errors import ConfigError
from outsize.base.units import parse_bytes
from outsize.hardware.machine import read_machine
from outsize.hardware.spec import HardwareSpec

GiB = 2**30
DEFAULT_HARDWARE = "rtx4090"
"""The machine of a plan that names none."""
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


def is_size(name: str) -> bool:
    """Whether the name stands for an invented machine."""
    return name[:1].isdigit()


def lookup(name: str) -> HardwareSpec:
    """The spec of a catalog name, a file or a size, in this order. Paths are relative to the working directory."""
    if not isinstance(name, str):
        raise ConfigError(
            f"hardware {name!r} is not a string. Use a catalog name, a .yaml file or a size such as '24GiB'."
        )
    plain = name.lower().replace(" ", "").replace("_", "-")
    if plain in CATALOG:
        return CATALOG[plain]
    if Path(name).suffix in (".yaml", ".yml") or len(Path(name).parts) > 1:
        return read_machine(name).spec
    parts = [known for known in CATALOG if plain and plain in known]
    if is_size(name) and not (plain.isdigit() and parts):
        return dataclasses.replace(_TINY, name=name, gpu_bytes=parse_bytes(name, name="device size"))
    nearest = parts or difflib.get_close_matches(plain, CATALOG, n=1, cutoff=0.5)
    hint = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
    raise ConfigError(
        f"hardware {name!r} is unknown.{hint} Use a catalog name ({', '.join(CATALOG)}), a .yaml file (`outsize probe "
        "--save` writes one) or a size such as 64MiB."
    )
