"""TransferQueue: sends sets of tensors to pinned host memory and brings them back, without a plan.

Saved-tensors hooks or an activation strategy pack tensors into a `Transfer`, and `Transfer.send` starts the copy to the
host. At most `max_in_flight` sets are copied at a time: before another is sent, the oldest frees its device memory, and
compute waits for its copy. The first `unpack` copies a set back and prefetches the sets that were sent before it, which
a backward needs next. A tensor that cannot be sent raises TransferError; it is not kept on the device instead.

A set's host memory belongs to its `Transfer`. It returns to the pool when the autograd graph that holds the Transfer is
freed: after backward, or when a forward fails or is abandoned.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import TransferError
from outsize.device.device import Device
from outsize.hardware.lanes import Lane, copy_seconds
from outsize.schedule.buffers import Buffer
from outsize.schedule.buffers import BufferKind as B
from outsize.transfer.host_pool import HostPool
from outsize.transfer.lane_queue import Buffers, LaneQueue
from outsize.transfer.offloaded_tensors import OffloadedTensors, PackedTensor, own_items

Originals = list[tuple[Tensor, int]]
"""Packed tensors and their versions, to find writes into them."""


class Transfer:
    """A set of tensors that is sent to the host and brought back."""

    def __init__(self, queue: "TransferQueue"):
        self._queue, self._tensors = queue, OffloadedTensors()
        self._originals: Originals = []
        self._number: int | None = None

    def pack(self, tensor: Tensor) -> PackedTensor:
        self._queue.require_sendable(tensor)
        if self._number is not None:
            raise TransferError("A tensor was packed after its set was sent. Pack all tensors of a set before send().")
        self._originals.append((tensor.detach(), tensor._version))
        return self._tensors.pack(tensor)

    def send(self) -> None:
        """Start copying the set to the host. It may be sent once."""
        originals, self._originals = self._originals, []
        if not originals:
            raise TransferError("No tensor was packed since the last send(). Pack tensors before send().")
        self._number = self._queue.send(self._tensors, originals)
        weakref.finalize(self, self._queue.drop, self._number).atexit = False

    def unpack(self, handle: PackedTensor) -> Tensor:
        if self._number is None:
            raise TransferError("A tensor was unpacked before its set was sent. Call send() after the forward.")
        return self._queue.unpack(self._number, handle)


class TransferQueue:
    def __init__(
        self,
        device: Device,
        *,
        host_bytes: int,
        is_static: Callable[[Tensor], bool],
        max_in_flight: int = 2,
        prefetch: int = 1,
    ):
        """`is_static(tensor)` is true for weights and buffers, which are never sent. `prefetch`: how many sets are
        copied back ahead of use.
        """
        if max_in_flight < 1 or prefetch < 0:
            raise ValueError(f"max_in_flight is {max_in_flight} and prefetch {prefetch}. Use at least 1 and 0.")
        self.pool = HostPool(device, host_bytes)
        self._device, self._is_static = device, is_static
        self._max_in_flight, self._prefetch = max_in_flight, prefetch
        self._sets: dict[int, OffloadedTensors] = {}
        """By the number of their host buffer, in the order in which they were sent."""
        self._in_flight: dict[int, Originals] = {}
        """Sets on their way to the host, whose device memory is not freed yet, oldest first."""
        self._returned: dict[int, Tensor] = {}
        """Device buffers that sets were copied back to."""
        self._in_use: int | None = None
        """The set that was unpacked last."""
        self._dropped: deque[int] = deque()
        """Sets whose Transfer is gone, to be released."""
        self._lock = threading.Lock()
        # Without a reference to `self`: host memory is freed with the queue, not by the garbage collector.
        self._lanes = LaneQueue(device, partial(_memory_of, self.pool, self._sets, self._returned))
        weakref.finalize(self, device.synchronize).atexit = False  # before the host memory is freed

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_returned(self) -> int:
        return len(self._returned)

    def require_sendable(self, tensor: Tensor) -> None:
        found = (
            f"it is a {type(tensor).__name__}"
            if type(tensor) is not Tensor
            else f"its layout is {tensor.layout}"
            if tensor.layout != torch.strided
            else f"it is on {tensor.device}"
            if tensor.device != self._device.torch_device
            else "it is a weight or a buffer of the model"
            if self._is_static(tensor)
            else ""
        )
        if found:
            raise TransferError(
                f"A tensor of shape {tuple(tensor.shape)} cannot be sent to the host: {found}. Pack strided "
                f"activations on {self._device.torch_device}."
            )

    def send(self, tensors: OffloadedTensors, originals: Originals) -> int:
        """Start copying a set to the host; returns its number. `drop` releases it."""
        with self._lock:
            self._release_dropped()
            _require_unchanged(originals)
            number = self.pool.take(tensors.num_bytes)
            try:
                while len(self._in_flight) >= self._max_in_flight:
                    self._free_oldest()
            except BaseException:
                self.pool.give_back(number)
                raise
            self._sets[number], self._in_flight[number] = tensors, originals
            live, arena = (B.LIVE, number), (B.ARENA, number)
            self._issue("compute", (), (live,), number)
            self._issue("d2h", (live,), (arena,), number, partial(tensors.copy_to, self.pool[number]))
            return number

    def unpack(self, number: int, handle: PackedTensor) -> Tensor:
        """A tensor of a set. Copies the set back first, unless it is there, and prefetches those sent before it."""
        with self._lock:
            self._release_dropped()
            if number != self._in_use:
                self._copy_back(number)
                order = list(self._sets)
                for earlier in order[: order.index(number)][::-1][: self._prefetch]:
                    if len(self._returned.keys() - {number, self._in_use}) < self._prefetch:
                        self._copy_back(earlier)
                self._issue("compute", ((B.RETURN, number),), (), number)
                if self._in_use is not None:
                    self._detach(self._in_use)
                self._in_use = number
            return self._sets[number].unpack(handle)

    def drop(self, number: int) -> None:
        """Release a set. It may be called by the garbage collector, at any moment and in any thread."""
        self._dropped.append(number)
        if self._lock.acquire(blocking=False):  # else the next call of the queue releases it
            try:
                self._release_dropped()
            finally:
                self._lock.release()

    def _issue(
        self, lane: Lane, reads: Buffers, writes: Buffers, number: int, work: Callable[[], Any] | None = None
    ) -> None:
        """Without `work`, the action only orders others: it waits for them or they wait for it."""
        num_bytes = self._sets[number].num_bytes
        seconds = 0.0 if lane == "compute" else copy_seconds(self._device.spec, lane, num_bytes)
        self._lanes.issue(lane, reads, writes, work or _nothing, seconds=seconds, name=f"transfer {number}")

    def _free_oldest(self) -> None:
        self._free(next(iter(self._in_flight)))

    def _free(self, number: int) -> None:
        """Free the device memory of a set once its copy is complete."""
        originals = self._in_flight.pop(number)
        self._issue("compute", (), ((B.LIVE, number),), number, self._sets[number].free_device_copy)
        _require_unchanged(originals)

    def _copy_back(self, number: int) -> None:
        if number in self._returned:
            return
        while number in self._in_flight:
            self._free_oldest()
        tensors, arena, returned = self._sets[number], (B.ARENA, number), (B.RETURN, number)
        buffer = self._returned[number] = self._device.empty(tensors.num_bytes)
        tensors.attach_buffer(buffer)
        self._issue("compute", (), (returned,), number)  # wait for earlier users of this memory
        source = self.pool[number][: tensors.num_bytes]
        self._issue("h2d", (arena,), (returned,), number, lambda: buffer.copy_(source, non_blocking=True))

    def _detach(self, number: int) -> None:
        """Free the buffer of a set that was copied back, unless tensors that were unpacked hold it."""
        if number in self._returned:
            self._issue("compute", (), ((B.RETURN, number),), number)
            del self._returned[number]
            self._sets[number].attach_buffer(None)
        if number == self._in_use:
            self._in_use = None

    def _release_dropped(self) -> None:
        if not self._dropped:
            return
        while self._dropped:
            number = self._dropped.popleft()
            if number in self._in_flight:
                self._in_flight[number] = []  # the copy is not read, so later writes do not matter
                self._free(number)
            self._detach(number)
            del self._sets[number]
            self.pool.give_back(number)
        self._lanes.drop_old_events()


def _memory_of(
    pool: HostPool, sets: dict[int, OffloadedTensors], returned: dict[int, Tensor], buffer: Buffer
) -> list[Tensor]:
    """The memory behind a buffer's name, for the device's race detection."""
    kind, number = buffer
    return own_items(sets, number) if kind == B.LIVE else [pool[number] if kind == B.ARENA else returned[number]]


def _require_unchanged(originals: Originals) -> None:
    for tensor, version in originals:
        if tensor._version != version:
            raise TransferError(
                f"A tensor of shape {tuple(tensor.shape)} was written in place after it was packed for the host, and "
                "backward needs its old value. Write to a copy of it."
            )


def _nothing() -> None:
    pass
