"""AdamW over a flat range in GPU memory, one pass in Triton: 26 bytes a parameter move once (28 with fp32 gradients).

Imported only on a GPU: a CPU machine has no Triton. The sequence of operations is that of adamw.py and native.c,
to the bit. Why, as read in the PTX of Triton 3.6: `enable_fp_fusion=False` keeps LLVM from
contracting a*b+c and has every multiplication written as `mul.rn`, which ptxas may not contract either; `div_rn` and
`sqrt_rn` become `div.rn` and `sqrt.rn`; nothing carries `.ftz`, so denormals stay. bf16 is widened and the master split
by integer arithmetic. tests/gpu/test_kernels.py reads the PTX again, and compares the bits.
"""

# mypy: allow-untyped-defs
# (the arguments of a kernel have Triton's types)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# Four elements a thread: 16-byte accesses to fp32 with no gap between neighbouring threads, 8-byte ones to bf16.
BLOCK = 1024
WARPS = 8


@triton.jit
def _update_block(weight, lo, m, v, grad, b1, b2, o1, o2, eps, decay, step, c2, clip, mask):
    """Update one block of pointers; `mask` is None for a whole block."""
    # All loads before all stores: the compiler does not know that ranges are disjoint and would wait twice.
    g, first, second, w = tl.load(grad, mask), tl.load(m, mask), tl.load(v, mask), tl.load(weight, mask)
    if lo is not None:
        w = ((w.to(tl.int16, bitcast=True).to(tl.int32) << 16) + tl.load(lo, mask).to(tl.int32)).to(
            tl.float32, bitcast=True
        )
    if g.dtype == tl.bfloat16:
        g = (g.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    g = g * clip
    first = (first * b1) + (g * o1)
    second = (second * b2) + ((g * g) * o2)
    d = (tl.sqrt_rn(second) * c2) + eps
    w = (w * decay) - tl.div_rn(first * step, d)
    tl.store(m, first, mask)
    tl.store(v, second, mask)
    if lo is None:
        tl.store(weight, w, mask)
    else:
        bits = tl.where(w != w, 0x7FC00000, w.to(tl.int32, bitcast=True))
        high = (bits + 0x8000) >> 16  # wraps and keeps the sign, as in native.c
        tl.store(weight, high.to(tl.int16).to(tl.bfloat16, bitcast=True), mask)
        tl.store(lo, (bits - (high << 16)).to(tl.int16), mask)


# Without this, lengths that are 1, divisible by 16 or beyond 2**31 would each compile a kernel. Floats are never
# specialized.
@triton.jit(do_not_specialize=["n"])
def _update(
    weight,
    lo,
    m,
    v,
    grad,
    n: tl.int64,
    b1,
    b2,
    o1,
    o2,
    eps,
    decay,
    step,
    c2,
    clip,
    CLIP_IN_MEMORY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    weight, m, v, grad = weight + start + at, m + start + at, v + start + at, grad + start + at
    if lo is not None:
        lo = lo + start + at
    if CLIP_IN_MEMORY:
        clip = tl.load(clip)
    # A mask of unknown length forbids wide loads, so only the last block has one.
    if start + BLOCK <= n:
        _update_block(weight, lo, m, v, grad, b1, b2, o1, o2, eps, decay, step, c2, clip, None)
    else:
        _update_block(weight, lo, m, v, grad, b1, b2, o1, o2, eps, decay, step, c2, clip, at < n - start)


def update(
    weight: Tensor,
    lo: Tensor | None,
    m: Tensor,
    v: Tensor,
    grad: Tensor,
    numbers: dict[str, float],
    clip: float | Tensor,
    *,
    block: int = BLOCK,
    warps: int = WARPS,
) -> Any:
    """As `adamw.update`, on the current stream. `numbers`: those of Hyper. Allocates nothing and waits for nothing;
    returns the compiled kernel.
    """
    n = weight.numel()
    with torch.cuda.device_of(weight):
        return _update[(triton.cdiv(n, block),)](
            weight,
            lo,
            m,
            v,
            grad,
            n,
            **numbers,
            clip=clip,
            CLIP_IN_MEMORY=isinstance(clip, Tensor),
            BLOCK=block,
            num_warps=warps,
            enable_fp_fusion=False,
        )


def prove() -> None:
    """Raise if Triton cannot compile or load a kernel: no C compiler, an unknown GPU. Touches no memory."""
    nothing = torch.empty(0, device="cuda")
    names = ("b1", "b2", "o1", "o2", "eps", "decay", "step", "c2")
    update(nothing, None, nothing, nothing, nothing, dict.fromkeys(names, 1.0), 1.0)
