"""AdamW over a flat range, in place: in C where the range is in host memory (native.py), in Triton on the GPU
(triton_kernel.py), else in plain torch.

The sequence of operations is the contract, to the bit, with the C and Triton kernels and with
`outsize.reference.AdamW`:

    g = f32(g)*clip;  m = (m*b1) + (g*o1);  v = (v*b2) + ((g*g)*o2);  d = (sqrt(v)*c2) + eps;  w = w*decay;  w = w -
    ((m*step)/d)

One torch call per operation. Never `alpha=`, addcmul, addcdiv, lerp (they fuse: 8-23 % of values differ), nor division
by a Python number (CUDA multiplies by the reciprocal), nor `torch.sqrt` in fp32 (1 ulp off in 20 % of values on CPU):
the root is taken in fp64, which is correctly rounded once brought back. Nothing is allocated: the caller gives the
workspace, so that a budget can count it.
"""

import math
from dataclasses import dataclass, fields
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from outsize.base.log import log
from outsize.layout.scratch import BYTES_PER_ELEMENT, PIECE_NUMEL
from outsize.optim.clip import round_fp32
from outsize.optim.native import find_kernel, forces_torch, kernel
from outsize.optim.split import join_into, split_into


@dataclass(frozen=True, kw_only=True, slots=True)
class Hyper:
    """The scalars of one step of one group. Each is an fp32 value in a Python float, so no device rounds it again."""

    b1: float
    b2: float
    o1: float
    """1 - beta1"""
    o2: float
    """1 - beta2"""
    eps: float
    decay: float
    """1 - lr * weight_decay"""
    step: float
    """lr / (1 - beta1^t)"""
    c2: float
    """1 / sqrt(1 - beta2^t)"""

    @property
    def numbers(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in _NUMBERS}

    @classmethod
    def at(cls, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> "Hyper":
        """The scalars of update number `step`, which begins at 1."""
        assert step >= 1, f"the first update is step 1, not {step}"
        beta1, beta2 = betas
        return cls(
            b1=round_fp32(beta1),
            b2=round_fp32(beta2),
            o1=round_fp32(1.0 - beta1),
            o2=round_fp32(1.0 - beta2),
            eps=round_fp32(eps),
            decay=round_fp32(1.0 - lr * weight_decay),
            step=round_fp32(lr / (1.0 - beta1**step)),
            c2=round_fp32(1.0 / math.sqrt(1.0 - beta2**step)),
        )


# dataclasses.asdict takes 40 µs, for every range of every chunk
_NUMBERS = tuple(field.name for field in fields(Hyper))


class Scratch:
    """Workspace of one update at a time, cut from a flat uint8 buffer that the caller allocates and keeps on the
    weights' device.

    A buffer smaller than `scratch_bytes` asks for is allowed and means smaller pieces; the bits do not depend on it.
    """

    def __init__(self, buffer: Tensor) -> None:
        assert (
            buffer.dtype == torch.uint8
            and buffer.dim() == 1
            and buffer.is_contiguous()
            and buffer.storage_offset() % 8 == 0
        )
        self.numel = min(buffer.numel() // BYTES_PER_ELEMENT, PIECE_NUMEL)
        """Elements per piece."""
        assert self.numel > 0, f"a scratch of {buffer.numel()} bytes holds no element; one needs {BYTES_PER_ELEMENT}"
        n = self.numel
        self.wide = buffer[: 8 * n].view(torch.float64)
        # `other` and `mask` lie in the bytes of `wide`: the root is finished before either is used.
        self.other = buffer[: 4 * n].view(torch.float32)
        self.mask = buffer[4 * n : 5 * n].view(torch.bool)
        self.value = buffer[8 * n : 12 * n].view(torch.float32)

    @staticmethod
    def num_bytes(numel: int) -> int:
        """Bytes of a buffer whose pieces have `numel` elements."""
        return BYTES_PER_ELEMENT * numel


@torch.no_grad()
def update(
    weight: Tensor,
    lo: Tensor | None,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    *,
    hyper: Hyper,
    clip: float | Tensor,
    scratch: Scratch,
) -> None:
    """One AdamW step on a flat range, in place; `grad` is only read.

    `weight` is bf16 with `lo` int16 (a split master) or fp32 with `lo` None (its own master); `m` and `v` are fp32,
    `grad` is bf16 or fp32, all 1-D, contiguous, of one length and on the scratch's device. `clip` is an fp32 value: a
    Python float, or a 0-dim tensor on that device.
    """
    numel = weight.numel()
    ranges = (weight, m, v, grad) if lo is None else (weight, m, v, grad, lo)
    assert all(t.shape == (numel,) and t.is_contiguous() for t in ranges), "update takes flat ranges of one length"
    assert weight.dtype == (torch.float32 if lo is None else torch.bfloat16) and (
        lo is None or lo.dtype == torch.int16
    ), weight.dtype
    assert m.dtype == v.dtype == torch.float32 and grad.dtype in (torch.bfloat16, torch.float32), (
        m.dtype,
        v.dtype,
        grad.dtype,
    )
    assert isinstance(clip, float) or (clip.dtype == torch.float32 and clip.dim() == 0), (
        "clip is a float or a 0-dim fp32 tensor"
    )
    if weight.device.type == "cpu" and (native := kernel()) is not None:
        native.update(weight, lo, m, v, grad, {**hyper.numbers, "clip": float(clip)})
        return
    if weight.is_cuda and (triton := gpu_kernel()) is not None:
        triton.update(weight, lo, m, v, grad, hyper.numbers, clip)
        return
    for start in range(0, numel, scratch.numel):
        part = slice(start, min(start + scratch.numel, numel))
        _update_piece(
            weight[part], None if lo is None else lo[part], m[part], v[part], grad[part], hyper, clip, scratch
        )


@cache
def find_gpu_kernel() -> ModuleType | str:
    """triton_kernel.py, or why it cannot be used."""
    if forces_torch():
        return "OUTSIZE_KERNELS=torch"
    try:
        from outsize.optim import triton_kernel

        triton_kernel.prove()
    except Exception as error:  # Triton fails in many ways (no compiler, an unknown GPU); torch replaces it in all
        reason = f"Triton cannot be used: {str(error).strip().splitlines()[0] if str(error).strip() else repr(error)}"
        log.warning("updates on the GPU run in torch, several times slower: %s", reason)
        return reason
    return triton_kernel


def gpu_kernel() -> ModuleType | None:
    found = find_gpu_kernel()
    return found if isinstance(found, ModuleType) else None


def slow_kernels(*, host: bool, gpu: bool) -> tuple[str, ...]:
    """Updates that run in torch and not in the C or Triton kernel, with the reason. `host`, `gpu`: where they run."""
    found = ("on the host", find_kernel() if host else ""), ("on the GPU", find_gpu_kernel() if gpu else "")
    return tuple(
        f"updates {where} run in torch, several times slower: {reason}"
        for where, reason in found
        if isinstance(reason, str) and reason
    )


def _update_piece(
    weight: Tensor,
    lo: Tensor | None,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    hyper: Hyper,
    clip: float | Tensor,
    scratch: Scratch,
) -> None:
    n = weight.numel()
    value, other, wide, mask = scratch.value[:n], scratch.other[:n], scratch.wide[:n], scratch.mask[:n]

    g = value
    g.copy_(grad)
    g.mul_(clip)

    m.mul_(hyper.b1)
    torch.mul(g, hyper.o1, out=other)
    m.add_(other)

    v.mul_(hyper.b2)
    torch.mul(g, g, out=other)
    other.mul_(hyper.o2)
    v.add_(other)

    wide.copy_(v)
    wide.sqrt_()
    d = value  # overwrites the gradient
    d.copy_(wide)
    d.mul_(hyper.c2)
    d.add_(hyper.eps)

    move = other
    torch.mul(m, hyper.step, out=move)
    move.div_(d)

    if lo is None:
        weight.mul_(hyper.decay)
        weight.sub_(move)
    else:
        w = value  # overwrites the denominator
        join_into(weight, lo, out=w)
        w.mul_(hyper.decay)
        w.sub_(move)
        split_into(w, hi=weight, lo=lo, mask=mask)
