"""The published form of OSFT: W = U_h S_h V_h + U diag(S) V, where U, S and V train and stay orthogonal to U_h and V_h.

The model stays dense. The gradients of the factors follow from the gradient G of W, and are linear in it:

    dU = G Vᵀ diag(S)        dS = diag(Uᵀ G Vᵀ)        dV = (U diag(S))ᵀ G

Rows of W may be sharded. Then each process holds the same rows of U and U_h, and rows of V and V_h are sharded too. N,
the rows of W, is summed over in dS, dV and U_hᵀ dU: local products are partial sums. M is whole in every process, so a
product with V_h needs all of its rows, which are gathered.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from outsize.methods.osft.exact import exact_products
from outsize.methods.osft.row_shards import RowShards

_WHOLE = RowShards()


class FactorSplit(NamedTuple):
    """Frozen directions, and the factors of the rest."""

    frozen_u: Tensor
    """U_h: N × k."""
    frozen_v: Tensor
    """V_h: k × M."""
    u: Tensor
    s: Tensor
    v: Tensor


class FactorGradients(NamedTuple):
    u: Tensor
    s: Tensor
    v: Tensor


def split_factors(weight: Tensor, frozen_rank: int) -> FactorSplit:
    """By SVD, in fp32 (fp64 for fp64)."""
    left, values, right = torch.linalg.svd(weight if weight.dtype == torch.float64 else weight.float(), False)
    k = frozen_rank
    parts = left[:, :k], right[:k], left[:, k:], values[k:], right[k:]
    return FactorSplit(*(part.contiguous() for part in parts))


def merge_factors(u: Tensor, s: Tensor, v: Tensor, shards: RowShards = _WHOLE) -> Tensor:
    """U diag(S) V: these rows of it."""
    with exact_products(u):
        return (u * s) @ shards.gather(v, len(s))


def contract_factors(gradient: Tensor, u: Tensor, s: Tensor, v: Tensor, shards: RowShards = _WHOLE) -> FactorGradients:
    """dU, dS and dV from rows of the dense gradient. dS is a partial sum: the caller sums it over the shards."""
    g = gradient.to(u.dtype)
    with exact_products(u):
        product = g @ shards.gather(v, len(s)).T
        return FactorGradients(product * s, (u * product).sum(0), shards.sum_to_rows((u * s).T @ g))


def project_u(values: Sequence[Tensor], frozen_u: Sequence[Tensor], shards: RowShards = _WHOLE) -> None:
    """x - U_h (U_hᵀ x) in place, for all weights at once: one all-reduce."""
    if not values:
        return
    with exact_products(values[0]):
        products = [u.T @ x for x, u in zip(values, frozen_u, strict=True)]
        shards.sum_all(products)
        for x, u, product in zip(values, frozen_u, products, strict=True):
            x.addmm_(u, product, alpha=-1)


def project_v(value: Tensor, frozen_v: Tensor, frozen_rank: int, shards: RowShards = _WHOLE) -> None:
    """x - (x V_hᵀ) V_h in place. `frozen_rank`: rows of V_h over all shards, which are gathered."""
    rows = shards.gather(frozen_v, frozen_rank)
    with exact_products(value):
        value.addmm_(value @ rows.T, rows, alpha=-1)
