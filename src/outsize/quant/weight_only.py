"""Weight-only products: the weight is dequantized, then multiplied in the dtype of the input.

This is not LLM.int8 and not fp8 training: activations are not quantized. The autograd functions of bitsandbytes and
transformers keep their input where activation strategies cannot see it, or need kernels for one kind of GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Dequantize = Callable[[Tensor, Tensor, torch.dtype], Tensor]
"""Takes a weight, its scales and the dtype of the result."""


class WeightOnlyLinear(torch.autograd.Function):
    """A linear layer with a frozen quantized weight, which is dequantized in forward and again in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dequantize: Dequantize
    ) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.dequantize, ctx.bias_dtype = dequantize, None if bias is None else bias.dtype
        return F.linear(x, dequantize(weight, scale, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
        weight, scale = ctx.saved_tensors
        of_x = grad @ ctx.dequantize(weight, scale, grad.dtype) if ctx.needs_input_grad[0] else None
        of_bias = grad.reshape(-1, grad.shape[-1]).sum(0, dtype=ctx.bias_dtype) if ctx.needs_input_grad[3] else None
        return of_x, None, None, of_bias, None


def weight_only_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dequantize: Dequantize) -> Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    found: Tensor = WeightOnlyLinear.apply(x, weight, scale, bias, dequantize)
    return found


def dequantize_rows(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """int8 weights, whose rows have one scale: the absolute value that 127 stands for."""
    # Not `weight.to`, which bitsandbytes' weights have replaced: theirs makes a weight of the result.
    return Tensor.to(weight, dtype).mul_((scale * (1 / 127)).unsqueeze(1))


class WeightOnly(nn.Module):
    """A layer that dequantizes its weight for each use."""

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        """The weight in this dtype, of shape (outputs, inputs)."""
        raise NotImplementedError


class Fp8Linear(nn.Linear, WeightOnly):
    """A linear layer whose weight is fp8 (e4m3) with one scale (`weight_scale_inv`) per block of rows and columns, as
    transformers' FineGrainedFP8 stores it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: nn.Parameter | None,
        block: tuple[int, int],
        scale_dtype: torch.dtype,
        compute_dtype: torch.dtype,
    ):
        super().__init__(in_features, out_features, bias=False, device="meta")
        self.register_parameter("bias", bias)
        self.block = block
        self.compute_dtype = compute_dtype
        """PEFT makes adapters in this dtype."""
        weight = torch.empty(out_features, in_features, dtype=torch.float8_e4m3fn, device="meta")
        scale = torch.empty(-(-out_features // block[0]), -(-in_features // block[1]), dtype=scale_dtype, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return weight_only_linear(x, self.weight, self.weight_scale_inv, self.bias, self._dequantize)

    def dense_weight(self, dtype: torch.dtype) -> Tensor:
        return self._dequantize(self.weight, self.weight_scale_inv, dtype)

    def _dequantize(self, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        (rows, columns), (height, width) = weight.shape, self.block
        # One scale per row and block of columns, which is little: expanded over columns, they would be a second weight.
        scale = scale.float().unsqueeze(1).expand(-1, height, -1).flatten(0, 1)[:rows]
        found, whole = weight.to(dtype), columns - columns % width
        found[:, :whole].unflatten(1, (-1, width)).mul_(scale[:, : whole // width, None])
        if whole < columns:
            found[:, whole:].mul_(scale[:, -1:])
        return found
