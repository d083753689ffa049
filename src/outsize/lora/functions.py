"""The autograd Functions of fused LoRA layers. Activations are in `save_for_backward`, so that recomputation, offload
and swap see them. Frozen weights are not (lora/base_weight.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from outsize.lora.projection import Mask, Projection

_aten = torch.ops.aten


class LoraLinear(torch.autograd.Function):
    """A projection that saves its input and its adapter. x Aᵀ is computed again in backward."""

    @staticmethod
    def forward(ctx: Any, projection: Projection, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        y, ctx.mask = projection.forward(x)
        ctx.projection = projection
        ctx.save_for_backward(x, a, b)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        projection: Projection = ctx.projection
        _, needs_x, *wanted = ctx.needs_input_grad
        dlow, da, db = projection.adapter_gradients(dy, x, ctx.mask, (a, b), wanted)
        dx = projection.input_gradient(dy, dlow, ctx.mask, a, x).view(x.shape) if needs_x else None
        return None, dx, da, db


@dataclass(frozen=True, slots=True)
class Activation:
    forward: Callable[[Tensor], Tensor]
    inplace: Callable[[Tensor], Any]
    backward_into: Callable[[Tensor, Tensor], Any]
    """Takes the gradient of the output and the input. Overwrites the former with the gradient of the latter."""


def _gelu(approximate: str) -> Activation:
    return Activation(
        lambda x: F.gelu(x, approximate=approximate),
        lambda x: _aten.gelu_(x, approximate=approximate),
        lambda dy, x: _aten.gelu_backward.grad_input(dy, x, approximate=approximate, grad_input=dy),
    )


ACTIVATIONS = {
    "silu": Activation(
        F.silu, lambda x: F.silu(x, inplace=True), lambda dy, x: _aten.silu_backward.grad_input(dy, x, grad_input=dy)
    ),
    "gelu": _gelu("none"),
    "gelu_tanh": _gelu("tanh"),
}


@dataclass(slots=True)
class GatedProjections:
    """A gated MLP in one call: down(activation(gate(x)) · up(x))."""

    gate: Projection
    up: Projection
    down: Projection
    activation: str
    up_first: bool
    """The module runs up before gate, which decides the order of their dropout masks."""

    @property
    def adapters(self) -> tuple[Tensor, ...]:
        return self.gate.a, self.gate.b, self.up.a, self.up.b, self.down.a, self.down.b

    def inner(self, x: Tensor) -> tuple[Tensor, Tensor, tuple[Mask | None, Mask | None]]:
        """gate(x), up(x) and their masks."""
        if self.up_first:
            up, up_mask = self.up.forward(x)
            gate, gate_mask = self.gate.forward(x)
        else:
            gate, gate_mask = self.gate.forward(x)
            up, up_mask = self.up.forward(x)
        return gate, up, (gate_mask, up_mask)


def gated_mlp(mlp: GatedProjections, x: Tensor) -> Tensor:
    """The MLP's output. Saves x, gate(x) and up(x); backward computes the input of `down` again."""
    if not torch.is_grad_enabled():
        gate, up, _ = mlp.inner(x)
        ACTIVATIONS[mlp.activation].inplace(gate)
        gate.mul_(up)
        del up
        return mlp.down.forward(gate)[0]
    handed: list[Any] = []
    # The first node needs a tensor with a gradient, also if the input has none.
    anchor = None if x.requires_grad else next(adapter for adapter in mlp.adapters if adapter.requires_grad)
    x = _Inner.apply(mlp, handed, x, anchor)
    out: Tensor = _Down.apply(mlp, handed, x, *mlp.adapters)
    return out


class _Inner(torch.autograd.Function):
    """Computes gate(x) and up(x), and saves all that the MLP saves. The recomputation of a layer ends at the last
    tensor that is saved, so `down` does not run again if nothing after it saves a tensor. Hands its results to _Down,
    whose backward computes all gradients, and returns x.
    """

    @staticmethod
    def forward(ctx: Any, mlp: GatedProjections, handed: list[Any], x: Tensor, anchor: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        gate, up, masks = mlp.inner(x)
        ctx.save_for_backward(x, gate, up, *mlp.adapters)
        handed += [ctx, masks, gate, up]
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, dx, None


class _Down(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mlp: GatedProjections, handed: list[Any], x: Tensor, *adapters: Tensor) -> Tensor:
        up, gate = handed.pop(), handed.pop()
        ctx.masks, ctx.inner = handed.pop(), handed.pop()
        ctx.mlp, ctx.needs_x = mlp, ctx.inner.needs_input_grad[2]
        hidden = ACTIVATIONS[mlp.activation].forward(gate).mul_(up)
        del gate, up
        y, mask = mlp.down.forward(hidden)
        ctx.masks = (*ctx.masks, mask)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        mlp: GatedProjections = ctx.mlp
        x, gate, up, gate_a, gate_b, up_a, up_b, down_a, down_b = ctx.inner.saved_tensors
        gate_mask, up_mask, down_mask = ctx.masks
        _, _, _, *wants = ctx.needs_input_grad
        activation = ACTIVATIONS[mlp.activation]
        activated = activation.forward(gate)
        hidden = activated * up
        of_down = mlp.down.adapter_gradients(dy, hidden, down_mask, (down_a, down_b), wants[4:6])
        del hidden
        if not (ctx.needs_x or any(wants[:4])):
            return (None,) * 7 + of_down[1:]
        d_hidden = mlp.down.input_gradient(dy, of_down.low, down_mask, down_a, gate).view(gate.shape)
        d_up = activated.mul_(d_hidden)
        d_gate = d_hidden.mul_(up)
        activation.backward_into(d_gate, gate)
        del gate, up
        of_gate = mlp.gate.adapter_gradients(d_gate, x, gate_mask, (gate_a, gate_b), wants[0:2])
        of_up = mlp.up.adapter_gradients(d_up, x, up_mask, (up_a, up_b), wants[2:4])
        dx = None
        if ctx.needs_x:
            dx = mlp.gate.input_gradient(d_gate, of_gate.low, gate_mask, gate_a, x)
            dx = mlp.up.input_gradient(d_up, of_up.low, up_mask, up_a, x, dx).view(x.shape)
        return None, None, dx, *of_gate[1:], *of_up[1:], *of_down[1:]
