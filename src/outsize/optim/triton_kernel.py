"""Optimizer updates and the norm of a flat range in GPU memory, one pass each in Triton. With AdamW 26 bytes a
parameter move once (28 with fp32 gradients).

Imported only where it is used: a CPU machine has no triton. The kernels compute the same bits as native.c. The
PTX of Triton 3.6 shows why: `enable_fp_fusion=False` keeps LLVM from contracting a*b+c and writes every multiplication
as `mul.rn`, which ptxas may not contract either; `div_rn` and `sqrt_rn` become `div.rn` and `sqrt.rn`; no instruction
has `.ftz`, so denormals stay. Integer arithmetic widens bf16 and splits the master. tests/gpu/test_kernels.py checks
the PTX and the bits.
"""

# mypy: allow-untyped-defs
# (the arguments of a kernel have Triton's types)

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Four elements a thread: 16-byte accesses to fp32 with no gap between neighbouring threads, 8-byte ones to bf16.
BLOCK = 1024
WARPS = 8


# The rules (see adamw.py, lion.py, sgd.py): from master, clipped gradient and state to the new master and state.


@triton.jit
def adamw(w, g, first, second, b1, b2, o1, o2, eps, decay, step, c2):
    first = (first * b1) + (g * o1)
    second = (second * b2) + ((g * g) * o2)
    d = (tl.sqrt_rn(second) * c2) + eps
    return (w * decay) - tl.div_rn(first * step, d), first, second


@triton.jit
def lion(w, g, first, second, b1, b2, o1, o2, decay, lr, unused6, unused7):
    x = (first * b1) + (g * o1)
    sign = tl.where(x > 0.0, 1.0, 0.0) - tl.where(x < 0.0, 1.0, 0.0)
    return (w * decay) - (sign * lr), (first * b2) + (g * o2), second


@triton.jit
def sgd(w, g, first, second, weight_decay, lr, unused2, unused3, unused4, unused5, unused6, unused7):
    return w - ((g + (w * weight_decay)) * lr), first, second


@triton.jit
def sgd_momentum(w, g, first, second, weight_decay, lr, mu, x, y, unused5, unused6, unused7):
    t = g + (w * weight_decay)
    first = (first * mu) + t
    return w - (((t * x) + (first * y)) * lr), first, second


_RULES = {rule.__name__: rule for rule in (adamw, lion, sgd, sgd_momentum)}
_MOST_NUMBERS = 8


@triton.jit
def _update_block(weight, lo, s, r, grad, h0, h1, h2, h3, h4, h5, h6, h7, clip, mask, RULE: tl.constexpr):
    """One block of pointers; `mask` is None where the block is whole."""
    # All loads before all stores: the compiler must assume that ranges overlap, and would wait twice for memory.
    g, w = tl.load(grad, mask), tl.load(weight, mask)
    if s is not None:
        first = tl.load(s, mask)
    else:
        first = 0.0
    if r is not None:
        second = tl.load(r, mask)
    else:
        second = 0.0
    if lo is not None:
        w = ((w.to(tl.int16, bitcast=True).to(tl.int32) << 16) + tl.load(lo, mask).to(tl.int32)).to(
            tl.float32, bitcast=True
        )
    if g.dtype == tl.bfloat16:
        g = (g.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    w, first, second = RULE(w, g * clip, first, second, h0, h1, h2, h3, h4, h5, h6, h7)
    if s is not None:
        tl.store(s, first, mask)
    if r is not None:
        tl.store(r, second, mask)
    if lo is None:
        tl.store(weight, w, mask)
    else:
        bits = tl.where(w != w, 0x7FC00000, w.to(tl.int32, bitcast=True))
        high = (bits + 0x8000) >> 16  # wraps and keeps the sign, as in native.c
        tl.store(weight, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask)
        tl.store(lo, (bits - (high << 16)).to(tl.int16), mask)


# Not specialized on `n`: else lengths of 1, divisible by 16 or beyond 2**31 would each compile a kernel. Triton never
# specializes on floats.
@triton.jit(do_not_specialize=["n"])
def _update(
    weight,
    lo,
    s,
    r,
    grad,
    n: tl.int64,
    h0,
    h1,
    h2,
    h3,
    h4,
    h5,
    h6,
    h7,
    clip,
    RULE: tl.constexpr,
    CLIP_IN_MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    weight, grad = weight + start + at, grad + start + at
    if s is not None:
        s = s + start + at
    if r is not None:
        r = r + start + at
    if lo is not None:
        lo = lo + start + at
    if CLIP_IN_MEMORY:
        clip = tl.load(clip)
    # A mask of unknown length forbids wide loads, so only the last block has one.
    if start + BLOCK <= n:
        _update_block(weight, lo, s, r, grad, h0, h1, h2, h3, h4, h5, h6, h7, clip, None, RULE)
    else:
        _update_block(weight, lo, s, r, grad, h0, h1, h2, h3, h4, h5, h6, h7, clip, at < n - start, RULE)


def update(
    rule: str,
    weight: Tensor,
    lo: Tensor | None,
    state: Sequence[Tensor],
    grad: Tensor,
    numbers: tuple[float, ...],
    clip: float | Tensor,
    *,
    block: int = BLOCK,
    warps: int = WARPS,
) -> Any:
    """`rule.update` on the current stream. Allocates nothing and waits for nothing; returns the compiled kernel."""
    n = weight.numel()
    s, r = (*state, None, None)[:2]
    numbers = (*numbers, *(0.0,) * (_MOST_NUMBERS - len(numbers)))
    with torch.cuda.device_of(weight):
        return _update[(triton.cdiv(n, block),)](
            weight,
            lo,
            s,
            r,
            grad,
            n,
            *numbers,
            clip,
            RULE=_RULES[rule],
            CLIP_IN_MEMORY=isinstance(clip, Tensor),
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=False,
        )


# The norm: see norm.py. A program sums SEGMENTS segments. The first three halvings add loads of PART elements, without
# an exchange between threads.
SEGMENT = 4096
PART = SEGMENT // 8
SEGMENTS = 2
NORM_WARPS = 4


@triton.jit
def _square(grad, mask):
    if mask is None:
        g = tl.load(grad)
    else:
        g = tl.load(grad, mask, other=0.0)
    if g.dtype == tl.bfloat16:
        g = (g.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return g * g


@triton.jit
def _halve(s, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The sum of the left and the right half of [ROWS, 2 * HALF]."""
    left, right = tl.split(tl.permute(tl.reshape(s, (ROWS, 2, HALF)), (0, 2, 1)))
    return left + right


@triton.jit
def _sum_segments(s0, s1, s2, s3, s4, s5, s6, s7, ROWS: tl.constexpr):
    """The sums of ROWS segments, given as eighths of [ROWS, 512] each."""
    s0, s1, s2, s3 = s0 + s4, s1 + s5, s2 + s6, s3 + s7
    s0, s1 = s0 + s2, s1 + s3
    s = s0 + s1
    s = _halve(s, ROWS, 256)
    s = _halve(s, ROWS, 128)
    s = _halve(s, ROWS, 64)
    s = _halve(s, ROWS, 32)
    s = _halve(s, ROWS, 16)
    s = _halve(s, ROWS, 8)
    s = _halve(s, ROWS, 4)
    s = _halve(s, ROWS, 2)
    s = _halve(s, ROWS, 1)
    return tl.reshape(s, (ROWS,))


@triton.jit(do_not_specialize=["sums", "n"])
def _segment_sums(grad, sums, n: tl.int64, ROWS: tl.constexpr, PART: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * ROWS
    row = tl.arange(0, ROWS)
    at = row[:, None] * (8 * PART) + tl.arange(0, PART)[None, :]
    start = first * (8 * PART)
    g = grad + start + at
    if start + ROWS * 8 * PART <= n:
        s = _sum_segments(
            _square(g, None),
            _square(g + PART, None),
            _square(g + 2 * PART, None),
            _square(g + 3 * PART, None),
            _square(g + 4 * PART, None),
            _square(g + 5 * PART, None),
            _square(g + 6 * PART, None),
            _square(g + 7 * PART, None),
            ROWS,
        )
        tl.store(sums + first + row, s)
    else:
        left = n - start
        s = _sum_segments(
            _square(g, at < left),
            _square(g + PART, at + PART < left),
            _square(g + 2 * PART, at + 2 * PART < left),
            _square(g + 3 * PART, at + 3 * PART < left),
            _square(g + 4 * PART, at + 4 * PART < left),
            _square(g + 5 * PART, at + 5 * PART < left),
            _square(g + 6 * PART, at + 6 * PART < left),
            _square(g + 7 * PART, at + 7 * PART < left),
            ROWS,
        )
        tl.store(sums + first + row, s, row * (8 * PART) < left)


def segment_sums(grad: Tensor, sums: Tensor) -> Any:
    """`norm.segment_sums` on the current stream. Allocates nothing and waits for nothing; returns the kernel."""
    with torch.cuda.device_of(grad):
        return _segment_sums[(triton.cdiv(sums.numel(), SEGMENTS),)](
            grad, sums, grad.numel(), ROWS=SEGMENTS, PART=PART, num_warps=NORM_WARPS, enable_fp_fusion=False
        )


def require_working() -> None:
    """Raise if Triton cannot compile or load a kernel (no C compiler, an unknown GPU). Accesses no memory."""
    nothing = torch.empty(0, device="cuda")
    segment_sums(nothing, nothing)
    update("adamw", nothing, None, (nothing, nothing), nothing, (1.0,) * _MOST_NUMBERS, 1.0)
