"""OptimizerSpec: the optimizer settings of a user, one subclass per optimizer (`outsize.AdamW`, `outsize.SGD`,
`outsize.Lion`).

A subclass names its hyperparameters and its rule (optim/rule.py). optim/names.py lists them all.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from outsize.base.errors import ConfigError
from outsize.optim.rule import UpdateRule
from outsize.schedule.plan import StepConfig, UpdateMode

Check = tuple[Callable[[Any], bool], str]
"""Tests a value, and describes the allowed values in errors."""


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


AT_LEAST_0: Check = (lambda v: is_number(v) and v >= 0, "is a number from 0")
ABOVE_0: Check = (lambda v: is_number(v) and v > 0, "is a number above 0")
BELOW_1: Check = (lambda v: is_number(v) and 0 <= v < 1, "is a number in [0, 1)")
TWO_BETAS: Check = (
    lambda v: isinstance(v, (tuple, list)) and len(v) == 2 and all(is_number(b) and 0 <= b < 1 for b in v),
    "are two numbers in [0, 1)",
)
TRUE_OR_FALSE: Check = (lambda v: isinstance(v, bool), "is True or False")
_COMMON: dict[str, Check] = {
    "max_grad_norm": (lambda v: v is None or (is_number(v) and v > 0), "is a number above 0, or None for no clipping"),
    "nonfinite": (lambda v: v in ("raise", "skip"), "is raise or skip"),
    "update": (lambda v: v in ("after_step", "in_backward"), "is after_step or in_backward"),
}


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """Settings of an optimizer with fp32 master weights. Base class of `outsize.AdamW` and the others."""

    checks: ClassVar[dict[str, Check]]
    """By name of a hyperparameter. A group may set each of them."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    """Clip the global gradient norm at each step."""
    nonfinite: Literal["raise", "skip"] = "raise"
    """What a step does when a gradient is not finite. Either way it changes nothing (unless it updates in backward)."""
    fp32_grads: bool = False
    """Accumulate gradients of bf16 parameters in fp32."""
    update: UpdateMode = "after_step"
    """`in_backward` plans for loops that declare the last backward of each step (`engine.last_backward()`): no gradient
    is kept.
    """
    groups: Sequence[dict[str, Any]] = field(default=())
    """Parameters with other settings: `{"params": names or parameters, "weight_decay": 0.0}`. The rest has the settings
    above.
    """

    @property
    def rule(self) -> UpdateRule:
        raise NotImplementedError

    def step_config(self, accumulate: int) -> StepConfig:
        """`accumulate`: backwards per step."""
        return StepConfig(
            update=self.update, accumulate=accumulate, fp32_grads=self.fp32_grads, optimizer=self.rule.layout
        )

    @property
    def defaults(self) -> dict[str, Any]:
        """The hyperparameters of groups that do not set their own."""
        return {name: getattr(self, name) for name in self.checks}

    def __post_init__(self) -> None:
        name, keys = type(self).__name__, {"params", *self.checks}
        common = {setting: getattr(self, setting) for setting in _COMMON}
        problems = [*self._problems(self.defaults), *_problems(_COMMON, common)]
        for i, group in enumerate(self.groups):
            if unknown := sorted(set(group) - keys):
                problems.append(f"groups[{i}] has {', '.join(sorted(keys))} ({', '.join(unknown)} was given)")
            found = self._problems({k: v for k, v in group.items() if k in self.checks})
            problems += [f"groups[{i}]: {problem}" for problem in found]
            problems += [] if "params" in group else [f"groups[{i}] names its params (there are none)"]
        if self.update == "in_backward" and (self.max_grad_norm is not None or self.nonfinite == "skip"):
            problems.append(
                "update='in_backward' goes without max_grad_norm and with nonfinite='raise': both need all gradients "
                "before the first update"
            )
        if problems:
            raise ConfigError(f"{name}: " + "; ".join(problems) + ".")

    def _problems(self, settings: Mapping[str, Any]) -> list[str]:
        return _problems(self.checks, settings)

    def require_valid_groups(self, groups: list[dict[str, Any]]) -> None:
        """Raise if a scheduler or a loop has set an invalid hyperparameter."""
        for i, group in enumerate(groups):
            if len(group["params"]) != len(group["param_names"]):
                raise ConfigError(
                    f"param_groups[{i}]: it had {len(group['param_names'])} parameters when the model was prepared and "
                    f"has {len(group['params'])} now. "
                    "To stop training a parameter, set its grad to None before step(), or prepare the model again."
                )
            for name, (is_valid, allowed) in self.checks.items():
                value = group[name]
                if not is_valid(value.item() if isinstance(value, Tensor) and value.numel() == 1 else value):
                    raise ConfigError(
                        f"param_groups[{i}][{name!r}] is {value!r}, but it {allowed}. Set it before step(); nothing "
                        "was updated."
                    )

    def param_groups(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """Torch's groups of (name, parameter) pairs, over all trainable parameters; each exactly once. `groups` may
        name frozen ones: they count when they are unfrozen."""
        left = dict(named)
        name_of = {id(p): name for name, p in left.items()}
        groups = []
        for group in self.groups:
            members = {}
            for item in group["params"]:
                name = item if isinstance(item, str) else name_of.get(id(item))
                if name not in left:
                    raise ConfigError(
                        f"{type(self).__name__}: groups name {name or 'a parameter'}, which is no parameter of the "
                        "model or is in two groups. Compare with model.named_parameters()."
                    )
                members[name] = left.pop(name)
            groups.append({**group, "params": [(name, p) for name, p in members.items() if p.requires_grad]})
        if not groups or any(p.requires_grad for p in left.values()):
            groups.append({"params": [(name, p) for name, p in left.items() if p.requires_grad]})
        return groups


def _problems(checks: Mapping[str, Check], settings: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {checks[name][1]} ({value!r} was given)"
        for name, value in settings.items()
        if not checks[name][0](value)
    ]
