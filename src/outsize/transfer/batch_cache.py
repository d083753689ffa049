"""BatchCache: one tensor per batch, kept in host memory or in a file, and brought back batch by batch.

`read` copies the next batch to the device while the current one is used; `write` returns before its copy has ended.
The order of copies, file accesses and compute follows from the buffers that each of them names (`LaneQueue`).
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import SaveFailed
from outsize.base.units import show_bytes
from outsize.device.device import Device
from outsize.hardware.lanes import Lane, copy_seconds
from outsize.schedule.buffers import Buffer
from outsize.schedule.buffers import BufferKind as B
from outsize.transfer.lane_queue import Buffers, LaneQueue

_SLOTS = 2
"""Device buffers for batches that are read: one in use, one on its way."""
_STAGES = 2
"""Pinned host buffers between device and file, per direction."""


@dataclass(frozen=True, slots=True)
class BatchSpec:
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class BatchCache:
    """Batches are numbered from 0. A batch may be overwritten; reads that were issued before get the old one."""

    def __init__(self, device: Device, batches: Sequence[BatchSpec], folder: Path | None = None):
        """`folder`: keep the batches in a file there, which is created at its full size. None: in host memory."""
        self.batches = tuple(batches)
        self._device = device
        sizes = [batch.num_bytes for batch in self.batches]
        self._most = max(sizes)
        self._starts = list(accumulate(sizes, initial=0))
        self._slots = [device.empty(self._most) for _ in range(_SLOTS)]
        self._in_slot: list[int | None] = [None] * _SLOTS
        self._outgoing: dict[int, Tensor] = {}
        self._num_written = self._num_staged = 0
        self._file = _File(folder, self._starts[-1]) if folder is not None else None
        self._home = torch.empty(0, dtype=torch.uint8)
        self._stages: list[Tensor] = []
        if self._file is None:
            self._home = device.host_empty(self._starts[-1], pinned=True)
        else:
            self._stages = [device.host_empty(self._most, pinned=True) for _ in range(2 * _STAGES)]
        self._lanes = LaneQueue(device, self._memory_of)

    @staticmethod
    def device_bytes(batches: Sequence[BatchSpec]) -> int:
        """Device memory of a cache, without tensors that are being written."""
        return _SLOTS * max(batch.num_bytes for batch in batches)

    @staticmethod
    def host_bytes(batches: Sequence[BatchSpec], *, in_file: bool) -> int:
        sizes = [batch.num_bytes for batch in batches]
        return 2 * _STAGES * max(sizes) if in_file else sum(sizes)

    def read(self, number: int, then: int | None = None) -> Tensor:
        """Batch `number`, valid until the next `read`. `then`: the one that is read next, if it is known."""
        slot = self._load(number)
        self._issue("compute", ((B.RETURN, slot),), ())
        if then is not None and then != number:
            self._load(then, keep=slot)
        self._lanes.drop_old_events()
        spec = self.batches[number]
        return self._slots[slot][: spec.num_bytes].view(spec.dtype).view(spec.shape)

    def write(self, number: int, tensor: Tensor) -> None:
        """Store a batch. The tensor must not change until the next `write`, or `finish`."""
        spec = self.batches[number]
        assert tuple(tensor.shape) == spec.shape and tensor.dtype == spec.dtype, "a batch keeps its shape and dtype"
        for slot, held in enumerate(self._in_slot):
            if held == number:
                self._in_slot[slot] = None
        self._release_written()
        outgoing, self._num_written = self._num_written, self._num_written + 1
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        if any(flat.untyped_storage().data_ptr() == slot.untyped_storage().data_ptr() for slot in self._slots):
            flat = flat.clone()  # what `read` gave: the slot may be filled again before the copy
        self._outgoing[outgoing] = flat
        live = (B.LIVE, outgoing)
        self._issue("compute", (), (live,))
        self._move("d2h", number, live, lambda host: host.copy_(flat, non_blocking=True))

    def finish(self) -> None:
        """Wait until everything is written."""
        self._release_written()
        self._device.synchronize()
        self._lanes.reset()

    def close(self) -> None:
        self._device.synchronize()
        self._slots, self._stages, self._outgoing = [], [], {}
        self._home = torch.empty(0, dtype=torch.uint8)
        if self._file is not None:
            self._file.close()

    def _load(self, number: int, keep: int | None = None) -> int:
        """The slot of a batch, after issuing its copy unless it is there. `keep`: a slot that is in use."""
        if number in self._in_slot:
            return self._in_slot.index(number)
        slot = next(s for s in range(_SLOTS) if s != keep)
        into = self._slots[slot][: self.batches[number].num_bytes]
        self._in_slot[slot] = number
        self._issue("compute", (), ((B.RETURN, slot),))  # earlier kernels may still read the slot
        self._move("h2d", number, (B.RETURN, slot), lambda host: into.copy_(host, non_blocking=True))
        return slot

    def _move(self, lane: Lane, number: int, device_buffer: Buffer, copy: Callable[[Tensor], Any]) -> None:
        num_bytes = self.batches[number].num_bytes
        home = (B.ARENA, number)
        if self._file is None:
            host = self._home[self._starts[number] :][:num_bytes]
            pair = ((home,), (device_buffer,)) if lane == "h2d" else ((device_buffer,), (home,))
            self._issue(lane, *pair, lambda: copy(host), num_bytes)
            return
        at = self._num_staged % _STAGES + (_STAGES if lane == "d2h" else 0)
        self._num_staged += 1
        host, stage = self._stages[at][:num_bytes], (B.HOST_STAGE, at)
        file, start = self._file, self._starts[number]
        if lane == "h2d":
            self._issue("host", (home,), (stage,), lambda: file.read(host, start))
            self._issue(lane, (stage,), (device_buffer,), lambda: copy(host), num_bytes)
        else:
            self._issue(lane, (device_buffer,), (stage,), lambda: copy(host), num_bytes)
            self._issue("host", (stage,), (home,), lambda: file.write(host, start))

    def _release_written(self) -> None:
        """Compute waits for the copies of tensors that are written: it may then reuse their memory."""
        for outgoing in list(self._outgoing):
            self._issue("compute", (), ((B.LIVE, outgoing),))
            del self._outgoing[outgoing]
        self._lanes.drop_old_events()

    def _issue(
        self, lane: Lane, reads: Buffers, writes: Buffers, work: Callable[[], Any] | None = None, num_bytes: int = 0
    ) -> None:
        """Without `work`, the action only orders others."""
        seconds = copy_seconds(self._device.spec, lane, num_bytes) if num_bytes else 0.0
        self._lanes.issue(lane, reads, writes, work or _nothing, seconds=seconds, name="hidden states")

    def _memory_of(self, buffer: Buffer) -> list[Tensor]:
        kind, number = buffer
        if kind == B.RETURN:
            return [self._slots[number]]
        if kind == B.LIVE:
            return [self._outgoing[number]]
        return [self._stages[number]] if kind == B.HOST_STAGE else []


class _File:
    """A file that has no name: its space is free again when the process ends, however it ends."""

    def __init__(self, folder: Path, num_bytes: int):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f".outsize-hidden-states-{os.getpid()}"
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            os.unlink(path)
            try:
                getattr(os, "posix_fallocate", _truncate)(self._fd, 0, num_bytes)
            except OSError:
                os.close(self._fd)
                raise
        except OSError as error:
            raise SaveFailed(
                f"prune.cache_dir: {folder} cannot hold {show_bytes(num_bytes)} of hidden states ({error.strerror}). "
                "Free some space, or name a folder on another disk. Nothing is lost."
            ) from None

    def read(self, into: Tensor, start: int) -> None:
        self._all(lambda view, at: os.preadv(self._fd, [view], at), into, start, "read")

    def write(self, tensor: Tensor, start: int) -> None:
        self._all(lambda view, at: os.pwrite(self._fd, view, at), tensor, start, "written")

    def _all(self, move: Callable[[memoryview, int], int], tensor: Tensor, start: int, verb: str) -> None:
        view, done = memoryview(tensor.numpy().data), 0
        while done < len(view):
            try:
                moved = move(view[done:], start + done)
            except OSError as error:
                raise SaveFailed(
                    f"prune.cache_dir: hidden states cannot be {verb} ({error.strerror}). Free some space, or name a "
                    "folder on another disk; the same command then continues."
                ) from error
            assert moved, "the file has its full size"
            done += moved

    def close(self) -> None:
        os.close(self._fd)


def _truncate(fd: int, start: int, num_bytes: int) -> None:
    """Where space cannot be reserved (macOS)."""
    os.ftruncate(fd, start + num_bytes)


def _nothing() -> None:
    pass
