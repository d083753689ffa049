"""Pins: parts of a plan that the user fixes. The search chooses the rest.

A pin is never ignored. A pin out of range raises ConfigError with the range. If no plan with the pins fits the budgets,
PlanInfeasible names them.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from outsize.base.errors import ConfigError
from outsize.base.units import is_count
from outsize.layout.chunks import ChunkLayout
from outsize.model.graph import BlockGraph
from outsize.model.strategies import choices

NumLayers = int | Literal["all"]
"""A number of layers, or all that support the strategy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pins:
    """Parts of a plan that the user fixes. The search chooses the others."""

    n_persist: int | None = None
    """Chunks whose weights stay on the GPU."""
    n_buffer: int | None = None
    """Streamed calls whose weights are on the GPU at once: prefetch depth + 1."""
    n_swap: NumLayers | None = None
    """Layers whose saved tensors go to the host."""
    n_checkpoint: NumLayers | None = None
    """Layers that are recomputed in backward, their input kept on the GPU."""
    n_offload: NumLayers | None = None
    """Layers that are recomputed in backward, their input kept on the host."""
    n_checkpoint_attention: NumLayers | None = None
    """Layers that are recomputed except for attention, whose outputs stay on the GPU with the layer's input. If this is
    not given and n_checkpoint is, it is 0."""
    n_offload_attention: NumLayers | None = None
    """Layers that are recomputed except for attention, whose outputs are on the host with the layer's input. If this is
    not given and n_offload is, it is 0."""
    n_optimizer_gpu: int | None = None
    """Trainable chunks whose optimizer state lives on the GPU."""
    n_optimizer_streamed: int | None = None
    """Trainable chunks whose optimizer state lives on the host and is streamed to the GPU for their update."""

    def given(self) -> dict[str, int]:
        return {
            field.name: value for field in dataclasses.fields(self) if (value := getattr(self, field.name)) is not None
        }

    def resolved(self, layers: Mapping[str, int]) -> "Pins":
        """With numbers in place of "all". `layers`: per strategy, how many layers support it."""
        names = {strategy.pin: strategy.name for strategy in choices() if strategy.pin}
        found = {pin: layers[name] for pin, name in names.items() if getattr(self, pin) == "all"}
        return dataclasses.replace(self, **found)

    @property
    def mix(self) -> tuple[int | None, ...]:
        """The pinned number of layers with each strategy of `choices()`. None if it is not pinned."""
        return tuple(getattr(self, strategy.pin) if strategy.pin else None for strategy in choices())

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.given().items())


def check_pins(pins: Pins, graph: BlockGraph, layout: ChunkLayout, layers: dict[str, int], num_updated: int) -> None:
    """Raise ConfigError for pins out of range. `layers`: per strategy, how many layers support it; under `all`, how
    many layers have a backward. `num_updated`: the number of trainable chunks.
    """
    if not isinstance(pins, Pins):
        raise ConfigError(f"pins must be outsize.Pins, not a {type(pins).__name__}. Write outsize.Pins(n_persist=…).")
    most = {
        "n_persist": len(layout.chunks),
        "n_buffer": len(graph.calls),
        **{strategy.pin: layers[strategy.name] for strategy in choices()},
        "n_optimizer_gpu": num_updated,
        "n_optimizer_streamed": num_updated - (pins.n_optimizer_gpu or 0),
    }
    wrong = []
    for name, value in pins.given().items():
        least = 1 if name == "n_buffer" else 0
        if not is_count(value, least=least) or value > most[name]:
            wrong.append(f"{name} is {value!r}, not between {least} and {most[name]}")
    if wrong:
        raise ConfigError(
            f"pins: for this model, {'; '.join(wrong)}. Choose a number in the range, or leave the pin out."
        )
    pinned = sum(count or 0 for count in pins.mix)
    if pinned > layers["all"]:
        raise ConfigError(
            f"pins: {', '.join(s.pin for s in choices() if s.pin)} add up to {pinned} layers, and {layers['all']} "
            "layers have a backward. Lower one of them."
        )
