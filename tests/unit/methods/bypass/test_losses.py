"""methods/bypass/losses.py: values by hand, masks, scale, zeros."""

import pytest
import torch
from torch import Tensor

from outsize.methods.bypass.losses import LOSSES


def case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    output, target = (torch.randn(3, 5, 8, generator=rng) for _ in range(2))
    valid = torch.ones(3, 5, dtype=torch.bool)
    valid[0, 3:] = False
    valid[2] = False  # a row of padding alone
    return output, target, valid


def by_hand(name: str, output: Tensor, target: Tensor, valid: Tensor | None) -> float:
    valid = torch.ones(output.shape[:2], dtype=torch.bool) if valid is None else valid
    rows = [(o[v].double(), t[v].double()) for o, t, v in zip(output, target, valid, strict=True) if v.any()]
    o, t = (torch.cat(parts) for parts in zip(*rows, strict=True))
    if name == "nmse":
        return ((o - t).square().sum() / t.square().sum()).item()
    if name == "nmse_row":
        return sum(((o - t).square().sum() / t.square().sum()).item() for o, t in rows) / len(rows)
    if name == "nmse_token":
        return ((o - t).square().sum(-1) / t.square().sum(-1)).mean().item()
    if name == "mse":
        return (o - t).square().mean().item()
    return (1 - torch.nn.functional.cosine_similarity(o, t, dim=-1)).mean().item()


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", LOSSES)
def test_values(name: str, masked: bool) -> None:
    output, target, valid = case()
    given = valid if masked else None
    assert LOSSES[name](output, target, given).item() == pytest.approx(by_hand(name, output, target, given), rel=1e-5)
    half = LOSSES[name](output.bfloat16(), target.bfloat16(), given)  # in fp32, whatever the dtypes
    assert half.dtype == torch.float32
    rounded = by_hand(name, output.bfloat16(), target.bfloat16(), given)
    assert half.item() == pytest.approx(rounded, rel=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_padding_changes_neither_loss_nor_gradients(name: str) -> None:
    """D15."""
    output, target, valid = case()
    results = []
    for fill in (0.0, 1e30, torch.nan):
        own = output.masked_fill(~valid.unsqueeze(-1), fill).requires_grad_()
        loss = LOSSES[name](own, target.masked_fill(~valid.unsqueeze(-1), -fill), valid)
        loss.backward()
        results.append((loss.detach(), own.grad[valid]))
    for loss, grad in results[1:]:
        assert torch.equal(loss, results[0][0]) and torch.equal(grad, results[0][1])
    nothing = LOSSES[name](output.requires_grad_(), target, torch.zeros_like(valid))
    nothing.backward()
    assert nothing == 0 and output.grad.isfinite().all()


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "mse"])
def test_the_scale_does_not_matter(name: str) -> None:
    """D17."""
    output, target, valid = case()
    expected = LOSSES[name](output, target, valid).item()
    for scale in (1e-3, 0.1, 100.0, 1e6):
        assert LOSSES[name](output * scale, target * scale, valid).item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_a_target_of_zeros_is_finite(name: str) -> None:
    """D17."""
    output, target, valid = case()
    target[0] = 0
    for one in (target, torch.zeros_like(target)):
        own = output.clone().requires_grad_()
        loss = LOSSES[name](own, one, valid)
        loss.backward()
        assert loss.isfinite() and own.grad.isfinite().all()
        zero = torch.zeros_like(output, requires_grad=True)
        loss = LOSSES[name](zero, one, valid)
        loss.backward()
        assert loss.isfinite() and zero.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_outputs_have_no_loss_and_no_gradient(name: str, dtype: torch.dtype) -> None:
    """D16."""
    _, target, valid = case()
    output = target.to(dtype).requires_grad_()
    loss = LOSSES[name](output, target.to(dtype), valid)
    loss.backward()
    assert loss == 0 and not output.grad.any()
