"""Bases of the frozen and free directions of a weight, and how they are computed.

For a weight W0 of N rows and M columns, N ≤ M, and k frozen directions: U_h holds the k left singular directions of the
largest singular values, V_h an orthonormal basis of the rows of U_hᵀ W0, and Q the orthonormal complement of U_h. For
N > M all of this is mirrored. Only Q (`free`) and V_h (`frozen`) are kept; the smaller side needs no frozen basis.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from outsize.methods.osft.exact import exact_products
from outsize.methods.osft.shape import SplitShape

Decomposition = Literal["eigh", "svd"]
_LEAST_SCALED_EXPONENT = 24
"""Weights whose largest element is from 2^-24 to 2^24 are decomposed as they are."""


@dataclass(frozen=True, slots=True)
class Bases:
    """The bases of one weight. For bf16 weights each is a sum of two bf16 halves, else one tensor of the weight's dtype
    (fp32 or fp64) and no lower half.
    """

    shape: SplitShape
    free: Tensor
    """Q, `shape.free`: the upper half, or all of it."""
    frozen: Tensor
    """H, `shape.frozen`."""
    free_lo: Tensor | None = None
    frozen_lo: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        named = {"free": self.free, "frozen": self.frozen, "free_lo": self.free_lo, "frozen_lo": self.frozen_lo}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def halves(whole: Tensor) -> tuple[Tensor, Tensor]:
    """The upper and lower bf16 half of an fp32 tensor, whose sum has about 16 correct bits."""
    upper = whole.to(torch.bfloat16)
    return upper, (whole - upper).to(torch.bfloat16)


@torch.no_grad()
def split(
    weight: Tensor, frozen_rank: int, *, is_transposed: bool = False, decomposition: Decomposition = "eigh"
) -> Bases:
    """Compute the bases of a weight, on its device. `frozen_rank`: k, from 0 to min(weight.shape).

    `eigh` decomposes the Gram matrix of the smaller side, `svd` the weight. Different machines give different bases:
    store them with a run.
    """
    rows, columns = weight.shape
    shape = SplitShape(rows, columns, frozen_rank, is_transposed)
    assert 0 <= frozen_rank <= shape.small, (weight.shape, frozen_rank)
    flat = weight.detach().T if shape.is_mirrored else weight.detach()
    matrix = flat if weight.dtype == torch.float64 else flat.float()
    matrix = _in_range(matrix)
    with exact_products(matrix):
        left, frozen = _by_svd(matrix, frozen_rank) if decomposition == "svd" else _by_eigh(matrix, frozen_rank)
    free, frozen = left[:, frozen_rank:].contiguous(), frozen.contiguous()
    if weight.dtype != torch.bfloat16:
        return Bases(shape, free.to(weight.dtype), frozen.to(weight.dtype))
    (free, free_lo), (frozen, frozen_lo) = halves(free), halves(frozen)
    return Bases(shape, free, frozen, free_lo, frozen_lo)


def _in_range(matrix: Tensor) -> Tensor:
    """The matrix, multiplied by a power of two if its products could overflow or vanish. Its bases are the same."""
    largest = float(matrix.abs().amax())
    exponent = math.frexp(largest)[1]
    if not largest or abs(exponent) < _LEAST_SCALED_EXPONENT:
        return matrix
    half = -exponent // 2  # in two steps: the whole factor may itself be out of range
    return matrix.mul(2.0**half).mul_(2.0 ** (-exponent - half))


def _by_svd(matrix: Tensor, frozen_rank: int) -> tuple[Tensor, Tensor]:
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    return left, right[:frozen_rank]


def _by_eigh(matrix: Tensor, frozen_rank: int) -> tuple[Tensor, Tensor]:
    """All left directions, by descending singular value, and a basis of the frozen right ones."""
    left = torch.linalg.eigh(matrix @ matrix.T)[1].flip(1)
    # One Newton-Schulz step: in fp32, eigh's vectors are orthonormal to 1e-5 only.
    left = left.mul(1.5).sub_(left @ (left.T @ left), alpha=0.5)
    # Of the left basis as computed, so that both sides match whatever its error.
    return left, torch.linalg.qr((left[:, :frozen_rank].T @ matrix).T)[0].T
