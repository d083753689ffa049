"""Tensors that layers have as arguments next to their input, as a discovery pass sees them. Which calls have and read
one decides where its gradient is summed: see profile/sharing.py.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outsize.compat import storage_id


@dataclass(slots=True)
class SharedArgument:
    storage: "weakref.ref[torch.UntypedStorage]"
    calls: list[int]
    """Calls of layers that have it as an argument."""
    maker: int = -1
    """The call of the layer that wrote it into an argument, for later layers to read. -1: a region made it, or a layer
    returned it.
    """
    readers: set[int] = field(default_factory=set)
    """Calls that were seen to compute with it."""
    requires_grad: bool = False


class SharedArguments:
    def __init__(self) -> None:
        self.found: list[SharedArgument] = []
        """In the order in which layers first had them."""
        self._by_storage: dict[int, SharedArgument] = {}
        self._inputs: list[tuple[int, weakref.ref[torch.UntypedStorage]]] = []
        """Calls of layers with their inputs."""
        self.inputs_read_by: dict[int, set[int]] = {}
        """By call of a region: calls of layers whose input it computes with, too (the states of all layers)."""

    def layer_called(self, call: int, hidden: Tensor, others: Iterable[Tensor]) -> None:
        # With skip connections, the further argument of one layer may be the input of another, which reads it.
        storage = hidden.untyped_storage()
        if (known := self.find(storage)) is not None and call not in known.calls:
            known.calls.append(call)
            known.readers.add(call)
        self._inputs = [(v, ref) for v, ref in self._inputs if ref() is not None]
        self._inputs.append((call, weakref.ref(storage)))
        for tensor in others:
            if storage_id(tensor.untyped_storage()) != storage_id(storage):
                shared = self._add(tensor)
                if call not in shared.calls:
                    shared.calls.append(call)

    def region_read(self, region: int, storage: torch.UntypedStorage) -> None:
        """A region computes with a tensor."""
        calls = {call for call, ref in self._inputs if ref() is storage}
        if calls:
            self.inputs_read_by.setdefault(region, set()).update(calls)

    def layer_wrote(self, call: int, tensors: Iterable[Tensor]) -> None:
        """A layer has written these into its arguments, for later layers."""
        for tensor in tensors:
            self._add(tensor).maker = call

    def _add(self, tensor: Tensor) -> SharedArgument:
        storage = tensor.untyped_storage()
        shared = self.find(storage)
        if shared is None:
            calls = [call for call, ref in self._inputs if ref() is storage]
            shared = SharedArgument(weakref.ref(storage), calls, readers=set(calls))
            self.found.append(shared)
            self._by_storage[storage_id(storage)] = shared
        shared.requires_grad |= tensor.requires_grad
        return shared

    def find(self, storage: torch.UntypedStorage) -> SharedArgument | None:
        found = self._by_storage.get(storage_id(storage))
        return found if found is not None and found.storage() is storage else None
