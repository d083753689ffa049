"""Runs the layers of a model one by one, without code for single model families.

`capture` runs the model's own forward with every layer returning its input: the model builds masks, rotary tables and
per-layer inputs, and no layer runs. `run` then runs one layer with the captured arguments on any hidden state.
`check_replay` compares both with the model's forward, bit for bit, and refuses a model with layers that need more than
their arguments (keys of another layer, say).
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from outsize.model.discover import Layer


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of one call of a layer, without its hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at: int | str
    """Where the hidden state is: its position, or its name."""


@dataclass(frozen=True, slots=True)
class StackCalls:
    """What one batch's forward calls the layers with."""

    hidden: Tensor
    """The input of the first layer."""
    calls: tuple[LayerCall, ...]
    """By layer."""


class LayerStack:
    """The layers of a model, in order. Forwards run in eval mode, without grad and without caches."""

    def __init__(
        self,
        model: nn.Module,
        blocks: str | None = None,
        *,
        materialized: Callable[[nn.Module], AbstractContextManager[None]] | None = None,
    ):
        """`blocks`: the path of the list of layers; None for the largest. `materialized`: gives a module outside of the
        layers, or one layer, its weights while it runs, if the model's are still in files.
        """
        raise NotImplementedError

    model: nn.Module
    path: str
    """Of the list of layers."""
    layers: tuple[Layer, ...]
    config: Any
    """The config that the layers were built from; None if the model has none."""

    def capture(self, arguments: Mapping[str, Any]) -> StackCalls:
        """The calls of all layers for a batch. Runs the model up to its last layer, but no layer."""
        raise NotImplementedError

    def check_replay(self, arguments: Mapping[str, Any]) -> None:
        """Run the model's forward, and each layer alone on the hidden state that it got there. Raise ModelUnsupported
        with the name of the first layer that returns other bits.
        """
        raise NotImplementedError


def run(layer: nn.Module, call: LayerCall, hidden: Tensor) -> Tensor:
    """The hidden state that a layer returns."""
    raise NotImplementedError


def valid_tokens(arguments: Mapping[str, Any]) -> Tensor | None:
    """(rows, tokens), True where a token is no padding; None if all are."""
    raise NotImplementedError
