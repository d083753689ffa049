"""Outputs of layers that their own graph saves: layers that end in ReLU or tanh.

Such an output is also the input of the next layer, and the later of two backwards frees it: that of the layer that made it if that layer's
graph still holds it (keep), else that of the layer that takes it. Each pass measures this under one strategy for all layers. The ledger
needs it for layers of different strategies, so what a layer keeps of its outputs is measured apart from its other numbers.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from outsize.compat import storage_id
from outsize.model.work import Strategy


class Outputs:
    """Of one pass: which outputs are alive when the backward of the layer that takes them has ended."""

    def __init__(self, is_counted: Callable[[torch.UntypedStorage], bool]):
        """`is_counted`: nobody else accounts for this storage's death."""
        self._is_counted = is_counted
        self._made: dict[int, list[weakref.ref[torch.UntypedStorage]]] = {}
        self._maker_of: dict[int, tuple[int, weakref.ref[torch.UntypedStorage]]] = {}
        """By storage that no layer has taken yet."""
        self._makers: dict[int, int] = {}
        """By visit: the visit whose outputs its backward is the last to use, but for that visit's own."""
        self.kept: dict[int, int] = {}
        """By visit: bytes of its outputs that it keeps for its own backward."""
        self.kept_before: dict[int, int] = {}
        """By visit: bytes of its maker's outputs that were alive after this visit's backward."""

    def makes(self, visit: int, tensors: Iterable[Tensor], given: Iterable[int]) -> None:
        """A layer ran and returned these. `given`: the storages of its arguments."""
        own = {storage_id(t.untyped_storage()): t.untyped_storage() for t in tensors if t.layout == torch.strided}
        refs = {key: weakref.ref(storage) for key, storage in own.items() if key not in given}
        self._made[visit] = list(refs.values())
        self._maker_of.update({key: (visit, ref) for key, ref in refs.items()})

    def takes(self, visit: int, hidden: Tensor) -> None:
        """A layer that runs has this input."""
        storage = hidden.untyped_storage()
        maker, ref = self._maker_of.pop(storage_id(storage), (-1, None))
        if ref is not None and ref() is storage:
            self._makers[visit] = maker
        elif visit - 1 in self._made:
            self._makers[visit] = visit - 1

    def backward_ended(self, visit: int) -> None:
        maker = self._makers.pop(visit, -1)
        if maker >= 0:
            alive = [storage for ref in self._made[maker] if (storage := ref()) is not None]
            kept = sum(storage.nbytes() for storage in alive if self._is_counted(storage))
            self.kept.setdefault(maker, kept)
            self.kept_before[visit] = kept


def inputs_from(layer_of: list[int | None], goes_on: Mapping[int, int]) -> dict[int, int]:
    """By visit of a layer: the visit of the layer whose output it takes, as it is or after other code of that visit."""
    found = {taker: maker for maker, taker in goes_on.items()}
    for visit in range(1, len(layer_of)):
        if layer_of[visit] is not None and layer_of[visit - 1] is not None and visit - 1 not in goes_on:
            found.setdefault(visit, visit - 1)
    return found


def kept(outputs: Mapping[Strategy, Outputs], maker: int, taker: int) -> dict[Strategy, tuple[int, int]] | None:
    """By strategy: bytes that the maker keeps of its output, and that the taker's numbers are for. None where they are the same under all strategies.

    Both are visits that ran, and may stand for others. Where one was not seen beside a visit of that kind, it counts as the other.
    """
    found: dict[Strategy, tuple[int, int]] = {}
    for strategy, seen in outputs.items():
        by_maker, by_taker = seen.kept.get(maker), seen.kept_before.get(taker)
        known = [value for value in (by_maker, by_taker) if value is not None] or [0]
        found[strategy] = known[0], known[-1]
    return found if len({value for pair in found.values() for value in pair}) > 1 else None
