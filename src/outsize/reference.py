"""The optimizers with exact fp32 masters, global clipping and fp32 accumulation, in plain torch: what every plan must
equal to the bit.

Torch optimizers like any other, usable without the engine; slow and simple on purpose. They share no kernel with the
engine: the sequences of operations are written out once more here, one torch call per operation, so that equality means
something. A bf16 parameter is the upper half of its fp32 master, the lower half is `state["lo"]`; an
fp32 parameter is its own master.
"""

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from outsize.base.errors import ConfigError, NonFiniteGradient
from outsize.optim.clip import clip_factor
from outsize.optim.clip import round_fp32 as f
from outsize.optim.split import join, split


class Optimizer(torch.optim.Optimizer):
    """Base class. A subclass computes the new master and state of a parameter (`_new`)."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        max_grad_norm: float | None = None,
        nonfinite: Literal["raise", "skip"] = "raise",
        fp32_grads: bool = False,
    ) -> None:
        """`params`: tensors, (name, tensor) pairs or group dicts. `fp32_grads`: gradients of bf16 parameters are summed
        in fp32 outside of `.grad`; `step` consumes the sums, and only this optimizer's `zero_grad` discards them."""
        if nonfinite not in ("raise", "skip") or (max_grad_norm is not None and not max_grad_norm > 0):
            raise ConfigError(
                f"nonfinite={nonfinite!r}, max_grad_norm={max_grad_norm!r} cannot be used: nonfinite must be 'raise' "
                "or 'skip', max_grad_norm positive or None. Leave max_grad_norm out to train without clipping."
            )
        self.max_grad_norm, self.nonfinite, self.fp32_grads = max_grad_norm, nonfinite, fp32_grads
        self.skipped = 0
        self.grad_norm = torch.zeros((), dtype=torch.float64)
        self._sums: dict[Tensor, Tensor] = {}
        super().__init__(params, defaults)

    state_names: tuple[str, ...] = ()

    def _new(self, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        """The new master, of the master and the clipped gradient, both fp32. Changes the state."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in (p for p in self.param_groups[-1]["params"] if p.requires_grad):
            if p.dtype not in (torch.bfloat16, torch.float32):
                raise ConfigError(
                    f"params: a trainable parameter has dtype {p.dtype}; bf16 and fp32 are supported. "
                    "Convert the model with .to(torch.bfloat16)."
                )
            if self.fp32_grads and p.dtype == torch.bfloat16:
                take = weakref.WeakMethod(
                    self._take
                )  # or the parameter would keep a discarded optimizer alive, which then takes the gradient first
                p.register_post_accumulate_grad_hook(lambda p, take=take: live(p) if (live := take()) else None)

    def _take(self, p: Tensor) -> None:
        assert p.grad is not None, (
            "two living optimizers with fp32_grads hold this parameter, and the other one has taken its gradient"
        )
        grad, p.grad = p.grad.float(), None
        self._sums[p] = self._sums[p].add_(grad) if p in self._sums else grad

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._sums.clear()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = self._collect()
        self.grad_norm = self._measure(grads)
        total = self.grad_norm.item()
        if not math.isfinite(total):
            if self.nonfinite == "raise":
                raise NonFiniteGradient(
                    f"The gradient norm is {total}; nothing was updated. "
                    "Look for the first non-finite loss or lower lr; nonfinite='skip' skips such steps."
                )
            self.skipped += 1
            return loss
        self._update_all(grads, clip_factor(total, self.max_grad_norm))
        return loss

    def _collect(self) -> dict[Tensor, Tensor | None]:
        """The gradients of the step, in the optimizer's order."""
        grads = {p: self._sums.get(p, p.grad) for g in self.param_groups for p in g["params"] if p.requires_grad}
        self._sums.clear()
        return grads

    def _measure(self, grads: dict[Tensor, Tensor | None]) -> Tensor:
        return _norm(grads)

    def _update_all(self, grads: dict[Tensor, Tensor | None], clip: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if (grad := grads.get(p)) is not None:
                    self._update(p, grad, clip, group)

    def _update(self, p: Tensor, grad: Tensor, clip: float, group: dict[str, Any]) -> None:
        state = self._next_state(p)
        w = join(p, state["lo"]) if "lo" in state else p
        w = self._new(w, grad.float() * clip, state, group)
        if "lo" in state:
            w, state["lo"] = split(w)
        p.copy_(w)

    def _next_state(self, p: Tensor) -> dict[str, Any]:
        """The parameter's state, with the number of this update."""
        state: dict[str, Any] = self.state[p]
        if not state:
            state["step"] = 0
            state.update({name: torch.zeros_like(p, dtype=torch.float32) for name in self.state_names})
            if p.dtype == torch.bfloat16:
                state["lo"] = torch.zeros_like(p, dtype=torch.int16)
        state["step"] = int(state["step"]) + 1  # a loaded state may hold it as a tensor, whose powers would be fp32
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch casts state to the parameter's dtype, so moments and lower halves of bf16 parameters would become bf16.
        # Set them again, as they were saved.
        ids = (i for group in state_dict["param_groups"] for i in group["params"])
        for i, p in zip(ids, (p for group in self.param_groups for p in group["params"]), strict=True):
            for key, value in state_dict["state"].get(i, {}).items():
                self.state[p][key] = value.to(p.device, copy=True) if isinstance(value, Tensor) else value
            if p.dtype == torch.bfloat16 and (state := self.state.get(p)) and "lo" not in state:
                # State of torch's own optimizer. Its bf16 values become fp32, exactly; the weight is its own master.
                state.update({key: state[key].float() for key in self.state_names})
                state["lo"] = torch.zeros_like(p, dtype=torch.int16)


def _norm(grads: dict[Tensor, Tensor | None]) -> Tensor:
    """The norm of the gradients: squares in fp32, summed by halving in segments of 4,096 elements of each parameter in
    the order of its memory; the segments' sums by halving in fp64. A parameter without gradient counts as zeros.
    """
    device = next((g.device for g in grads.values() if g is not None), torch.device("cpu"))
    sums = [torch.zeros(0, dtype=torch.float64, device=device)]
    for p, g in grads.items():
        squares = torch.zeros(-(-p.numel() // 4096) * 4096, dtype=torch.float32, device=device)
        if g is not None:
            order = sorted(range(p.dim()), key=p.stride, reverse=True)
            flat = g.permute(order).reshape(-1).float().to(device)
            squares[: p.numel()] = flat * flat
        sums.append(_halved(squares.view(-1, 4096)).double())
    every = torch.cat(sums)
    padded = torch.zeros(1, 2 ** math.ceil(math.log2(max(1, len(every)))), dtype=torch.float64, device=device)
    padded[0, : len(every)] = every
    return torch.tensor(math.sqrt(_halved(padded).item()), dtype=torch.float64, device=device)


def _halved(rows: Tensor) -> Tensor:
    """The sum of each row, whose length is a power of two: of its first and second half, until one element is left."""
    while rows.shape[1] > 1:
        rows = rows[:, : rows.shape[1] // 2] + rows[:, rows.shape[1] // 2 :]
    return rows[:, 0]


class AdamW(Optimizer):
    """What a prepared model with `outsize.AdamW` computes, as a torch optimizer of a plain model."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        **common: Any,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay), **common)

    def _new(self, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        lr, (beta1, beta2), t = float(group["lr"]), group["betas"], state["step"]
        m = (state["exp_avg"] * f(beta1)) + (g * f(1 - beta1))
        v = (state["exp_avg_sq"] * f(beta2)) + ((g * g) * f(1 - beta2))
        d = (v.double().sqrt().float() * f(1 / math.sqrt(1 - beta2**t))) + f(group["eps"])
        state["exp_avg"], state["exp_avg_sq"] = m, v
        w = w * f(1 - lr * group["weight_decay"])
        return w - ((m * f(lr / (1 - beta1**t))) / d)


class Lion(Optimizer):
    state_names = ("exp_avg",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay), **common)

    def _new(self, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        lr, (beta1, beta2), m = float(group["lr"]), group["betas"], state["exp_avg"]
        x = (m * f(beta1)) + (g * f(1 - beta1))
        state["exp_avg"] = (m * f(beta2)) + (g * f(1 - beta2))
        sign = (x > 0).float() - (x < 0).float()
        return (w * f(1 - lr * group["weight_decay"])) - (sign * f(lr))


class SGD(Optimizer):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        **common: Any,
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
        super().__init__(params, defaults, **common)
        if any(group["momentum"] for group in self.param_groups):
            self.state_names = ("momentum_buffer",)

    def _new(self, w: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        lr, mu, is_nesterov = float(group["lr"]), group["momentum"], group["nesterov"]
        t = g + (w * f(group["weight_decay"]))
        if not self.state_names:
            return w - (t * f(lr))
        b = state["momentum_buffer"] = (state["momentum_buffer"] * f(mu)) + t
        move = (t * f(1.0 if is_nesterov else 0.0)) + (b * f(mu if is_nesterov else 1.0))
        return w - (move * f(lr))
