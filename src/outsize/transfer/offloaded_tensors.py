"""OffloadedTensors: a set of tensors that is copied to the host and back, such as the activations of one block call.

Whole storages are copied, each once, however many views of them autograd saved. A saved tensor comes back as the same
view (dtype, shape, strides, offset) of the storage's bytes, so overlapping and expanded tensors need no special case.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outsize.base.errors import TransferError
from outsize.base.units import ALIGN_BYTES
from outsize.compat import neg_view, storage_id

Originals = list[tuple[Tensor, int]]
"""Packed tensors and their versions, to find writes into them."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Identifies a packed tensor: its storage, and which view of it."""

    item: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    """Conjugated lazily: the bytes alone do not show it."""
    is_neg: bool
    """Negated lazily."""


class OffloadedTensors:
    def __init__(self) -> None:
        self.items: list[Tensor] = []
        """The storages on the device as flat uint8, until `free_device_copy`."""
        self.offsets: list[int] = []
        self.num_bytes = 0
        self._index: dict[int, int] = {}
        self._buffer: Tensor | None = None

    def pack(self, tensor: Tensor) -> PackedTensor:
        storage = tensor.untyped_storage()
        item = self._index.get(storage_id(storage))
        if item is None:
            item = self._index[storage_id(storage)] = len(self.offsets)
            self.items.append(tensor.new_empty(0, dtype=torch.uint8).set_(storage))
            self.offsets.append(self.num_bytes)
            self.num_bytes += -(-storage.nbytes() // ALIGN_BYTES) * ALIGN_BYTES
        view = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return PackedTensor(item, tensor.dtype, *view, tensor.is_conj(), tensor.is_neg())

    def holds(self, storage: torch.UntypedStorage) -> bool:
        return storage_id(storage) in self._index

    def copy_to(self, arena: Tensor) -> None:
        for item, offset in zip(self.items, self.offsets, strict=True):
            arena[offset : offset + item.numel()].copy_(item, non_blocking=True)

    def copy_range_to(self, buffer: Tensor, start: int, size: int) -> None:
        """Copy the bytes that `copy_to` puts at `start` and after it to the beginning of a buffer."""
        for item, offset in zip(self.items, self.offsets, strict=True):
            first, end = max(offset, start), min(offset + item.numel(), start + size)
            if first < end:
                buffer[first - start : end - start].copy_(item[first - offset : end - offset], non_blocking=True)

    def free_device_copy(self) -> None:
        """Drop the storages on the device. The copy on the host is complete."""
        self.items = []
        self._index = {}

    def attach_buffer(self, buffer: Tensor | None) -> None:
        """Set the device buffer that the bytes are copied back to. None: it was freed."""
        self._buffer = buffer

    def unpack(self, handle: PackedTensor) -> Tensor:
        if self._buffer is None:
            raise AssertionError("activations are used before they were copied back")
        return _view(self._buffer[self.offsets[handle.item] :], handle)

    def original(self, handle: PackedTensor) -> Tensor:
        """A packed tensor before `free_device_copy`: the same view of the storage itself."""
        return _view(self.items[handle.item], handle)


def _view(data: Tensor, handle: PackedTensor) -> Tensor:
    typed = data[: data.numel() // handle.dtype.itemsize * handle.dtype.itemsize].view(handle.dtype)
    view = typed.as_strided(handle.shape, handle.stride, typed.storage_offset() + handle.offset)
    view = neg_view(view) if handle.is_neg else view
    return view.conj() if handle.is_conj else view


def own_items(sets: Mapping[int, OffloadedTensors], number: int) -> list[Tensor]:
    """The storages of a set, without those that an earlier set holds too: they were written before this set's call."""
    earlier: set[int] = set()
    for other, tensors in sets.items():
        if other == number:
            return [item for item in tensors.items if item.data_ptr() not in earlier]
        earlier.update(item.data_ptr() for item in tensors.items)
    return []


def require_unchanged(originals: Originals) -> None:
    for tensor, version in originals:
        if tensor._version != version:
            raise TransferError(
                f"A tensor of shape {tuple(tensor.shape)} was written in place after it was packed for the host, and "
                "backward needs its old value. Write to a copy of it."
            )
