"""UpdateRule: the arithmetic of one elementwise optimizer, and the dispatch to its kernels.

A rule is a fixed sequence of IEEE operations, which its C kernel (native.c), its Triton kernel (triton_kernel.py), its
plain torch form and its class in outsize.reference all follow: the same bits everywhere. In torch that means one call
per operation. Never `alpha=`, addcmul, addcdiv, lerp (they fuse: 8-23 % of values differ), nor division by a Python
number (CUDA multiplies by the reciprocal), nor `torch.sqrt` in fp32 (1 ulp off in 20 % of values on CPU): the root is
taken in fp64 and rounded to fp32, which gives the correctly rounded root.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from outsize.base.log import log
from outsize.layout.optimizer import PIECE_NUMEL, OptimizerLayout
from outsize.native.library import forces_torch
from outsize.optim.native import find_kernel, kernel
from outsize.optim.split import join_into, split_into

Numbers = tuple[float, ...]
"""The scalars of one step of one group. Each is an fp32 value in a Python float, so no device rounds it again."""


class Scratch:
    """Workspace of one update at a time, cut from a flat uint8 buffer on the weights' device.

    A buffer smaller than the layout asks for means smaller pieces; the bits do not depend on it.
    """

    BYTES_PER_ELEMENT = 12

    def __init__(self, buffer: Tensor) -> None:
        assert buffer.dtype == torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
        assert buffer.storage_offset() % 8 == 0
        n = self.numel = min(buffer.numel() // self.BYTES_PER_ELEMENT, PIECE_NUMEL)
        """Elements per piece."""
        assert n > 0, f"a scratch of {buffer.numel()} bytes holds no element; one needs {self.BYTES_PER_ELEMENT}"
        self.wide = buffer[: 8 * n].view(torch.float64)
        # `other`, `third` and `mask` lie in the bytes of `wide`, and `mask` in those of `third`.
        self.other = buffer[: 4 * n].view(torch.float32)
        self.third = buffer[4 * n : 8 * n].view(torch.float32)
        self.mask = buffer[4 * n : 5 * n].view(torch.bool)
        self.value = buffer[8 * n : 12 * n].view(torch.float32)

    def first(self, numel: int) -> "Scratch":
        """The first `numel` elements of every part."""
        part = object.__new__(Scratch)
        part.numel = numel
        for name in ("wide", "other", "third", "mask", "value"):
            setattr(part, name, getattr(self, name)[:numel])
        return part


class Master:
    """A range of weights: bf16 with the lower halves of their fp32 masters, or fp32."""

    def __init__(self, weight: Tensor, lo: Tensor | None, mask: Tensor):
        self.weight, self.lo, self._mask = weight, lo, mask

    def read(self, out: Tensor) -> Tensor:
        """The fp32 values: written to `out` for bf16 weights; fp32 weights themselves."""
        if self.lo is None:
            return self.weight
        join_into(self.weight, self.lo, out=out)
        return out

    def write(self, values: Tensor) -> None:
        """Store new fp32 values. `values` is the tensor that `read` returned; its content is lost."""
        if self.lo is not None:
            split_into(values, hi=self.weight, lo=self.lo, mask=self._mask)


@dataclass(frozen=True, slots=True)
class UpdateRule:
    name: str
    """The name of its kernels in native.c and triton_kernel.py."""
    layout: OptimizerLayout
    numbers: Callable[[Mapping[str, Any], int], Numbers]
    """Computes the scalars of a step from a param_group and the number of the update (from 1), in the order in which
    kernels take them."""
    update_piece: Callable[[Master, Sequence[Tensor], Tensor, Numbers, float | Tensor, Scratch], None]
    """The update in plain torch. Takes weights, state tensors, gradient, numbers, clipping factor and workspace.
    Allocates nothing."""


@torch.no_grad()
def update(
    rule: UpdateRule,
    weight: Tensor,
    lo: Tensor | None,
    state: Sequence[Tensor],
    grad: Tensor,
    *,
    numbers: Numbers,
    clip: float | Tensor,
    scratch: Scratch,
) -> None:
    """One step on a flat range, in place; `grad` is only read.

    `weight` is bf16 with `lo` int16 (a split master) or fp32 with `lo` None (its own master); the state is fp32, `grad`
    is bf16 or fp32, all 1-D, contiguous, of one length and on the scratch's device. `clip` is an fp32 value: a Python
    float, or a 0-dim tensor on that device.
    """
    numel = weight.numel()
    ranges = (weight, grad, *state, *(() if lo is None else (lo,)))
    assert all(t.shape == (numel,) and t.is_contiguous() for t in ranges), "update takes flat ranges of one length"
    assert weight.dtype == (torch.float32 if lo is None else torch.bfloat16), weight.dtype
    assert lo is None or lo.dtype == torch.int16
    assert len(state) == len(rule.layout.state) and all(t.dtype == torch.float32 for t in state)
    assert grad.dtype in (torch.bfloat16, torch.float32), grad.dtype
    assert isinstance(clip, float) or (clip.dtype == torch.float32 and clip.dim() == 0)
    if weight.device.type == "cpu" and (native := kernel()) is not None:
        native.update(rule.name, weight, lo, state, grad, (*numbers, float(clip)))
        return
    if weight.is_cuda and (triton := gpu_kernel()) is not None:
        triton.update(rule.name, weight, lo, state, grad, numbers, clip)
        return
    for start in range(0, numel, scratch.numel):
        part = slice(start, min(start + scratch.numel, numel))
        workspace = scratch.first(part.stop - part.start)
        master = Master(weight[part], None if lo is None else lo[part], workspace.mask)
        rule.update_piece(master, [tensor[part] for tensor in state], grad[part], numbers, clip, workspace)


@cache
def find_gpu_kernel() -> ModuleType | str:
    """triton_kernel.py, or why it cannot be used."""
    if forces_torch():
        return "OUTSIZE_KERNELS=torch"
    try:
        from outsize.optim import triton_kernel

        triton_kernel.require_working()
    except Exception as error:  # many kinds: no compiler, an unknown GPU
        reason = f"Triton cannot be used: {str(error).strip().splitlines()[0] if str(error).strip() else repr(error)}"
        log.warning("updates on the GPU run in torch, several times slower: %s", reason)
        return reason
    return triton_kernel


def gpu_kernel() -> ModuleType | None:
    found = find_gpu_kernel()
    return found if isinstance(found, ModuleType) else None


def slow_kernels(*, host: bool, gpu: bool) -> tuple[str, ...]:
    """Updates that run in torch instead of a kernel of ours, with the reason. `host`, `gpu`: where updates run."""
    found = ("on the host", find_kernel() if host else ""), ("on the GPU", find_gpu_kernel() if gpu else "")
    return tuple(
        f"updates {where} run in torch, several times slower: {reason}"
        for where, reason in found
        if isinstance(reason, str) and reason
    )
