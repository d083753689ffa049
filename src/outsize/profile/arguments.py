"""Tensors that layers take beside their input, as a discovery sees them. Who takes and reads one decides where its
gradient is added up: see profile/sharing.py.
"""

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from outsize.compat import storage_id


@dataclass(slots=True)
class SharedTensor:
    """A tensor that layers take beside their input."""

    storage: "weakref.ref[torch.UntypedStorage]"
    calls: list[int]
    maker: int = -1
    """The call of the layer that left it in an argument, for later layers to take. -1: a region made it, or a layer
    returned it.
    """
    readers: set[int] = field(default_factory=set)
    """Calls that compute with it, as far as they ran."""
    requires_grad: bool = False


class Arguments:
    def __init__(self) -> None:
        self.shared: list[SharedTensor] = []
        """In the order in which layers first took them."""
        self._by_key: dict[int, SharedTensor] = {}
        self._taken: list[tuple[int, weakref.ref[torch.UntypedStorage]]] = []
        """Calls of layers and the inputs they had."""

    def takes(self, call: int, hidden: Tensor, others: Iterable[Tensor]) -> None:
        """A layer was called with these."""
        # What one layer takes beside its input may be the input of another (skip connections), which reads it.
        storage = hidden.untyped_storage()
        if (known := self.shared_as(storage)) is not None and call not in known.calls:
            known.calls.append(call)
            known.readers.add(call)
        self._taken = [(v, taken) for v, taken in self._taken if taken() is not None]
        self._taken.append((call, weakref.ref(storage)))
        for tensor in others:
            if storage_id(tensor.untyped_storage()) != storage_id(storage):
                shared = self._share(tensor)
                if call not in shared.calls:
                    shared.calls.append(call)

    def leaves(self, call: int, tensors: Iterable[Tensor]) -> None:
        """A layer has put these into its arguments, for later layers."""
        for tensor in tensors:
            self._share(tensor).maker = call

    def _share(self, tensor: Tensor) -> SharedTensor:
        storage = tensor.untyped_storage()
        shared = self.shared_as(storage)
        if shared is None:
            calls = [call for call, taken in self._taken if taken() is storage]
            shared = SharedTensor(weakref.ref(storage), calls, readers=set(calls))
            self.shared.append(shared)
            self._by_key[storage_id(storage)] = shared
        shared.requires_grad |= tensor.requires_grad
        return shared

    def shared_as(self, storage: torch.UntypedStorage) -> SharedTensor | None:
        found = self._by_key.get(storage_id(storage))
        return found if found is not None and found.storage() is storage else None
