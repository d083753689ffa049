"""The kernels of every optimizer make the same bits: torch, C, and on a GPU Triton (tests/gpu/test_kernels.py)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranges import RULES, Range, adversarial, as_fp32, assert_same, kernels, step_rule

from outsize.optim.names import OPTIMIZERS, find_name, spec_class
from outsize.optim.native import kernel

BF16, FP32 = torch.bfloat16, torch.float32
KINDS = [(weight, grad) for weight in (BF16, FP32) for grad in (BF16, FP32)]


@pytest.mark.parametrize("weight, grad", KINDS, ids=str)
@pytest.mark.parametrize("name", RULES)
def test_adversarial_values_give_the_same_bits_in_c_and_torch(
    name: str, weight: torch.dtype, grad: torch.dtype
) -> None:
    start = adversarial(150_001, weight=weight, grad=grad)
    for clip in (1.0, 0.37109375):
        by_c, by_torch = start.each(torch.clone), start.each(torch.clone)
        with kernels("best"):
            assert kernel() is not None
            step_rule(name, by_c, clip)
        with kernels("torch"):
            step_rule(name, by_torch, clip)
        assert_same(by_c, by_torch, f"{name}, clip {clip}")


words = st.integers(0, 2**32 - 1)


@given(rows=st.lists(st.tuples(words, words, words, words), min_size=1, max_size=40), name=st.sampled_from(list(RULES)))
def test_any_bits_give_the_same_bits(rows: list[tuple[int, int, int, int]], name: str) -> None:
    master, m, v, g = (as_fp32(torch.tensor(column)) for column in zip(*rows, strict=True))
    halves = master.view(torch.int16)
    start = Range(halves[1::2].clone().view(BF16), halves[0::2].clone(), m, v, g)
    by_c, by_torch = start.each(torch.clone), start.each(torch.clone)
    with kernels("best"):
        step_rule(name, by_c, 0.5)
    with kernels("torch"):
        step_rule(name, by_torch, 0.5)
    assert_same(by_c, by_torch, name)


def test_every_optimizer_is_found_by_its_names() -> None:
    for name, (class_name, others) in OPTIMIZERS.items():
        assert spec_class(name).__name__ == class_name
        assert all(find_name(other) == name for other in (name, *others))
    assert find_name("adafactor") is None
