"""Split masters come back to the bit. All 2^32 patterns are in tools/split_exhaustive.c; here are all ties, all edges
and many random ones.
"""

import pytest
import torch
from torch import Tensor

from outsize.optim.split import join, join_into, split, split_into


def words(values: Tensor) -> Tensor:
    """fp32 values with the given bits; `values` are int64 in [0, 2**32)."""
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32).view(torch.float32)


def bits(master: Tensor) -> Tensor:
    return master.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def expected(master: Tensor) -> tuple[Tensor, Tensor]:
    """h and lo by the formula, in 64-bit integers that do not wrap."""
    b = torch.where(master.isnan(), 0x7FC00000, bits(master))
    h = ((b + 0x8000) & 0xFFFFFFFF) >> 16
    return h, b - (h << 16)


UPPER = torch.arange(65536, dtype=torch.int64) << 16
CASES = {
    "ties": words(UPPER + 0x8000),
    "just_below_ties": words(UPPER + 0x7FFF),
    "just_above_ties": words(UPPER + 0x8001),
    "exact_bf16": words(UPPER),
    "last_before_next": words(UPPER + 0xFFFF),
    "denormals": words(torch.arange(2**17, dtype=torch.int64) * 64 + 1),
    "negative_denormals": words(torch.arange(2**17, dtype=torch.int64) * 64 + 1 + 2**31),
    "edges": words(
        torch.tensor(
            [
                0,
                2**31,
                1,
                2**31 + 1,
                0x7FFFFF,
                0x800000,
                0x7F7FFFFF,
                0xFF7FFFFF,
                0x7F7F8000,
                0x7F7F7FFF,
                0x7F800000,
                0xFF800000,
            ]
        )
    ),
    "nans": words(
        torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7FFF8000, 0xFF800001, 0xFFC00000, 0xFFFF8000, 0xFFFFFFFF])
    ),
    "random": words(torch.randint(2**32, (3_000_000,), generator=torch.Generator().manual_seed(0))),
}


@pytest.mark.parametrize("name", CASES)
def test_split_follows_the_formula_and_join_restores_every_bit(name: str) -> None:
    master = CASES[name]
    hi, lo = split(master)
    assert hi.dtype == torch.bfloat16 and lo.dtype == torch.int16
    want_h, want_lo = expected(master)
    assert torch.equal(hi.view(torch.int16).to(torch.int64) & 0xFFFF, want_h)
    assert torch.equal(lo.to(torch.int64), want_lo)
    back, nan = join(hi, lo), master.isnan()
    assert torch.equal(bits(back)[~nan], bits(master)[~nan])
    assert torch.equal(back.isnan(), nan) and torch.equal(hi.isnan(), nan)


@pytest.mark.parametrize("name", CASES)
def test_in_place_forms_give_the_same_halves_and_the_same_master(name: str) -> None:
    master = CASES[name]
    hi, lo = split(master)
    got_hi, got_lo = torch.empty_like(hi), torch.empty_like(lo)
    split_into(master.clone(), hi=got_hi, lo=got_lo, mask=torch.empty(master.numel(), dtype=torch.bool))
    assert torch.equal(got_hi.view(torch.int16), hi.view(torch.int16)) and torch.equal(got_lo, lo)
    out = torch.empty_like(master)
    join_into(hi, lo, out=out)
    assert torch.equal(bits(out), bits(join(hi, lo)))


def test_nan_of_any_payload_becomes_the_quiet_nan_without_remainder() -> None:
    hi, lo = split(CASES["nans"])
    assert (hi.view(torch.int16) == 0x7FC0).all() and (lo == 0).all()


def test_largest_finite_value_rounds_to_infinity_and_comes_back_finite() -> None:
    master = torch.tensor([torch.finfo(torch.float32).max])
    hi, lo = split(master)
    assert hi.isinf().all() and torch.equal(join(hi, lo), master)


def test_bf16_value_is_its_own_master_with_no_remainder() -> None:
    weight = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    weight = weight[~weight.isnan()]
    hi, lo = split(weight.float())
    assert torch.equal(hi.view(torch.int16), weight.view(torch.int16)) and not lo.any()


def test_split_keeps_the_shape_and_takes_any_stride() -> None:
    master = torch.randn(5, 7).t()
    hi, lo = split(master)
    assert hi.shape == lo.shape == (7, 5)
    assert torch.equal(join(hi, lo), master)
