"""HostArena: pinned host memory for sets of tensors that leave the device, within a limit. It grows and never shrinks,
and batches of all lengths use the same memory.
"""

from torch import Tensor

from outsize.base.errors import TransferError
from outsize.base.units import show_bytes
from outsize.device.device import Device
from outsize.transfer.offloaded_tensors import OffloadedTensors
from outsize.transfer.placed_pieces import PlacedPieces


class HostArena:
    """Each set has a piece of one of the slabs. While sets are in use, a new slab is added for each set that finds no
    gap. When none is, several slabs become one of the most bytes that were in use: memory of earlier, shorter batches
    is not kept beside that of longer ones.
    """

    blocks = False

    def __init__(self, device: Device, limit_bytes: int):
        self._device, self.limit_bytes = device, limit_bytes
        self.pieces = PlacedPieces()
        self._slabs: list[Tensor] = []
        self._has_merged = False

    @property
    def num_bytes(self) -> int:
        return self.pieces.num_bytes

    @property
    def used_bytes(self) -> int:
        return self.pieces.used_bytes

    def take(self, num_bytes: int) -> int:
        """The number of a piece of this size. Raises TransferError if the limit leaves no room."""
        if self.pieces.is_idle and len(self._slabs) > 1:
            self._merge_slabs()
        number = self.pieces.place(num_bytes)
        if number is None:
            self._add_slab(num_bytes)
            number = self.pieces.place(num_bytes)
        assert number is not None
        return number

    def give_back(self, number: int) -> None:
        self.pieces.free(number)

    def area_of(self, number: int) -> int:
        return self.pieces[number].area

    def memory(self, area: int) -> list[Tensor]:
        return [self._slabs[area]]

    def copy_in(self, number: int, tensors: OffloadedTensors) -> None:
        tensors.copy_to(self._memory_of(number))

    def copy_out(self, number: int, buffer: Tensor) -> None:
        buffer.copy_(self._memory_of(number), non_blocking=True)

    def _memory_of(self, number: int) -> Tensor:
        piece = self.pieces[number]
        return self._slabs[piece.area][piece.start : piece.end]

    def _merge_slabs(self) -> None:
        """After the first merge with an eighth more, so that lengths that grow slowly are not pinned at every step."""
        wanted = self.pieces.most_used_bytes
        self._drop_slabs()
        self._append(min(wanted + wanted // 8 * self._has_merged, self.limit_bytes))
        self._has_merged = True

    def _add_slab(self, num_bytes: int) -> None:
        if self.pieces.is_idle:
            self._drop_slabs()  # too small
        if self.num_bytes + num_bytes > self.limit_bytes:
            raise TransferError(
                f"The host memory for transfers is full: {show_bytes(self.used_bytes)} of "
                f"{show_bytes(self.limit_bytes)} are in use, and {show_bytes(num_bytes)} more are needed. Raise the "
                "limit or reduce the batch."
            )
        self._append(num_bytes)

    def _append(self, num_bytes: int) -> None:
        self._slabs.append(self._device.host_empty(num_bytes, pinned=True))
        self.pieces.areas.append(num_bytes)

    def _drop_slabs(self) -> None:
        if self._slabs:
            self._device.synchronize()  # copies of dropped memory may be in flight
        self._slabs.clear()
        self.pieces.areas.clear()
