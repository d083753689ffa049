"""TransferQueue: sends sets of tensors off the device and brings them back, without a plan.

Saved-tensors hooks or an activation strategy pack tensors into a `Transfer`. `Transfer.send` starts the copy to an
arena, pinned host memory or a file, once `keep_last` later sets were sent: the last sets of a forward are needed first
and stay on the device. At most `max_in_flight` sets are copied at a time: before another is sent, the oldest frees its
device memory, and compute waits for its copy. The first `unpack` copies a set back and prefetches the sets that were
sent before it, which a backward needs next. A tensor that cannot be sent raises TransferError; it is not kept on the
device instead.

A set's piece of the arena belongs to its `Transfer`. It is freed when the autograd graph that holds the Transfer is
freed: after backward, or when a forward fails or is abandoned.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import TransferError
from outsize.device.device import Device
from outsize.hardware.lanes import Lane, copy_seconds
from outsize.schedule.buffers import Buffer
from outsize.schedule.buffers import BufferKind as B
from outsize.transfer.arena import FILE_BYTES_PER_SECOND, Arena
from outsize.transfer.lane_queue import Buffers, LaneQueue
from outsize.transfer.offloaded_tensors import OffloadedTensors, Originals, PackedTensor, own_items, require_unchanged
from outsize.transfer.shards import PackedShard, split_shard


class Transfer:
    """A set of tensors that is sent off the device and brought back."""

    def __init__(self, queue: "TransferQueue"):
        self._queue, self._tensors = queue, OffloadedTensors()
        self._originals: Originals = []
        self._is_packed = False
        self._number: int | None = None
        """None until the copy starts."""

    @property
    def is_empty(self) -> bool:
        return not self._originals

    def pack(self, tensor: Tensor) -> Any:
        """Returns a handle for `unpack`."""
        if (split := split_shard(tensor)) is not None:
            local, whole = split
            return PackedShard(self._pack(local), whole)
        return self._pack(tensor)

    def _pack(self, tensor: Tensor) -> PackedTensor:
        self._queue.require_sendable(tensor)
        if self._is_packed:
            raise TransferError("A tensor was packed after its set was sent. Pack all tensors of a set before send().")
        self._originals.append((tensor.detach(), tensor._version))
        return self._tensors.pack(tensor)

    def send(self) -> None:
        """The set is whole: it is copied to the arena when enough later sets are. It may be sent once."""
        if self._is_packed or self.is_empty:
            raise TransferError("No tensor was packed since the last send(). Pack tensors before send().")
        self._is_packed = True
        self._queue.send(self)

    def start(self) -> None:
        """Start the copy. Called by the queue, which holds its lock."""
        self._number = self._queue.start(self._tensors, self._originals)
        self._originals = []
        weakref.finalize(self, self._queue.drop, self._number).atexit = False

    def unpack(self, handle: PackedTensor | PackedShard) -> Tensor:
        """A tensor of the set, which is copied back first. The tensor itself while it is on the device."""
        if isinstance(handle, PackedShard):
            return handle.whole(self.unpack(handle.local))
        if self._number is not None:
            return self._queue.unpack(self._number, handle)
        require_unchanged(self._originals)
        self._queue.prefetch_before(self)
        return self._tensors.original(handle)


class TransferQueue:
    def __init__(
        self,
        device: Device,
        *,
        arena: Arena,
        is_static: Callable[[Tensor], bool],
        max_in_flight: int = 2,
        prefetch: int = 1,
        keep_last: int = 0,
    ):
        """`is_static(tensor)` is true for weights and buffers, which are never sent. `prefetch`: how many sets are
        copied back ahead of use. `keep_last`: how many of the sets that were sent last stay on the device.
        """
        if max_in_flight < 1 or prefetch < 0 or keep_last < 0:
            raise ValueError(
                f"max_in_flight is {max_in_flight}, prefetch {prefetch} and keep_last {keep_last}. Use at least 1, 0 "
                "and 0."
            )
        self.arena = arena
        self.num_sent = 0
        """Sets that were copied to the arena so far."""
        self._device, self._is_static = device, is_static
        self._max_in_flight, self._prefetch, self._keep_last = max_in_flight, prefetch, keep_last
        self._kept: deque[weakref.ref[Transfer]] = deque()
        """Sets that stay on the device until later ones are sent."""
        self._sets: dict[int, OffloadedTensors] = {}
        """By the number of their piece of the arena, in the order in which they were sent."""
        self._in_flight: dict[int, Originals] = {}
        """Sets on their way to the arena, whose device memory is not freed yet, oldest first."""
        self._returned: dict[int, Tensor] = {}
        """Device buffers that sets were copied back to."""
        self._in_use: int | None = None
        """The set that was unpacked last."""
        self._spoiled: dict[int, str] = {}
        """Sets that were written in place before their copy was complete, with the message."""
        self._dropped: deque[int] = deque()
        """Sets whose Transfer is gone, to be released."""
        self._failure: TransferError | None = None
        """Of a copy whose set is gone: raised by the next call."""
        self._lock = threading.Lock()
        # Without a reference to `self`: host memory is freed with the queue, not by the garbage collector.
        self._lanes = LaneQueue(device, partial(_memory_of, self.arena, self._sets, self._returned))
        weakref.finalize(self, _quiet, device).atexit = False  # before the host memory is freed

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

    def send(self, transfer: Transfer) -> None:
        """Keep a set on the device, and start copying those that `keep_last` later ones follow."""
        with self._lock, self._reporting():
            self._release_dropped()
            self._kept = deque([*(ref for ref in self._kept if ref() is not None), weakref.ref(transfer)])
            while len(self._kept) > self._keep_last:
                oldest = self._kept.popleft()()
                if oldest is not None:
                    oldest.start()

    def start(self, tensors: OffloadedTensors, originals: Originals) -> int:
        """Start copying a set to the arena; returns its number. `drop` releases it."""
        require_unchanged(originals)
        while len(self._in_flight) >= self._max_in_flight:
            self._free_oldest()
        number = self.arena.take(tensors.num_bytes)
        self._sets[number], self._in_flight[number] = tensors, originals
        try:
            self._issue("compute", (), ((B.LIVE, number),), number)
            self._issue(
                "d2h", ((B.LIVE, number),), (self._area(number),), number, partial(self.arena.copy_in, number, tensors)
            )
        except BaseException:
            del self._sets[number], self._in_flight[number]
            self.arena.give_back(number)
            raise
        self.num_sent += 1
        return number

    def finish(self) -> None:
        """Wait until all sets that are being copied are in the arena."""
        with self._lock, self._reporting():
            self._free_in_flight()
            self._device.synchronize()

    def unpack(self, number: int, handle: PackedTensor) -> Tensor:
        """A tensor of a set. Copies the set back first, unless it is there, and prefetches those sent before it."""
        with self._lock, self._reporting():
            self._release_dropped()
            if number in self._spoiled:
                raise TransferError(self._spoiled[number])
            if number != self._in_use:
                self._free_in_flight()
                self._copy_back(number)
                order = list(self._sets)
                self._copy_back_some(order[: order.index(number)], self._prefetch, {number, self._in_use})
                self._issue("compute", ((B.RETURN, number),), (), number)
                if self._in_use is not None:
                    self._detach(self._in_use)
                self._in_use = number
            return self._sets[number].unpack(handle)

    def prefetch_before(self, transfer: Transfer) -> None:
        """A set that is still on the device is in use: prefetch the sets before it that are not."""
        with self._lock, self._reporting():
            self._release_dropped()
            alive = [kept for ref in self._kept if (kept := ref()) is not None]
            before = next((i for i, kept in enumerate(alive) if kept is transfer), 0)
            self._free_in_flight()
            self._copy_back_some(list(self._sets), self._prefetch - before, {self._in_use})

    def drop(self, number: int) -> None:
        """Release a set. It may be called by the garbage collector, at any moment and in any thread."""
        self._dropped.append(number)
        if self._lock.acquire(blocking=False):  # else the next call of the queue releases it
            try:
                self._release()
            finally:
                self._lock.release()

    def _area(self, number: int) -> Buffer:
        """Sets share the memory of an area one after another, so copies to and from it are ordered by area."""
        return (B.ARENA, self.arena.area_of(number))

    def _issue(
        self, lane: Lane, reads: Buffers, writes: Buffers, number: int, work: Callable[[], Any] | None = None
    ) -> None:
        """Without `work`, the action only orders others: it waits for them or they wait for it."""
        num_bytes = self._sets[number].num_bytes
        seconds = 0.0 if lane == "compute" else copy_seconds(self._device.spec, lane, num_bytes)
        if seconds and self.arena.blocks:
            seconds = max(seconds, num_bytes / FILE_BYTES_PER_SECOND)
        blocks = work is not None and self.arena.blocks
        name = f"transfer {number}"
        self._lanes.issue(lane, reads, writes, work or _nothing, seconds=seconds, name=name, blocks=blocks)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """After a failed copy, forget all work: waits for it would raise its error again and again. The error of a
        thread is raised as a new one: the thread's task keeps the first, and with it all that it passed through.
        """
        try:
            yield
        except TransferError as error:
            self._forget_lanes()
            raise TransferError(str(error)) from None

    def _forget_lanes(self) -> None:
        _quiet(self._device)
        self._lanes.reset()

    def _free_oldest(self) -> None:
        self._free(next(iter(self._in_flight)))

    def _free_in_flight(self) -> None:
        """Backward begins: no later set will free them."""
        while self._in_flight:
            self._free_oldest()

    def _free(self, number: int) -> None:
        """Free the device memory of a set once its copy is complete."""
        originals = self._in_flight.pop(number)
        self._issue("compute", (), ((B.LIVE, number),), number)
        self._sets[number].free_device_copy()
        try:
            require_unchanged(originals)
        except TransferError as error:
            self._spoiled[number] = str(error)
            raise

    def _copy_back_some(self, sets: list[int], count: int, others: set[int | None]) -> None:
        """Copy the last `count` of these sets back, unless that many are back beside `others`."""
        for earlier in sets[::-1][: max(count, 0)]:
            if len(self._returned.keys() - others) < count:
                self._copy_back(earlier)

    def _copy_back(self, number: int) -> None:
        if number in self._returned:
            return
        tensors, returned = self._sets[number], (B.RETURN, number)
        buffer = self._returned[number] = self._device.empty(tensors.num_bytes)
        tensors.attach_buffer(buffer)
        try:
            self._issue("compute", (), (returned,), number)  # wait for earlier users of this memory
            work = partial(self.arena.copy_out, number, buffer)
            self._issue("h2d", (self._area(number),), (returned,), number, work)
        except BaseException:
            del self._returned[number]
            tensors.attach_buffer(None)
            raise

    def _detach(self, number: int) -> None:
        """Free the buffer of a set that was copied back, unless tensors that were unpacked hold it."""
        if number in self._returned:
            self._issue("compute", (), ((B.RETURN, number),), number)
            del self._returned[number]
            self._sets[number].attach_buffer(None)
        if number == self._in_use:
            self._in_use = None

    def _release_dropped(self) -> None:
        """Raises the failure of a copy whose set is gone."""
        self._release()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _release(self) -> None:
        if not self._dropped:
            return
        while self._dropped:
            number = self._dropped.popleft()
            try:
                if number in self._in_flight:
                    self._in_flight[number] = []  # the copy is not read, so later writes do not matter
                    self._free(number)
                if number in self._returned and number != self._in_use:
                    # It was prefetched in vain, and this thread's stream may be another than that of its memory.
                    self._device.synchronize()
                self._detach(number)
            except TransferError as error:
                self._failure = self._failure or error
                self._forget_lanes()
            self._sets[number].free_device_copy()
            self._returned.pop(number, None)
            self._spoiled.pop(number, None)
            del self._sets[number]
            self.arena.give_back(number)
        self._lanes.drop_old_events()


def _quiet(device: Device) -> None:
    """Wait until the lanes are idle. Failures were raised, or concern no one."""
    with suppress(TransferError):
        device.synchronize()
    with suppress(TransferError):
        device.synchronize()  # a failure ends the first wait early


def _memory_of(
    arena: Arena, sets: dict[int, OffloadedTensors], returned: dict[int, Tensor], buffer: Buffer
) -> list[Tensor]:
    """The memory behind a buffer's name, for the device's race detection."""
    kind, number = buffer
    return (
        own_items(sets, number) if kind == B.LIVE else arena.memory(number) if kind == B.ARENA else [returned[number]]
    )


def _nothing() -> None:
    pass
