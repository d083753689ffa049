"""`choose_device`: the device of a name such as `cuda`, `cuda:1`, `cpu`, `sim:rtx4090` or `sim:64MiB`. One object per
name and process, so that engines share its memory.
"""

import torch

from outsize.base.errors import ConfigError
from outsize.device.cpu import CpuDevice
from outsize.device.device import Device
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup

_DEVICES: dict[str, Device] = {}


def choose_device(name: "str | Device | None" = None) -> Device:
    """None: the GPU if there is one, else the CPU."""
    if isinstance(name, Device):
        return name
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        name = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else name
    device = _known(name)
    device.prepare_for_plans()
    return device


def device_of(place: torch.device) -> Device:
    """The device of tensors that are there already, for copies without a plan. Leaves the allocator as it is."""
    return _known("cpu" if place.type == "cpu" else f"{place.type}:{place.index or 0}")


def _known(name: str) -> Device:
    if name not in _DEVICES:
        _DEVICES[name] = _make(name)
    return _DEVICES[name]


def _make(name: str) -> Device:
    kind, _, rest = name.partition(":")
    if kind == "cpu" and not rest:
        return CpuDevice()
    if kind == "sim" and rest:
        return SimDevice(lookup(rest))
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device {name!r} needs an NVIDIA GPU, and torch sees none. Use device='cpu', or 'sim:24GiB' to try a "
                "budget; `outsize doctor` says why."
            )
        if rest and not (rest.isdigit() and int(rest) < torch.cuda.device_count()):
            count = torch.cuda.device_count()
            raise ConfigError(
                f"device {name!r} does not exist: this machine has {count} GPU{'s' if count != 1 else ''}. Use "
                f"cuda:<number> with a number below {count}, or device='cuda' for the current one."
            )
        from outsize.device.cuda import CudaDevice

        return CudaDevice(int(rest or 0))
    raise ConfigError(f"device {name!r} is unknown. Use cuda, cpu, or sim:<catalog name, .yaml file or size>.")
