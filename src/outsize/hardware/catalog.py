"""Machines one may not have: rates from datasheets times the efficiency seen in practice, marked estimated.

`lookup` answers a catalog name, or a byte size such as `64MiB`: the same small machine with that much memory, for
tests and for trying a budget.
"""

import dataclasses

from outsize.base.errors import ConfigError, tell
from outsize.base.units import parse_bytes
from outsize.hardware.spec import HardwareSpec

GiB = 2**30


def _card(name: str, gib: float, tflops: float, gbps: float, pcie: float, host_gib: int = 128) -> HardwareSpec:
    """`tflops` dense bf16 and `gbps` of the datasheet; about 70 % and 85 % of them are reached."""
    return HardwareSpec(
        name=name, gpu_bytes=int(gib * GiB), host_bytes=host_gib * GiB, flops=tflops * 0.7e12, gpu_bytes_per_second=gbps * 0.85e9,
        h2d_bytes_per_second=pcie * 1e9, d2h_bytes_per_second=pcie * 1e9, host_bytes_per_second=80e9,
        host_adam_params_per_second=2.5e9, gpu_adam_params_per_second=gbps * 0.85e9 / 28, launch_seconds=10e-6,
        provenance="estimated from the datasheet",
    )  # fmt: skip


CATALOG: dict[str, HardwareSpec] = {
    spec.name: spec
    for spec in (
        _card("rtx3090", 24, 71, 936, 25),
        _card("rtx4090", 24, 165, 1008, 25),
        _card("rtx5090", 32, 210, 1792, 50),
        _card("a6000", 48, 155, 768, 25),
        _card("l40s", 48, 362, 864, 25),
        _card("a100-40gb", 40, 312, 1555, 25, 256),
        _card("a100-80gb", 80, 312, 2039, 25, 256),
        _card("h100", 80, 990, 3350, 50, 256),
        dataclasses.replace(
            _card("h200", 139, 990, 4800, 55, 125),
            flops=550e12,
            host_bytes_per_second=130e9,
            host_adam_params_per_second=4.2e9,
            gpu_adam_params_per_second=160e9,
            provenance="PCIe, FLOP/s and AdamW measured on H200 machines, 2026-11; the rest estimated",
        ),
    )
}

_TINY = HardwareSpec(
    name="custom", gpu_bytes=0, host_bytes=16 * GiB, flops=1e12, gpu_bytes_per_second=100e9, h2d_bytes_per_second=10e9, d2h_bytes_per_second=10e9,
    host_bytes_per_second=20e9, host_adam_params_per_second=0.5e9, gpu_adam_params_per_second=4e9, launch_seconds=1e-6,
    provenance="invented: a small machine whose compute and transfers weigh about the same",
)  # fmt: skip


def lookup(name: str) -> HardwareSpec:
    if name in CATALOG:
        return CATALOG[name]
    if name[:1].isdigit():
        return dataclasses.replace(_TINY, name=name, gpu_bytes=parse_bytes(name, name="device size"))
    raise ConfigError(tell(f"a machine of the catalog ({', '.join(CATALOG)}) or a size such as 64MiB", f"{name!r} was given", "Choose one of them"))
