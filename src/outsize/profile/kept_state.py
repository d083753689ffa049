"""What the first forward of a model leaves in its attributes until the next one: auxiliary losses, masks, tables.

A discovery pass runs the first forward. Its peaks include the making of what later forwards use again.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import nn

from outsize.model.discover import Layer
from outsize.model.state import BoundAttributes
from outsize.model.work import SharedTensor

_MOST_WORK = 16
"""A table takes at most so many times its own bytes while it is made: a mask of bytes from int64 positions. On a GPU,
the first forward also allocates workspaces of libraries, which are no part of it."""


class KeptState:
    def __init__(self, model: nn.Module, layers: Sequence[Layer]):
        self.layers = layers
        self.outside = BoundAttributes(model, without=[layer.module for layer in layers])
        self.of_layers: dict[str, BoundAttributes] = {}
        """By structure of a layer: what a forward of such a layer leaves. Skipped layers get it too."""

    def num_bytes(self) -> int:
        of_layers = (self.of_layers.get(layer.structure) for layer in self.layers)
        return self.outside.num_bytes + sum(each.num_bytes for each in of_layers if each is not None)

    def records(self, num_calls: int) -> Iterator[SharedTensor]:
        """What the last step left is held until this forward returns; what this one leaves is held from then on."""
        if num_bytes := self.num_bytes():
            last = num_calls - 1
            yield SharedTensor(call=last, role="kept", number=0, num_bytes=num_bytes, allocated_in=last, freed_in=-1)

    def more_in_first_forward(
        self, first: Mapping[int, int], later: Mapping[int, int], layer_of: Sequence[int | None]
    ) -> dict[int, int]:
        """By call: how much higher its peak is in the first forward, without what it leaves. `first`, `later`: peaks of
        calls that ran. `layer_of`: by call the layer, None for a region.
        """
        keys = [f"region {call}" if i is None else self.layers[i].structure for call, i in enumerate(layer_of)]
        found: dict[str, int] = {}
        for call in first.keys() & later.keys():
            bound = self.outside if layer_of[call] is None else self.of_layers.get(keys[call])
            if bound is not None and bound.num_bytes:
                more = min(first[call] - later[call] - bound.num_bytes, _MOST_WORK * bound.num_bytes)
                found[keys[call]] = max(found.get(keys[call], 0), more)
        return {call: found.get(key, 0) for call, key in enumerate(keys)}
