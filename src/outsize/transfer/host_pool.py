"""HostPool: reuses pinned host buffers, within a limit."""

from torch import Tensor

from outsize.base.errors import TransferError
from outsize.base.units import show_bytes
from outsize.device.device import Device


class HostPool:
    """Buffers are numbered. If no free one is large enough, a free one is replaced: there are never more buffers than
    were in use at once.
    """

    def __init__(self, device: Device, limit_bytes: int):
        self._device, self.limit_bytes = device, limit_bytes
        self._buffers: list[Tensor] = []
        self._free: set[int] = set()

    def __getitem__(self, number: int) -> Tensor:
        return self._buffers[number]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._buffers)

    @property
    def used_bytes(self) -> int:
        return sum(buffer.numel() for number, buffer in enumerate(self._buffers) if number not in self._free)

    def take(self, num_bytes: int) -> int:
        """The number of a free buffer of at least this size. Raises TransferError if the limit leaves no room."""
        by_size = sorted(self._free, key=lambda number: self._buffers[number].numel())
        number = next((number for number in by_size if self._buffers[number].numel() >= num_bytes), None)
        if number is None:
            number = self._make_room(num_bytes, by_size)
            self._buffers[number] = self._device.host_empty(num_bytes, pinned=True)
        self._free.discard(number)
        return number

    def give_back(self, number: int) -> None:
        self._free.add(number)

    def _make_room(self, num_bytes: int, by_size: list[int]) -> int:
        """Drop free buffers, the largest first. Returns the number for a new one."""
        if self.used_bytes + num_bytes > self.limit_bytes:
            raise TransferError(
                f"The host memory for transfers is full: {show_bytes(self.used_bytes)} of "
                f"{show_bytes(self.limit_bytes)} are in use, and {show_bytes(num_bytes)} more are needed. Raise the "
                "limit or reduce the batch."
            )
        if by_size:
            self._device.synchronize()  # copies of a dropped buffer may be in flight
        else:
            by_size = [len(self._buffers)]
            self._buffers.append(self._device.host_empty(0, pinned=True))
            self._free.add(by_size[0])
        number = by_size[-1]
        while by_size and (self._buffers[number].numel() or self.num_bytes + num_bytes > self.limit_bytes):
            dropped = by_size.pop()
            self._buffers[dropped] = self._device.host_empty(0, pinned=True)
        return number
