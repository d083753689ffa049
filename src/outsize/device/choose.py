"""From a name to a device: `cuda`, `cuda:1`, `cpu`, `sim:rtx4090`, `sim:64MiB`. One object per name and process, so
engines share budgets.
"""

import torch

from outsize.base.errors import ConfigError, tell
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
            found = "torch sees no CUDA device"
            raise ConfigError(
                tell(
                    "device 'cuda' needs an NVIDIA GPU",
                    found,
                    "Use device='cpu', or 'sim:24GiB' to try a budget; `outsize doctor` tells why",
                )
            )
        if rest and not (rest.isdigit() and int(rest) < torch.cuda.device_count()):
            found = f"{name!r} was given"
            raise ConfigError(
                tell(
                    f"cuda:<number> with a number below {torch.cuda.device_count()}",
                    found,
                    "Use device='cuda' for the current one",
                )
            )
        from outsize.device.cuda import CudaDevice

        return CudaDevice(int(rest or 0))
    raise ConfigError(
        tell(
            "device is cuda, cpu, or sim:<catalog name, .yaml file or size>",
            f"{name!r} was given",
            "Choose one of them",
        )
    )
