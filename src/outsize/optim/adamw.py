"""AdamW:

g = f32(g)*clip;  m = (m*b1) + (g*o1);  v = (v*b2) + ((g*g)*o2);  d = (sqrt(v)*c2) + eps;  w = (w*decay) - ((m*step)/d)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from outsize.layout.optimizer import OptimizerLayout
from outsize.optim.clip import round_fp32
from outsize.optim.rule import Master, Numbers, Scratch, UpdateRule
from outsize.optim.spec import ABOVE_0, AT_LEAST_0, TWO_BETAS, Check, OptimizerSpec


def _numbers(group: Mapping[str, Any], step: int) -> Numbers:
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    exact = (
        beta1,
        beta2,
        1.0 - beta1,
        1.0 - beta2,
        group["eps"],
        1.0 - lr * float(group["weight_decay"]),
        lr / (1.0 - beta1**step),
        1.0 / math.sqrt(1.0 - beta2**step),
    )
    return tuple(map(round_fp32, exact))


def _update_piece(
    master: Master, state: Sequence[Tensor], grad: Tensor, numbers: Numbers, clip: float | Tensor, scratch: Scratch
) -> None:
    (m, v), (b1, b2, o1, o2, eps, decay, step, c2) = state, numbers
    value, other, wide = scratch.value, scratch.other, scratch.wide

    g = value
    g.copy_(grad)
    g.mul_(clip)

    m.mul_(b1)
    torch.mul(g, o1, out=other)
    m.add_(other)

    v.mul_(b2)
    torch.mul(g, g, out=other)
    other.mul_(o2)
    v.add_(other)

    wide.copy_(v)
    wide.sqrt_()
    d = value  # the gradient is no longer needed
    d.copy_(wide)
    d.mul_(c2)
    d.add_(eps)

    move = other
    torch.mul(m, step, out=move)
    move.div_(d)

    w = master.read(value)  # nor is the denominator
    w.mul_(decay)
    w.sub_(move)
    master.write(w)


_LAYOUT = OptimizerLayout(name="AdamW", state=("exp_avg", "exp_avg_sq"), traffic_bytes=26, scratch_bytes_per_element=12)
RULE = UpdateRule("adamw", _LAYOUT, _numbers, _update_piece)


@dataclass(frozen=True, kw_only=True)
class AdamW(OptimizerSpec):
    """AdamW with fp32 master weights."""

    checks: ClassVar[dict[str, Check]] = {
        "lr": AT_LEAST_0, "betas": TWO_BETAS, "eps": ABOVE_0, "weight_decay": AT_LEAST_0,
    }  # fmt: skip

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    @property
    def rule(self) -> UpdateRule:
        return RULE
