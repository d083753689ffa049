"""Lion (Chen et al. 2023):

g = f32(g)*clip;  x = (m*b1) + (g*o1);  m = (m*b2) + (g*o2);  w = (w*decay) - (((x > 0) - (x < 0))*lr)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from outsize.layout.optimizer import OptimizerLayout
from outsize.optim.clip import round_fp32
from outsize.optim.rule import Master, Numbers, Scratch, UpdateRule
from outsize.optim.spec import AT_LEAST_0, TWO_BETAS, Check, OptimizerSpec


def _numbers(group: Mapping[str, Any], step: int) -> Numbers:
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    decay = 1.0 - lr * float(group["weight_decay"])
    return tuple(map(round_fp32, (beta1, beta2, 1.0 - beta1, 1.0 - beta2, decay, lr)))


def _update_piece(
    master: Master, state: Sequence[Tensor], grad: Tensor, numbers: Numbers, clip: float | Tensor, scratch: Scratch
) -> None:
    (m,), (b1, b2, o1, o2, decay, lr) = state, numbers
    g, other, third, mask = scratch.value, scratch.other, scratch.third, scratch.mask
    g.copy_(grad)
    g.mul_(clip)

    x = other
    torch.mul(m, b1, out=x)
    torch.mul(g, o1, out=third)
    x.add_(third)

    m.mul_(b2)
    torch.mul(g, o2, out=third)
    m.add_(third)

    sign = g  # the gradient is no longer needed
    torch.gt(x, 0.0, out=mask)
    sign.copy_(mask)
    torch.lt(x, 0.0, out=mask)
    x.copy_(mask)
    sign.sub_(x)

    w = master.read(other)
    w.mul_(decay)
    sign.mul_(lr)
    w.sub_(sign)
    master.write(w)


_LAYOUT = OptimizerLayout(name="Lion", state=("exp_avg",), traffic_bytes=18, scratch_bytes_per_element=12)
RULE = UpdateRule("lion", _LAYOUT, _numbers, _update_piece)


@dataclass(frozen=True, kw_only=True)
class Lion(OptimizerSpec):
    """Lion with fp32 master weights. Its learning rate is 3 to 10 times smaller than AdamW's."""

    checks: ClassVar[dict[str, Check]] = {"lr": AT_LEAST_0, "betas": TWO_BETAS, "weight_decay": AT_LEAST_0}

    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)

    @property
    def rule(self) -> UpdateRule:
        return RULE
