"""The distillation loss in chunks against torch's own from full logits."""

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from outsize.loss.distillation import Mixture, TeacherHead, chunk_tokens, distillation

VOCAB, STUDENT, TEACHER, TOKENS = 37, 12, 20, 23

CAPPED = (("div", 3.0), ("tanh", None), ("mul", 3.0))


def inputs(dtype=torch.float64, bias=True):
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, STUDENT, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, STUDENT, dtype=dtype, requires_grad=True)
    offset = torch.randn(VOCAB, dtype=dtype, requires_grad=True) if bias else None
    targets = torch.randint(VOCAB, (TOKENS,))
    targets[::5] = -100
    return hidden, weight, offset, targets


def teacher_of(dtype=torch.float64, steps=()):
    torch.manual_seed(1)
    head = TeacherHead(torch.randn(VOCAB, TEACHER, dtype=dtype), torch.randn(VOCAB, dtype=dtype), steps)
    return torch.randn(TOKENS, TEACHER, dtype=dtype), head


def capped(logits, steps):
    return torch.tanh(logits / 3.0) * 3.0 if steps else logits


def full(hidden, weight, bias, seen, head, targets, mixture, steps, num_items=None):
    logits = capped(torch.nn.functional.linear(hidden, weight, bias), steps)
    expected = capped(torch.nn.functional.linear(seen, head.weight, head.bias), head.steps)
    rows = targets != -100
    t = mixture.temperature
    kl = kl_div(
        (logits / t).log_softmax(-1)[rows], (expected / t).log_softmax(-1)[rows], log_target=True, reduction="sum"
    )
    ce = cross_entropy(logits, targets, reduction="sum")
    return (mixture.alpha * t**2 * kl + (1 - mixture.alpha) * ce) / (rows.sum() if num_items is None else num_items)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("alpha, temperature", [(0.0, 1.0), (1.0, 1.0), (0.7, 2.0), (0.3, 0.5)])
@pytest.mark.parametrize("steps", [(), CAPPED], ids=["plain", "capped"])
def test_equals_full_logits_in_fp64(chunk, alpha, temperature, steps):
    mixture = Mixture(alpha, temperature)
    hidden, weight, bias, targets = inputs()
    seen, head = teacher_of(steps=steps)
    expected = full(hidden, weight, bias, seen, head, targets, mixture, steps)
    reference = torch.autograd.grad(2.5 * expected, (hidden, weight, bias))
    loss = distillation(hidden, weight, bias, seen, head, targets, mixture=mixture, chunk=chunk, steps=steps)
    found = torch.autograd.grad(2.5 * loss, (hidden, weight, bias))
    torch.testing.assert_close(loss, expected.to(loss.dtype), rtol=1e-12, atol=1e-12)
    for one, other in zip(found, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class _Largest(TorchDispatchMode):
    """The elements of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_flatten(made)[0] if isinstance(each, torch.Tensor)]
        self.numel = max([self.numel, *(each.numel() for each in tensors)])
        return made


def test_the_logits_of_neither_model_exist():
    vocab, tokens, chunk = 400, 300, 20
    hidden, seen = torch.randn(tokens, 8, requires_grad=True), torch.randn(tokens, 8)
    weight, head = torch.randn(vocab, 8, requires_grad=True), TeacherHead(torch.randn(vocab, 8), None)
    targets = torch.randint(vocab, (tokens,))
    with _Largest() as largest:
        distillation(hidden, weight, None, seen, head, targets, mixture=Mixture(0.5, 2.0), chunk=chunk).backward()
    assert chunk * vocab <= largest.numel < 2 * chunk * vocab < tokens * vocab


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rounding_of_low_precision(dtype, bound):
    mixture = Mixture(0.6, 1.5)
    hidden, weight, bias, targets = inputs(dtype)
    seen, head = teacher_of(dtype)
    double = [each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    exact_head = TeacherHead(head.weight.double(), head.bias.double())
    expected = full(*double, seen.double(), exact_head, targets, mixture, ())
    expected.backward()
    loss = distillation(hidden, weight, bias, seen, head, targets, mixture=mixture, chunk=8)
    loss.backward()
    assert loss.dtype == torch.float32
    assert abs(loss.item() - expected.item()) <= bound * abs(expected.item())
    for one, other in zip((hidden, weight, bias), double, strict=True):
        assert (one.grad.double() - other.grad).norm() <= bound * other.grad.norm()


def test_equal_models_have_no_kl_and_no_gradient():
    hidden, weight, bias, targets = inputs(torch.float32)
    head = TeacherHead(weight.detach(), bias.detach())
    loss = distillation(hidden, weight, bias, hidden.detach(), head, targets, mixture=Mixture(1.0, 2.0), chunk=8)
    loss.backward()
    assert loss.item() == 0 and not weight.grad.any() and not hidden.grad.any()


def test_number_of_items_and_no_targets():
    hidden, weight, _, targets = inputs(bias=False)
    seen, head = teacher_of()
    mixture = Mixture(0.5)
    whole = distillation(hidden, weight, None, seen, head, targets, mixture=mixture, chunk=8, num_items=10)
    torch.testing.assert_close(
        whole, full(hidden, weight, None, seen, head, targets, mixture, (), 10), rtol=1e-12, atol=1e-12
    )
    none = distillation(
        hidden, weight, None, seen, head, torch.full_like(targets, -100), mixture=mixture, chunk=8, num_items=10
    )
    none.backward()
    assert none.item() == 0 and not weight.grad.any()


def test_refusals():
    hidden, weight, bias, targets = inputs()
    seen, head = teacher_of()
    other = TeacherHead(head.weight[:-1], None)
    with pytest.raises(ValueError, match=r"The teacher has 36 tokens in its vocabulary and the student 37"):
        distillation(hidden, weight, bias, seen, other, targets, mixture=Mixture(), chunk=8)
    with pytest.raises(ValueError, match=r"alpha is 1\.5"):
        Mixture(1.5)
    with pytest.raises(ValueError, match="temperature is 0"):
        Mixture(0.5, 0.0)


def test_chunk_depends_on_the_vocabulary_only():
    assert chunk_tokens(128_256) == 256 and chunk_tokens(32_000) == 1280
