"""The gradient norm: the same bits in C, in torch and in the reference, however gradients are cut."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranges import adversarial, kernels
from torch import Tensor, nn

from outsize.device.observer import Observer
from outsize.layout.norm import SEGMENT_NUMEL, norm_parts, num_segments
from outsize.optim.native import kernel
from outsize.optim.norm import GradientNorm, not_finite, segment_sums
from outsize.reference import SGD

BF16, FP32 = torch.bfloat16, torch.float32
ODD = [0, 1, 2, 3, 4095, 4096, 4097, 8191, 65536, 65537, 200_001]


def sums_of(grad: Tensor, which: str = "best", scratch: int = 3 * SEGMENT_NUMEL) -> Tensor:
    sums = torch.full((num_segments(grad.numel()),), -1.0)
    with kernels(which):
        assert (kernel() is not None) == (which == "best")
        segment_sums(grad, sums, torch.empty(max(scratch, min(grad.numel(), SEGMENT_NUMEL))))
    return sums


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(-1.0), b.nan_to_num(-1.0))


def measured(grads: dict[str, Tensor | None]) -> GradientNorm:
    norm = GradientNorm({name: 5 if grad is None else grad.numel() for name, grad in grads.items()}, None)
    for name, grad in reversed(grads.items()):
        if grad is not None:
            norm.measure(name, grad)
    norm.measure_total(without=[name for name, grad in grads.items() if grad is None])
    return norm


def in_reference(grads: dict[str, Tensor | None]) -> float:
    params = [nn.Parameter(torch.zeros(5) if grad is None else torch.zeros_like(grad)) for grad in grads.values()]
    optimizer = SGD(params, lr=0.0, nonfinite="skip")
    for param, grad in zip(params, grads.values(), strict=True):
        param.grad = grad
    optimizer.step()
    return optimizer.grad_norm.item()


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("numel", ODD)
def test_c_and_torch_make_the_same_sums(numel: int, dtype: torch.dtype) -> None:
    for grad in (torch.randn(numel).to(dtype), adversarial(numel, weight=FP32, grad=dtype, seed=numel).grad):
        by_c = sums_of(grad)
        assert same(by_c, sums_of(grad, "torch"))
        assert same(by_c, sums_of(grad, "torch", scratch=7 * SEGMENT_NUMEL + 1))
        exact = [part.double().square().sum() for part in grad.split(SEGMENT_NUMEL)] if numel else []
        for found, wanted in zip(by_c.double(), exact, strict=True):
            assert not math.isfinite(wanted) or wanted > 1e38 or found == pytest.approx(float(wanted), rel=2e-6)


def test_sums_are_made_in_the_order_that_is_documented() -> None:
    grad = torch.randn(SEGMENT_NUMEL + 1000)
    squares = [*(grad * grad).tolist(), *[0.0] * (SEGMENT_NUMEL - 1000)]
    for segment, found in zip((squares[:SEGMENT_NUMEL], squares[SEGMENT_NUMEL:]), sums_of(grad).tolist(), strict=True):
        values = torch.tensor(segment).tolist()
        while len(values) > 1:
            half = len(values) // 2
            values = [
                float(torch.tensor(a) + torch.tensor(b)) for a, b in zip(values[:half], values[half:], strict=True)
            ]
        assert values == [found]


@given(
    sizes=st.lists(st.one_of(st.none(), st.integers(0, 9000)), min_size=0, max_size=9),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([BF16, FP32]),
)
def test_the_norm_is_the_references_and_close_to_the_exact_one(
    sizes: list[int | None], seed: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    grads = {str(i): None if size is None else torch.randn(size).to(dtype) for i, size in enumerate(sizes)}
    total = measured(grads).total.item()
    if grads:
        assert total == in_reference(grads)
    exact = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values() if g is not None))
    assert total == pytest.approx(exact, rel=1e-6)


@given(cuts=st.lists(st.integers(0, 12), max_size=4), numel=st.integers(1, 50_000))
def test_the_norm_does_not_depend_on_how_a_parameter_is_cut(cuts: list[int], numel: int) -> None:
    """At segments, as shards would be."""
    grad = torch.randn(numel)
    whole = measured({"a": grad})
    ends = [0, *sorted(min(cut * SEGMENT_NUMEL, numel) for cut in cuts), numel]
    parts = measured({str(i): grad[start:end] for i, (start, end) in enumerate(itertools.pairwise(ends))})
    assert torch.equal(parts.sums, whole.sums) and torch.equal(parts.total, whole.total)


def test_a_permuted_parameter_counts_in_the_order_of_its_memory() -> None:
    grad = torch.randn(7, 90, 3, 5).to(memory_format=torch.channels_last)
    assert not grad.is_contiguous()
    total = measured({"a": grad}).total.item()
    assert total == in_reference({"a": grad}) == measured({"a": grad.permute(0, 2, 3, 1).reshape(-1)}).total.item()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_parameters_that_are_not_finite_are_found(value: float) -> None:
    grads: dict[str, Tensor | None] = {name: torch.randn(10_000) for name in "abcd"} | {"e": None}
    assert (norm := measured(grads)).total.isfinite() and not_finite(norm.sums, norm.slices) == []
    for name, at in (("b", 0), ("d", 9_999)):
        grad = grads[name]
        assert grad is not None
        grad[at] = value
    norm = measured(grads)
    assert not norm.total.isfinite() and not_finite(norm.sums, norm.slices) == ["b", "d"]


@pytest.mark.parametrize("which", ["best", "torch"])
def test_nothing_is_allocated(which: str) -> None:
    grads = {"a": torch.randn(300_000), "b": torch.randn(100).bfloat16()}
    buffer = torch.empty(sum(norm_parts([300_000, 100])), dtype=torch.uint8)
    with kernels(which), Observer() as observer:
        observer.adopt(buffer)
        for grad in grads.values():
            observer.adopt(grad)
        held = observer.peak_bytes
        norm = GradientNorm({name: grad.numel() for name, grad in grads.items()}, buffer)
        for name, grad in grads.items():
            norm.measure(name, grad)
        norm.measure_total(without=["b"])
        assert observer.peak_bytes == held
