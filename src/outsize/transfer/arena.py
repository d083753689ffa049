"""Arena: where sets of tensors are while they are not on the device."""

from typing import Protocol

from torch import Tensor

from outsize.transfer.offloaded_tensors import OffloadedTensors

FILE_BYTES_PER_SECOND = 1e9
"""Assumed for an arena in a file on simulated devices."""


class Arena(Protocol):
    """`HostArena` or `FileArena`. A set has a numbered piece of it. Pieces of one area share its memory one after
    another.
    """

    blocks: bool
    """Whether copies wait for something else than the device, so that a thread must make them."""

    @property
    def num_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    def take(self, num_bytes: int) -> int:
        """The number of a new piece of at least this size. Raises TransferError if there is no room."""
        ...

    def give_back(self, number: int) -> None: ...
    def area_of(self, number: int) -> int: ...
    def memory(self, area: int) -> list[Tensor]:
        """What copies to and from an area touch, for devices that find races."""
        ...

    def copy_in(self, number: int, tensors: OffloadedTensors) -> None: ...
    def copy_out(self, number: int, buffer: Tensor) -> None: ...
