"""The kernels of torch's scaled_dot_product_attention (SDPA), and the setting that chooses one for the whole process.

torch's switches are global: they hold for every layer, in forward, in recomputation and in backward, under every plan.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from outsize.base.errors import ConfigError, ModelUnsupported
from outsize.device.device import Device

_cuda = torch.backends.cuda
_SWITCHES: dict[str, tuple[Callable[[], bool], Callable[[bool], None]]] = {
    "flash": (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    "cudnn": (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
    "efficient": (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    "math": (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
}
"""By kernel: whether torch may use it, and the switch."""
_ON_CPU = ("flash", "math")
KERNELS = tuple(_SWITCHES)
_NO_KERNEL = ("No available kernel", "No viable backend", "Invalid backend")
_before: set[str] = set()
"""What was allowed before `use_sdp_kernel` chose one kernel. Empty: it has not."""


def allowed_kernels() -> tuple[str, ...]:
    return tuple(name for name, (is_allowed, _) in _SWITCHES.items() if is_allowed())


def use_sdp_kernel(name: str, device: Device) -> None:
    """SDPA runs this kernel alone, in the whole process. `auto`: torch chooses among those that it allows."""
    if name != "auto" and name not in _ON_CPU and not device.is_gpu:
        raise ConfigError(
            f"sdp_kernel: {name} is a kernel of CUDA GPUs, and this run computes on the CPU. Use auto, "
            f"{' or '.join(_ON_CPU)}."
        )
    if name == "auto":
        if _before:
            _allow(_before)
            _before.clear()
        return
    if not _before:
        _before.update(allowed_kernels())
    _allow({name})


@contextmanager
def only_kernel(name: str) -> Iterator[None]:
    """For a measurement."""
    before = set(allowed_kernels())
    _allow({name})
    try:
        yield
    finally:
        _allow(before)


@contextmanager
def kernels_on_shapes() -> Iterator[None]:
    """For CPU tensors that stand for a GPU's: its fused kernels become the CPU's, which has one."""
    before = set(allowed_kernels())
    _allow(before | {"flash"} if before - {"math"} else before)
    try:
        yield
    finally:
        _allow(before)


@contextmanager
def explaining_missing_kernel() -> Iterator[None]:
    """torch's errors if no allowed kernel can compute a model's attention, with the setting."""
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in _NO_KERNEL):
            raise
        raise ModelUnsupported(
            f"sdp_kernel: torch may use {', '.join(allowed_kernels()) or 'none'} alone, which cannot compute this "
            "model's attention (a mask, dropout, grouped heads, a head dimension or a dtype that the kernel does not "
            "have; cudnn also has no deterministic algorithms). Set sdp_kernel: auto."
        ) from error


def _allow(names: set[str]) -> None:
    for name, (_, switch) in _SWITCHES.items():
        switch(name in names)
