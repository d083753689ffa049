"""The autograd function of weight-only products."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outsize.quant.weight_only import Fp8Linear, dequantize_rows, weight_only_linear

BF16 = torch.bfloat16


def layer(rows: int, columns: int, *, bias: bool) -> tuple[Tensor, Tensor, nn.Parameter | None]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(-127, 128, (rows, columns), generator=generator, dtype=torch.int8)
    scale = torch.rand(rows, generator=generator) + 0.1
    return weight, scale, nn.Parameter(torch.randn(rows, generator=generator).to(BF16)) if bias else None


@pytest.mark.parametrize("shape", [(5, 24), (2, 3, 24), (24,)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_as_a_linear_layer_of_the_dequantized_weight(shape: tuple[int, ...], bias: bool) -> None:
    weight, scale, b = layer(10, 24, bias=bias)
    dense = (weight.float() * (scale * (1 / 127))[:, None]).to(BF16)
    inputs = [
        torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(BF16).requires_grad_() for _ in range(2)
    ]
    y = weight_only_linear(inputs[0], weight, scale, b, dequantize_rows)
    want = F.linear(inputs[1], dense, b)
    assert torch.equal(y, want)
    leaves = [[x, *([b] if b is not None else [])] for x in inputs]
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(BF16)
    for mine, theirs in zip(
        torch.autograd.grad(y, leaves[0], seed), torch.autograd.grad(want, leaves[1], seed), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_it_saves_its_weight_and_scales_and_no_input() -> None:
    weight, scale, _ = layer(10, 24, bias=False)
    saved: list[Tensor] = []
    x = torch.randn(5, 24, dtype=BF16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        weight_only_linear(x, weight, scale, None, dequantize_rows)
    assert [t.data_ptr() for t in saved] == [weight.data_ptr(), scale.data_ptr()]


def test_weights_that_moved_in_between_are_read_where_they_are_saved() -> None:
    """As a slot that is loaded again before the backward of a layer."""
    weight, scale, _ = layer(10, 24, bias=False)
    slots = weight.clone(), scale.clone()
    x = torch.randn(5, 24, dtype=BF16, requires_grad=True)
    y = weight_only_linear(x, *slots, None, dequantize_rows)
    (want,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
    for slot in slots:
        slot.data.view(torch.uint8).fill_(0xFF)
    for slot, value in zip(slots, (weight, scale), strict=True):
        slot.data.copy_(value)
    assert torch.equal(torch.autograd.grad(y, x, torch.ones_like(y))[0], want)


def test_autocast_multiplies_in_its_dtype() -> None:
    weight, scale, b = layer(10, 24, bias=True)
    x = torch.randn(5, 24, requires_grad=True)
    with torch.autocast("cpu", BF16):
        y = weight_only_linear(x, weight, scale, b, dequantize_rows)
    assert y.dtype == BF16
    y.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_a_scale_holds_for_a_block_of_rows_and_columns() -> None:
    for rows, columns in ((8, 12), (7, 11), (3, 2), (1, 1)):
        linear = Fp8Linear(columns, rows, bias=None, block=(4, 3), scale_dtype=torch.float32, compute_dtype=BF16)
        assert linear.weight_scale_inv.shape == (-(-rows // 4), -(-columns // 3))
        codes = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
        scale = torch.rand(linear.weight_scale_inv.shape, generator=torch.Generator().manual_seed(1)) + 0.1
        linear.weight, linear.weight_scale_inv = (nn.Parameter(each, requires_grad=False) for each in (codes, scale))
        want = torch.stack(
            [torch.stack([codes[i, j].float() * scale[i // 4, j // 3] for j in range(columns)]) for i in range(rows)]
        )
        assert torch.equal(linear(torch.eye(columns)), want.t())
        assert torch.equal(linear(torch.eye(columns, dtype=BF16)), want.t().to(BF16))
