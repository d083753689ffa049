"""The values of `activation_offloading`: what happens to the activations of layers. No torch."""

from dataclasses import dataclass
from typing import Literal

from outsize.model.strategies import STRATEGIES, STRATEGY, Strategy

OffloadingName = Literal["true", "legacy", "disk", "hidden_states"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Offloading:
    name: OffloadingName
    full: Strategy
    """Strategy of all layers in full fine-tuning."""
    frozen: Strategy
    """The same with a frozen base (LoRA), where recomputing costs more than copying what is saved."""
    on_disk: bool = False
    is_synchronous: bool = False
    """Each copy ends before the next layer begins."""


OFFLOADING: dict[str, Offloading] = {
    record.name: record
    for record in (
        Offloading(name="true", full="offload", frozen="swap"),
        Offloading(name="legacy", full="swap", frozen="swap", is_synchronous=True),
        Offloading(name="disk", full="offload", frozen="swap", on_disk=True),
        Offloading(name="hidden_states", full="offload", frozen="offload"),
    )
}
"""Beside them there are `auto` (the plan decides) and `false` (none)."""


def pins_of_offloading(name: str, *, is_frozen: bool) -> dict[str, int | Literal["all"]]:
    """What a value means in a plan, as fields of `Pins`. `is_frozen`: most weights are those of a frozen base."""
    if name == "auto":
        return {}
    if name == "false":
        return {strategy.pin: 0 for strategy in STRATEGIES if strategy.sends}
    record = OFFLOADING[name]
    return {STRATEGY[record.frozen if is_frozen else record.full].pin: "all"}
