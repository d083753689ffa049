"""SGD, with momentum and Nesterov's form of it:

g = f32(g)*clip;  t = g + (w*wd);  b = (b*mu) + t;  w = w - (((t*x) + (b*y))*lr)

x, y are 0, 1; with Nesterov's momentum 1, mu. Without momentum there is no b: w = w - (t*lr).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from outsize.layout.optimizer import OptimizerLayout
from outsize.optim.clip import round_fp32
from outsize.optim.rule import Master, Numbers, Scratch, UpdateRule
from outsize.optim.spec import AT_LEAST_0, BELOW_1, TRUE_OR_FALSE, Check, OptimizerSpec


def _numbers(group: Mapping[str, Any], step: int) -> Numbers:
    return tuple(map(round_fp32, (float(group["weight_decay"]), float(group["lr"]))))


def _numbers_of_momentum(group: Mapping[str, Any], step: int) -> Numbers:
    mu = group["momentum"]
    x, y = (1.0, mu) if group["nesterov"] else (0.0, 1.0)
    return (*_numbers(group, step), *map(round_fp32, (mu, x, y)))


def _update_piece(
    master: Master, state: Sequence[Tensor], grad: Tensor, numbers: Numbers, clip: float | Tensor, scratch: Scratch
) -> None:
    g, third = scratch.value, scratch.third
    weight_decay, lr, *momentum = numbers
    g.copy_(grad)
    g.mul_(clip)

    w = master.read(scratch.other)
    torch.mul(w, weight_decay, out=third)
    g.add_(third)
    if momentum:
        (b,), (mu, x, y) = state, momentum
        b.mul_(mu)
        b.add_(g)
        g.mul_(x)
        torch.mul(b, y, out=third)
        g.add_(third)
    g.mul_(lr)
    w.sub_(g)
    master.write(w)


_PLAIN = OptimizerLayout(name="SGD", state=(), traffic_bytes=10, scratch_bytes_per_element=12)
_MOMENTUM = OptimizerLayout(name="SGD", state=("momentum_buffer",), traffic_bytes=18, scratch_bytes_per_element=12)
RULE = UpdateRule("sgd", _PLAIN, _numbers, _update_piece)
MOMENTUM_RULE = UpdateRule("sgd_momentum", _MOMENTUM, _numbers_of_momentum, _update_piece)


@dataclass(frozen=True, kw_only=True)
class SGD(OptimizerSpec):
    """SGD with fp32 master weights. Without momentum in any group there is no state."""

    checks: ClassVar[dict[str, Check]] = {
        "lr": AT_LEAST_0, "momentum": BELOW_1, "nesterov": TRUE_OR_FALSE, "weight_decay": AT_LEAST_0,
    }  # fmt: skip

    momentum: float = 0.0
    nesterov: bool = False

    @property
    def rule(self) -> UpdateRule:
        momenta = [self.momentum, *(group.get("momentum", 0.0) for group in self.groups)]
        return MOMENTUM_RULE if any(momenta) else RULE
