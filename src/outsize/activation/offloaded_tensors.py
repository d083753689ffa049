"""OffloadedTensors: the saved activations of one call on their way to the host and back.

Whole storages travel, once each, however many views of them autograd saved; a saved tensor comes back as the same view
(dtype, shape, strides, offset) of the storage's bytes. So strides cannot be lost, and overlapping or expanded tensors
need no special case.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.base.units import ALIGN_BYTES
from outsize.compat import neg_view, storage_id


@dataclass(frozen=True, slots=True)
class Handle:
    """A saved tensor whose storage is in the offloaded."""

    item: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool
    """Lazily conjugated or negated: what the bytes alone do not say."""


class OffloadedTensors:
    def __init__(self) -> None:
        self.items: list[Tensor] = []
        """The storages as flat uint8, kept alive here until `free_device_copy`."""
        self.offsets: list[int] = []
        self.num_bytes = 0
        self._index: dict[int, int] = {}
        self._returned: Tensor | None = None

    def pack(self, tensor: Tensor) -> Handle:
        storage = tensor.untyped_storage()
        item = self._index.get(storage_id(storage))
        if item is None:
            item = self._index[storage_id(storage)] = len(self.offsets)
            self.items.append(tensor.new_empty(0, dtype=torch.uint8).set_(storage))
            self.offsets.append(self.num_bytes)
            self.num_bytes += -(-storage.nbytes() // ALIGN_BYTES) * ALIGN_BYTES
        return Handle(
            item,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def holds(self, storage: torch.UntypedStorage) -> bool:
        return storage_id(storage) in self._index

    def copy_to(self, arena: Tensor) -> None:
        for item, offset in zip(self.items, self.offsets, strict=True):
            arena[offset : offset + item.numel()].copy_(item, non_blocking=True)

    def free_device_copy(self) -> None:
        """Drop the device storages; from here on the offloaded is on the host."""
        self.items = []
        self._index = {}

    def attach_buffer(self, buffer: Tensor) -> None:
        """The bytes are back, in `buffer`."""
        self._returned = buffer

    def unpack(self, handle: Handle) -> Tensor:
        if self._returned is None:
            raise AssertionError("activations are used before they were brought back")
        typed = self._returned[self.offsets[handle.item] :]
        typed = typed[: typed.numel() // handle.dtype.itemsize * handle.dtype.itemsize].view(handle.dtype)
        view = typed.as_strided(handle.shape, handle.stride, typed.storage_offset() + handle.offset)
        view = neg_view(view) if handle.is_neg else view
        return view.conj() if handle.is_conj else view
