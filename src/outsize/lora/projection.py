"""One LoRA layer in one call: y = x Wᵀ + bias + s (x Aᵀ) Bᵀ and its gradients, without tensors of the size of y or x
beside the results.

`projection_of` decides whether a layer of PEFT computes exactly this in its current state.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.compat import unsafe_view
from outsize.lora.base_weight import BaseWeight, base_weight

_CAST_BY_AUTOCAST = {torch.float32, torch.bfloat16, torch.float16}


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one dropout: not the mask, but the state of the generator before it was drawn."""

    p: float
    device: torch.device
    state: Tensor

    def again(self, x: Tensor) -> Tensor:
        """The same dropout of a tensor of the same shape and strides. The generator is left as it is."""
        now = _generator_state(self.device)
        _set_generator_state(self.device, self.state)
        try:
            return F.dropout(x, self.p)
        finally:
            _set_generator_state(self.device, now)


def _has_own_generator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta") and torch.accelerator.is_available()


def _generator_state(device: torch.device) -> Tensor:
    if _has_own_generator(device):
        state: Tensor = torch.get_device_module(device).get_rng_state(device)
        return state
    return torch.get_rng_state()


def _set_generator_state(device: torch.device, state: Tensor) -> None:
    if _has_own_generator(device):
        torch.get_device_module(device).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class AdapterGradients(NamedTuple):
    low: Tensor
    """Of x Aᵀ, without the scaling."""
    a: Tensor | None
    b: Tensor | None


@dataclass(slots=True)
class Projection:
    weight: BaseWeight
    bias: Tensor | None
    a: Tensor
    b: Tensor
    scaling: float
    dropout: float
    """0 if nothing is dropped."""
    dtype: torch.dtype
    """All products are computed in it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Mask | None]:
        """The output, and what draws the mask of its dropout again."""
        mask, dropped = None, x
        if self.dropout:
            mask = Mask(self.dropout, x.device, _generator_state(x.device))
            dropped = F.dropout(x, self.dropout)
        low = _rows(dropped) @ self.a.to(self.dtype).t()
        del dropped
        bias = None if self.bias is None else self.bias.to(self.dtype)
        y = F.linear(_rows(x), self.weight.dense(self.dtype), bias)
        y.addmm_(low, self.b.to(self.dtype).t(), alpha=self.scaling)
        # Not `view`: autograd refuses writes into views that a Function returns, and models write into projections.
        return unsafe_view(y, (*x.shape[:-1], y.shape[-1])), mask

    def adapter_gradients(
        self, dy: Tensor, x: Tensor, mask: Mask | None, saved: tuple[Tensor, Tensor], wanted: Sequence[bool]
    ) -> AdapterGradients:
        """`saved`: A and B. `wanted`: whether their gradients are."""
        a, b = (factor.to(self.dtype) for factor in saved)
        dy, da, db = _rows(dy), None, None
        dlow = dy @ b
        if any(wanted):
            dropped = _rows(x if mask is None else mask.again(x))
            # With beta=0 the first argument has no effect: these are products times the scaling, in one kernel.
            if wanted[0]:
                da = torch.addmm(a, dlow.t(), dropped, beta=0, alpha=self.scaling).to(self.a.dtype)
            if wanted[1]:
                db = torch.addmm(b, dy.t(), dropped @ a.t(), beta=0, alpha=self.scaling).to(self.b.dtype)
        return AdapterGradients(dlow, da, db)

    def input_gradient(
        self, dy: Tensor, dlow: Tensor, mask: Mask | None, a: Tensor, like: Tensor, dx: Tensor | None = None
    ) -> Tensor:
        """The gradient of the input, as rows. `like`: a tensor with the input's shape and strides. `dx`: rows, to which
        the gradient is added in place.
        """
        dy, a = _rows(dy), a.to(self.dtype)
        weight = self.weight.dense(self.dtype)
        dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
        del weight
        if mask is None:
            return dx.addmm_(dlow, a, alpha=self.scaling)
        part = (dlow @ a).view(like.shape)
        if part.stride() != like.stride():  # masks are drawn in the order of memory
            part = torch.empty_like(like).copy_(part)
        return dx.add_(_rows(mask.again(part)), alpha=self.scaling)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """None: autocast is off."""
    is_on = torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else None


def projection_of(layer: Any, given: torch.dtype, autocast: torch.dtype | None) -> Projection | str:
    """What a LoRA layer of PEFT computes in its current state, or why its own forward must compute it. Runs at every
    call, so it is written to be fast.

    `given`: the dtype of its input. `autocast`: see `autocast_dtype`.
    """
    if layer.disable_adapters or layer.merged_adapters:
        return "disabled or merged adapters"
    active, parts = layer.active_adapters, layer._modules
    factors_a: dict[str, Any] = parts["lora_A"]._modules
    if len(active) != 1 or (name := active[0]) not in factors_a:
        return "none or several active adapters"
    if name in layer.lora_variant:
        return f"{type(layer.lora_variant[name]).__name__}"
    base, a, b = parts["base_layer"], factors_a[name], parts["lora_B"]._modules[name]
    dropout = parts["lora_dropout"]._modules[name]
    if type(a) is not nn.Linear or type(b) is not nn.Linear or a.bias is not None or b.bias is not None:
        return "an adapter with biases, or of other layers"
    share, kind = 0.0, type(dropout)
    if kind is nn.Dropout:
        share = dropout.p if dropout.training else 0.0
    elif kind is not nn.Identity:
        return f"a dropout of type {kind.__name__}"
    if has_hooks(dropout) or _is_changed(base) or _is_changed(a) or _is_changed(b):
        return "hooks on parts of the layer"
    weight = base_weight(base)
    if isinstance(weight, str):
        return weight
    bias, a, b = base.bias, a.weight, b.weight
    if base.weight.requires_grad or (bias is not None and bias.requires_grad):
        return "a base that is trained"
    dtype, base_dtype = autocast or given, weight.dtype or given
    is_one_dtype = given is a.dtype is b.dtype is base_dtype is dtype
    if not is_one_dtype and autocast is None:
        return f"{_show(a.dtype)} adapters over a {_show(base_dtype)} base"
    if not is_one_dtype and (
        not {given, base_dtype, a.dtype, b.dtype} <= _CAST_BY_AUTOCAST
        or (weight.is_quantized and not given is base_dtype is dtype)  # it returns the input's dtype
        or (share and not a.dtype is b.dtype is dtype)  # PEFT draws the mask in the adapter's dtype
    ):
        return "other dtypes under autocast"
    if torch.is_grad_enabled():
        if not (is_plain(a) and is_plain(b)):
            return "parameters that are read through __torch_function__"
        if not (a.requires_grad or b.requires_grad):
            return "a frozen adapter, whose input PEFT does not save"
    elif weight.is_quantized:
        return "a quantized base without grad, for which its library has kernels"
    return Projection(weight, bias, a, b, layer.scaling[name], share, dtype)


def _is_changed(linear: nn.Module) -> bool:
    return has_hooks(linear) or "forward" in linear.__dict__


def has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


_PLAIN = (nn.Parameter.__torch_function__, Tensor.__torch_function__)


def is_plain(tensor: Tensor) -> bool:
    """False for parameters of a prepared model between passes, and for tensors with operators of their own."""
    return type(tensor).__torch_function__ in _PLAIN


def _show(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
