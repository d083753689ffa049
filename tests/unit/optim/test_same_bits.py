"""Torch's kernel and C's make the same bits of the same values, whatever they are. Triton's joins in on the GPU
(tests/gpu/test_kernels.py).
"""

import logging
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranges import HYPERS, Range, adversarial, as_fp32, assert_same, kernels, step

from outsize.optim.adamw import RULE
from outsize.optim.native import kernel
from outsize.optim.rule import Numbers, gpu_kernel

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = [(weight, grad) for weight in (BF16, FP32) for grad in (BF16, FP32)]


def compare(start: Range, hyper: Numbers, clip: float, said: str = "") -> Range:
    by_c, by_torch = start.each(torch.clone), start.each(torch.clone)
    with kernels("best"):
        assert kernel() is not None
        step(by_c, hyper, clip)
    with kernels("torch"):
        step(by_torch, hyper, clip)
    assert_same(by_c, by_torch, said)
    return by_c


@pytest.mark.parametrize("weight, grad", KINDS, ids=str)
def test_adversarial_values_give_the_same_bits(weight: torch.dtype, grad: torch.dtype) -> None:
    """Three pieces of C and a ragged end; every bf16 gradient and every remainder."""
    start = adversarial(150_001, weight=weight, grad=grad)
    for name, hyper in HYPERS.items():
        for clip in (1.0, 0.37109375):
            done = compare(start, hyper, clip, f"{name}, clip {clip}")
    finite = float(done.weight.isfinite().float().mean())
    assert 0.2 < finite < 1, "the values are neither all broken nor all tame"


@pytest.mark.parametrize("numel", [0, 1, 2, 15, 16, 17, 33, 1000])
@pytest.mark.parametrize("weight, grad", KINDS, ids=str)
def test_odd_lengths_and_unaligned_starts_touch_their_range_only(
    weight: torch.dtype, grad: torch.dtype, numel: int
) -> None:
    start = adversarial(numel + 32, weight=weight, grad=grad, seed=numel)
    for offset in (0, 1, 5, 8):
        by_c, by_torch = start.each(torch.clone), start.each(torch.clone)
        for which, state in (("best", by_c), ("torch", by_torch)):
            with kernels(which):
                step(state.each(lambda t, at=offset: t[at : at + numel]), HYPERS["usual"], 0.37109375)
        assert_same(by_c, by_torch, f"from {offset}")


words = st.integers(0, 2**32 - 1)
factors = st.floats(0, 1, width=32)


@given(
    rows=st.lists(st.tuples(words, words, words, words), min_size=1, max_size=40),
    kind=st.sampled_from(KINDS),
    hyper=st.builds(
        RULE.numbers,
        st.fixed_dictionaries(
            {
                "lr": st.floats(0, 10),
                "betas": st.tuples(st.floats(0, 0.9999), st.floats(0, 0.9999)),
                "eps": st.floats(0, 1),
                "weight_decay": st.floats(0, 1),
            }
        ),
        st.integers(1, 10**7),
    ),
    clip=factors,
)
def test_any_bits_and_any_scalars_give_the_same_bits(
    rows: list[tuple[int, int, int, int]], kind: tuple[torch.dtype, torch.dtype], hyper: Numbers, clip: float
) -> None:
    master, m, v, g = (as_fp32(torch.tensor(column)) for column in zip(*rows, strict=True))
    halves = master.view(torch.int16)
    weight, lo = (halves[1::2].clone().view(BF16), halves[0::2].clone()) if kind[0] == BF16 else (master, None)
    gradient = g.view(torch.int16)[1::2].clone().view(BF16) if kind[1] == BF16 else g
    compare(Range(weight, lo, m, v, gradient), hyper, clip)


def test_a_nan_has_one_form_in_a_split_master() -> None:
    state = adversarial(65536, weight=BF16, grad=BF16)
    state.grad.fill_(float("nan"))
    done = compare(state, HYPERS["usual"], 1.0)
    assert done.lo is not None and (done.weight.view(torch.int16) == 0x7FC0).all() and not done.lo.any()


def test_the_comparison_sees_a_fused_operation() -> None:
    """(m*b1) + (g*o1) rounded once instead of twice: a kernel that contracts it would not pass above."""
    state, hyper = adversarial(65536, weight=FP32, grad=FP32), HYPERS["usual"]
    m, g = state.m.clone(), state.grad.clone()
    with kernels("torch"):
        step(state, hyper, 1.0)
    fused = (m.double() * hyper[0] + (g * hyper[2]).double()).float()
    with pytest.raises(AssertionError, match="'m'"):
        assert_same(replace(state, m=fused), state)


def test_without_triton_torch_is_used_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it raises
    monkeypatch.delitem(sys.modules, "outsize.optim.triton_kernel", raising=False)
    with kernels("best"), caplog.at_level(logging.WARNING):
        assert gpu_kernel() is None and gpu_kernel() is None
    assert sum("Triton cannot be used" in record.getMessage() for record in caplog.records) == 1
