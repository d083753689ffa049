"""Cross-entropy in chunks is torch's cross-entropy of the product, with its gradients, in the memory of one chunk."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from outsize.device.observer import Observer
from outsize.loss.cross_entropy import LogitStep, chunk_tokens, cross_entropy

TOKENS, HIDDEN, VOCAB = 23, 8, 31
STEPS: dict[str, tuple[LogitStep, ...]] = {
    "none": (),
    "scaled": (("mul", 3.0), ("div", 7)),
    "capped": (("div", 2.0), ("tanh", None), ("mul", 2.0)),
    "cast": (("mul", 0.5), ("to", torch.float32)),
}


def inputs(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    hidden, weight, offset = torch.randn(TOKENS, HIDDEN), torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB)
    targets = torch.randint(0, VOCAB, (TOKENS,))
    targets[::4] = -100
    hidden, weight, offset = (t.to(dtype).requires_grad_() for t in (hidden, weight, offset))
    return hidden, weight, offset if bias else None, targets


def full(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    steps: tuple[LogitStep, ...] = (),
    num_items: Any = None,
) -> Tensor:
    logits = linear(hidden, weight, bias)
    for name, value in steps:
        logits = getattr(logits, name)(*([] if name == "tanh" else [value]))
    loss = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="mean" if num_items is None else "sum")
    return loss if num_items is None else loss / num_items


def with_gradients(loss: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return [loss, *torch.autograd.grad(loss, [t for t in tensors if t is not None])]


def distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach(), expected.detach()
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 1000])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_it_is_the_cross_entropy_of_the_product(steps: tuple[LogitStep, ...], bias: bool, chunk: int) -> None:
    *tensors, targets = inputs(bias=bias)
    expected = with_gradients(full(*tensors, targets, steps=steps), *tensors)
    found = with_gradients(cross_entropy(*tensors, targets, chunk=chunk, steps=steps), *tensors)
    assert distance(found[0], expected[0]) < 1e-6 and found[0].dtype == expected[0].dtype
    assert all(
        distance(one, other) < 1e-5 and one.dtype == other.dtype
        for one, other in zip(found[1:], expected[1:], strict=True)
    )


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_in_bf16_it_is_about_as_near_to_fp32_as_torch_is(steps: tuple[LogitStep, ...]) -> None:
    """Gradients of weight and bias are rounded once per chunk, five times here, like those of five micro-batches."""
    *tensors, targets = inputs(torch.bfloat16, bias=True)
    truth = with_gradients(full(*(t.float() for t in tensors), targets, steps=steps), *tensors)  # type: ignore[union-attr]
    usual = with_gradients(full(*tensors, targets, steps=steps), *tensors)
    found = with_gradients(cross_entropy(*tensors, targets, chunk=5, steps=steps), *tensors)
    for one, other, true, factor in zip(found, usual, truth, (1.2, 1.2, 2.5, 2.5), strict=True):
        assert distance(one, true) < factor * distance(other, true) + 1e-6


@pytest.mark.parametrize("num_items", [40, 40.0, torch.tensor(40)], ids=["int", "float", "tensor"])
def test_the_sum_is_divided_by_the_items_of_the_whole_batch(num_items: Any) -> None:
    *tensors, targets = inputs()
    expected = with_gradients(full(*tensors, targets, num_items=num_items), *tensors)
    found = with_gradients(cross_entropy(*tensors, targets, chunk=7, num_items=num_items), *tensors)
    assert all(distance(one, other) < 1e-6 for one, other in zip(found, expected, strict=True))


def test_a_chunk_in_which_nothing_counts_adds_nothing() -> None:
    *tensors, targets = inputs()
    targets[5:10] = -100
    expected = with_gradients(full(*tensors, targets), *tensors)
    found = with_gradients(cross_entropy(*tensors, targets, chunk=5), *tensors)
    assert all(distance(one, other) < 1e-5 for one, other in zip(found, expected, strict=True))
    assert not found[1][5:10].any()


def test_a_batch_in_which_nothing_counts_has_no_mean_and_no_gradient_as_in_torch() -> None:
    *tensors, targets = inputs()
    targets.fill_(-100)
    for loss in (full(*tensors, targets), cross_entropy(*tensors, targets, chunk=5)):
        value, *grads = with_gradients(loss, *tensors)
        assert value.isnan() and not any(grad.any() for grad in grads)


def test_the_incoming_gradient_is_not_rounded_to_bf16() -> None:
    """A third is not a bf16 number; as a scalar tensor it would become one."""
    *tensors, targets = inputs(torch.bfloat16)
    ones = with_gradients(cross_entropy(*tensors, targets, chunk=5), *tensors)[1:]
    thirds = with_gradients(cross_entropy(*tensors, targets, chunk=5) / 3, *tensors)[1:]
    assert all(
        torch.equal(third, (one.float() * torch.tensor(1 / 3)).bfloat16())
        for one, third in zip(ones, thirds, strict=True)
    )


def test_the_gradient_of_a_sure_model_is_not_lost_in_rounding() -> None:
    hidden, targets = torch.eye(4, dtype=torch.bfloat16).requires_grad_(), torch.arange(4)
    weight = (torch.eye(4) * 9).bfloat16()  # probabilities of 0.9996, which is 1 in bf16
    found = with_gradients(cross_entropy(hidden, weight, None, targets, chunk=2), hidden)
    assert distance(found[1], with_gradients(full(hidden.float(), weight.float(), None, targets), hidden)[1]) < 0.01


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(trained: str) -> None:
    hidden, weight, _, targets = inputs()
    frozen = weight if trained == "hidden" else hidden
    frozen.requires_grad_(False)
    cross_entropy(hidden, weight, None, targets, chunk=5).backward()
    assert frozen.grad is None and (hidden if trained == "hidden" else weight).grad is not None


def test_a_second_backward_is_refused() -> None:
    *tensors, targets = inputs()
    loss = cross_entropy(*tensors, targets, chunk=5)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_it_takes_the_memory_of_one_chunk_and_of_the_gradients(dtype: torch.dtype, frozen: bool) -> None:
    tokens, hidden, vocab, chunk = 1024, 8, 512, 64
    x, weight = (
        torch.randn(tokens, hidden, dtype=dtype, requires_grad=True),
        torch.randn(vocab, hidden, dtype=dtype, requires_grad=not frozen),
    )
    targets = torch.randint(0, vocab, (tokens,))
    with Observer() as seen:
        loss = cross_entropy(x, weight, None, targets, chunk=chunk)
        peak, kept = seen.peak_bytes, seen.live_bytes
        seen.reset_peak()
        loss.backward()
        assert seen.peak_bytes <= kept + 8
    gradients = x.nbytes + (0 if frozen else weight.nbytes)
    assert kept <= gradients + 8
    small = (
        tokens * (1 + 8 + 4 + 4) + 20 * chunk * 8
    )  # whether a token counts, its target, share and loss; a few numbers of each in the chunk
    logits = chunk * vocab * (4 if dtype == torch.float32 else 2 + 4)
    assert peak <= gradients + logits + small


def test_it_runs_on_shapes_alone() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        hidden, weight = torch.empty(64, 8, requires_grad=True), torch.empty(31, 8, requires_grad=True)
        loss = cross_entropy(hidden, weight, None, torch.zeros(64, dtype=torch.int64), chunk=16, steps=STEPS["capped"])
        loss.backward()
        assert loss.shape == () and weight.grad is not None and weight.grad.shape == weight.shape


@pytest.mark.parametrize(
    ("vocab", "tokens"), [(32000, 4096), (50257, 2560), (128256, 1024), (151936, 1024), (262144, 1024)]
)
def test_chunks_follow_from_the_vocabulary(vocab: int, tokens: int) -> None:
    assert chunk_tokens(vocab) == tokens
