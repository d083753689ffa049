"""Importance of FFN channels, KV heads and experts, from what flows through the teacher's layers.

importance = Importance(parts, method)
for call, hidden, valid in batches:
    output = importance.run(call, hidden, valid)  # the teacher's layer
scores = importance.scores()
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from outsize.methods.bypass.parts import LayerParts
from outsize.model.stack import LayerCall

Method = Literal["independent", "iterative"]
"""Of FFN channels. `truncate` needs no scores."""


@dataclass(frozen=True, slots=True)
class LayerImportance:
    """Scores of one layer, fp32 on the CPU; higher is more important. Keys are paths in the layer."""

    channels: Mapping[str, Tensor]
    """By FFN unit (a feed-forward network, or the experts of one module): (width,) or (experts, width)."""
    heads: Mapping[str, Tensor]
    """By attention module: (KV heads,)."""
    experts: Mapping[str, Tensor]
    """By module of experts: (experts,)."""

    def tensors(self) -> dict[str, Tensor]:
        """To save: `channels/PATH`, `heads/PATH`, `experts/PATH`."""
        raise NotImplementedError

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "LayerImportance":
        """From what `tensors()` gave."""
        raise NotImplementedError


class Importance:
    """Accumulates the scores of one layer over batches. Its weights are materialized."""

    def __init__(self, parts: LayerParts, method: Method):
        raise NotImplementedError

    def run(self, call: LayerCall, hidden: Tensor, valid: Tensor | None) -> Tensor:
        """The layer's output; adds to the scores what its sub-blocks do with the valid tokens."""
        raise NotImplementedError

    def scores(self) -> LayerImportance:
        raise NotImplementedError
