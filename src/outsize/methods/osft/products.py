"""The matrix products of the drift D: W = W0 + Q D P for N ≤ M, P = I - HᵀH; mirrored, W = W0 + P D Qᵀ, for N > M.

    contract(gradient, bases, *, out, scratch=None, accumulate=False)   gradient of D: Qᵀ G P
    merge(base, drift, bases, *, out, scratch=None)                     W0 + Q D P, rounded once to out's dtype
    spread(drift, bases)                                                Q D P

`SplitShape.contract_scratch_bytes` and `merge_scratch_bytes` give the bytes of `scratch` (flat uint8, 256-byte
aligned). With it, the functions allocate nothing (but on the CPU bf16 operands are widened to fp32, part by part). The
bits depend on shapes and strides, the device and its number of threads.

Precision for bf16 weights: `contract` multiplies the bf16 gradient by the upper halves of the bases and sums in fp32;
its errors cannot leave the span of Q D P. `merge` computes each product from halves of both operands, as hi·hi + hi·lo
+ lo·hi, summed in fp32. For fp32 and fp64 weights these are plain products of that dtype, never TF32.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from outsize.base.log import log
from outsize.methods.osft.bases import Bases
from outsize.methods.osft.exact import exact_products
from outsize.methods.osft.shape import aligned_bytes

_aten = torch.ops.aten
_WIDENED_LENGTH = 1024
"""On the CPU, bf16 operands are widened to fp32 over this much of the summed dimension at a time."""


class _Operand(NamedTuple):
    """A matrix: the sum of two bf16 halves, or one tensor."""

    hi: Tensor
    lo: Tensor | None = None

    def columns(self, part: slice) -> "_Operand":
        return _Operand(self.hi[:, part], None if self.lo is None else self.lo[:, part])

    @property
    def T(self) -> "_Operand":
        return _Operand(self.hi.T, None if self.lo is None else self.lo.T)


@torch.no_grad()
def contract(
    gradient: Tensor, bases: Bases, *, out: Tensor, scratch: Tensor | None = None, accumulate: bool = False
) -> None:
    """Write the drift's gradient, Qᵀ G P, to `out`, or add it.

    `gradient` has the dtype of the bases; `out` is contiguous, of `shape.drift`, fp32 (fp64 for fp64 weights). Only the
    upper halves of the bases are read.
    """
    shape, is_halved = bases.shape, bases.free.dtype == torch.bfloat16
    assert gradient.shape == (shape.rows, shape.columns) and gradient.dtype == bases.free.dtype, gradient.dtype
    assert out.shape == shape.drift and out.is_contiguous(), (out.shape, out.stride())
    assert out.dtype == wide(gradient.dtype), out.dtype
    carve = _Carver(shape.contract_scratch_bytes(gradient.itemsize, accumulate=accumulate), scratch, out)
    g, d = (gradient.T, out.T) if shape.is_mirrored else (gradient, out)
    with exact_products(out):
        for rows in _blocks(shape.rank, shape.contract_rows):
            carve.at = 0
            size = rows.stop - rows.start, shape.large
            x = carve(size, out.dtype, shape.is_mirrored) if accumulate else d[rows]
            _product(x, bases.free[:, rows].T, g)
            if shape.frozen_rank:
                core = carve((size[0], shape.frozen_rank), out.dtype)
                y = carve(size, gradient.dtype, shape.is_mirrored).copy_(x) if is_halved else x
                _product(core, y, bases.frozen.T)
                y = carve((size[0], shape.frozen_rank), gradient.dtype).copy_(core) if is_halved else core
                _product(x, y, bases.frozen, beta=1, alpha=-1)
            if accumulate:
                d[rows].add_(x)


@torch.no_grad()
def merge(base: Tensor, drift: Tensor, bases: Bases, *, out: Tensor, scratch: Tensor | None = None) -> None:
    """Write base + Q D P to `out`, rounded to its dtype. With an fp32 `out`: the master of bf16 weights."""
    shape = bases.shape
    assert base.shape == out.shape == (shape.rows, shape.columns), (base.shape, out.shape)
    b, o = (base.T, out.T) if shape.is_mirrored else (base, out)
    with exact_products(drift):
        for columns, delta in _spread_blocks(drift, bases, scratch):
            o[:, columns].copy_(delta.add_(b[:, columns]))


@torch.no_grad()
def spread(drift: Tensor, bases: Bases) -> Tensor:
    """Q D P, in the drift's dtype."""
    shape = bases.shape
    out = drift.new_empty(shape.rows, shape.columns)
    with exact_products(drift):
        for columns, delta in _spread_blocks(drift, bases, None):
            (out.T if shape.is_mirrored else out)[:, columns].copy_(delta)
    return out


def _spread_blocks(drift: Tensor, bases: Bases, scratch: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Columns of Q D P, block by block (mirrored: of its transpose), inside `exact_products`. The caller may overwrite
    the block.
    """
    shape, dtype = bases.shape, bases.free.dtype
    assert drift.shape == shape.drift and drift.is_contiguous(), (drift.shape, drift.stride())
    assert drift.dtype == wide(dtype), drift.dtype
    carve = _Carver(shape.merge_scratch_bytes(dtype.itemsize), scratch, drift)
    d, is_halved = drift.T if shape.is_mirrored else drift, dtype == torch.bfloat16
    free, frozen = _Operand(bases.free, bases.free_lo), _Operand(bases.frozen, bases.frozen_lo)
    core_size, block_size = (shape.rank, shape.frozen_rank), (shape.rank, shape.merge_columns)
    core_halves = [carve(core_size, dtype) for _ in range(2 * is_halved)]
    block_halves = [carve(block_size, dtype, shape.is_mirrored) for _ in range(2 * is_halved)]
    start = carve.at
    core = carve(core_size, drift.dtype)
    y = carve(block_size, drift.dtype, shape.is_mirrored)

    def operand(columns: slice, value: Tensor) -> _Operand:
        return _narrow(value, [half[:, : columns.stop - columns.start] for half in block_halves])

    def block_of(columns: slice) -> Tensor:
        return y[:, : columns.stop - columns.start].copy_(d[:, columns])

    core_operand = _Operand(core)
    if shape.frozen_rank:
        for columns in _blocks(shape.large, shape.merge_columns):
            part = operand(columns, block_of(columns))
            _product_of_halves(core, part, frozen.columns(columns).T, beta=int(columns.start > 0))
        core_operand = _narrow(core, core_halves)
    if is_halved:  # `core` and each `y` are needed as halves alone
        carve.at = start
        y = carve(block_size, drift.dtype, shape.is_mirrored)
        carve.at = start
    delta = carve((shape.small, shape.merge_columns), drift.dtype, shape.is_mirrored)
    for columns in _blocks(shape.large, shape.merge_columns):
        block = block_of(columns)
        if shape.frozen_rank:
            _product_of_halves(block, core_operand, frozen.columns(columns), beta=1, alpha=-1)
        result = delta[:, : columns.stop - columns.start]
        _product_of_halves(result, free, operand(columns, block))
        yield columns, result


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that products are summed in, and of the drift."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _narrow(value: Tensor, into: list[Tensor]) -> _Operand:
    """The operand with this value: its halves, written to the two tensors in `into`. They consume the value."""
    if not into:
        return _Operand(value)
    hi, lo = into
    hi.copy_(value)
    lo.copy_(value.sub_(hi))
    return _Operand(hi, lo)


def _product_of_halves(out: Tensor, a: _Operand, b: _Operand, *, beta: int = 0, alpha: int = 1) -> None:
    _product(out, a.hi, b.hi, beta=beta, alpha=alpha)
    if a.lo is not None and b.lo is not None:
        _product(out, a.hi, b.lo, beta=1, alpha=alpha)
        _product(out, a.lo, b.hi, beta=1, alpha=alpha)


def _product(out: Tensor, a: Tensor, b: Tensor, *, beta: int = 0, alpha: int = 1) -> None:
    """out = beta * out + alpha * a @ b. bf16 operands are summed in fp32, to an fp32 `out`."""
    if not out.numel():
        return
    if not a.shape[1]:
        out.mul_(beta) if beta else out.zero_()
    elif a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
    elif a.is_cuda and _adds_in_place(a.device):
        _aten.addmm.dtype_out(out, a, b, out.dtype, beta=beta, alpha=alpha, out=out)
    elif a.is_cuda and not beta and alpha == 1:
        _aten.mm.dtype_out(a, b, out.dtype, out=out)
    elif a.is_cuda:
        product = _aten.mm.dtype(a, b, out.dtype).mul_(alpha)
        out.copy_(product) if not beta else out.add_(product)
    else:
        for part in _blocks(a.shape[1], _WIDENED_LENGTH):
            first, second = a[:, part].to(out.dtype), b[part].to(out.dtype)
            torch.addmm(out, first, second, beta=1 if part.start else beta, alpha=alpha, out=out)


@cache
def _adds_in_place(device: torch.device) -> bool:
    """Whether this torch adds a product of bf16 matrices to an fp32 one. Others need memory for the product."""
    out, a = torch.zeros(16, 16, device=device), torch.zeros(16, 16, device=device, dtype=torch.bfloat16)
    try:
        _aten.addmm.dtype_out(out, a, a, torch.float32, out=out)
    except RuntimeError as error:
        log.info("torch %s adds no bf16 product in place: %s", torch.__version__, error)
        return False
    return True


def _blocks(length: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, length)) for start in range(0, length, max(step, 1)))


class _Carver:
    """Cuts matrices from a workspace, one behind the other."""

    def __init__(self, num_bytes: int, scratch: Tensor | None, like: Tensor):
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=like.device) if scratch is None else scratch
        assert self._buffer.numel() >= num_bytes, f"a scratch of {self._buffer.numel()} bytes; {num_bytes} are needed"
        self.at = 0

    def __call__(self, size: tuple[int, int], dtype: torch.dtype, is_transposed: bool = False) -> Tensor:
        """`is_transposed`: the matrix is laid out by columns."""
        num_bytes = size[0] * size[1] * dtype.itemsize
        flat = self._buffer[self.at : self.at + num_bytes].view(dtype)
        self.at += aligned_bytes(num_bytes)
        return flat.view(size[1], size[0]).T if is_transposed else flat.view(size)
