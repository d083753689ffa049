"""FileArena: sets of tensors that leave the device lie in a file instead of host memory.

Bytes pass through two pinned staging buffers. A thread of the copies' lane writes one to the file while the next bytes
are copied to the other, and likewise back. The file is written with direct I/O where the file system has it, so it
takes no page cache. It is unlinked as soon as it is open: no process that ends, however it ends, leaves a file.
"""

import errno
import fcntl
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from torch import Tensor

from outsize.base.errors import TransferError
from outsize.base.units import show_bytes
from outsize.device.device import Device
from outsize.transfer.offloaded_tensors import OffloadedTensors
from outsize.transfer.placed_pieces import PlacedPieces

_BLOCK = 4096
"""Direct I/O needs memory, offsets and sizes that are multiples of this."""
_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_RESERVATION = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
"""Of file systems that cannot reserve blocks. glibc then writes single bytes, which direct I/O refuses."""
STAGING_BYTES = 32 * 2**20


class FileArena:
    blocks = True

    def __init__(self, device: Device, folder: str | Path, *, staging_bytes: int = STAGING_BYTES):
        self._device, self._size = device, _rounded(staging_bytes)
        self.path = Path(folder) / f"outsize-activations-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._fd = _open(self.path)
        weakref.finalize(self, os.close, self._fd)
        self.pieces = PlacedPieces()
        self.pieces.areas.append(0)
        self._staging = [_aligned(device.host_empty(self._size + _BLOCK, pinned=True), self._size) for _ in range(2)]
        self._lock = threading.Lock()
        """Of the staging buffers: copies to and from the device may run at the same time."""
        self._failed: dict[int, str] = {}
        """Pieces that could not be written, with the message. The error itself would keep what it passed through."""

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.pieces.num_bytes

    @property
    def used_bytes(self) -> int:
        return self.pieces.used_bytes

    def take(self, num_bytes: int) -> int:
        """The number of a piece, whose blocks on the disk are reserved. Raises TransferError if the disk is full; where
        the file system cannot reserve them, the write does.
        """
        num_bytes = _rounded(num_bytes)
        number = self.pieces.place(num_bytes)
        if number is None:
            start = self.pieces.end_of_last(0)
            try:
                self._extend(start, num_bytes)
            except OSError as error:
                os.ftruncate(self._fd, self.pieces.areas[0])
                raise self._error("extended", error, f"It has {show_bytes(self.num_bytes)}. ") from None
            self.pieces.areas[0] = start + num_bytes
            number = self.pieces.place(num_bytes)
        assert number is not None
        return number

    def _extend(self, start: int, num_bytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, start, num_bytes)
        except OSError as error:
            if error.errno not in _NO_RESERVATION:
                raise
            os.ftruncate(self._fd, start + num_bytes)

    def give_back(self, number: int) -> None:
        self._failed.pop(number, None)
        self.pieces.free(number)

    def area_of(self, number: int) -> int:
        return 0

    def memory(self, area: int) -> list[Tensor]:
        return []  # the lock orders the uses of the staging buffers

    def copy_in(self, number: int, tensors: OffloadedTensors) -> None:
        with self._lock:
            try:
                written: Callable[[], None] | None = None
                for staging, place, start, size in self._parts(number, tensors.num_bytes):
                    tensors.copy_range_to(staging, start, size)
                    mark = self._device.mark()
                    if written is not None:
                        written()  # while the next bytes are copied
                    self._device.wait_for(mark)
                    written = partial(self._write, staging, place, size)
                if written is not None:
                    written()
            except TransferError as error:
                self._failed[number] = str(error)
                raise

    def copy_out(self, number: int, buffer: Tensor) -> None:
        if number in self._failed:
            raise TransferError(self._failed[number])
        with self._lock:
            marks: list[object] = []
            for staging, place, start, size in self._parts(number, buffer.numel()):
                if len(marks) > 1:
                    self._device.wait_for(marks[-2])
                self._read(staging, place, size)
                buffer[start : start + size].copy_(staging[:size], non_blocking=True)
                marks.append(self._device.mark())
            for mark in marks[-1:]:
                self._device.wait_for(mark)

    def _parts(self, number: int, num_bytes: int) -> Iterator[tuple[Tensor, int, int, int]]:
        """Staging buffer, place in the file, start in the set, and size."""
        first = self.pieces[number].start
        for turn, start in enumerate(range(0, num_bytes, self._size)):
            yield self._staging[turn % 2], first + start, start, min(self._size, num_bytes - start)

    def _write(self, staging: Tensor, place: int, size: int) -> None:
        rest = staging.numpy().data[: _rounded(size)]
        while rest:
            done = self._try("written", partial(os.pwrite, self._fd, rest, place))
            rest, place = rest[done:], place + done

    def _read(self, staging: Tensor, place: int, size: int) -> None:
        rest = staging.numpy().data[: _rounded(size)]
        while rest:
            done = self._try("read", partial(os.preadv, self._fd, [rest], place))
            if not done:
                raise self._error("read", OSError(errno.EIO, "the file ends too early"))
            rest, place = rest[done:], place + done

    def _try(self, what: str, operation: Callable[[], int]) -> int:
        try:
            return operation()
        except OSError as error:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & _DIRECT:
                raise self._error(what, error) from None
        # The file system opens files for direct I/O, and does not have it for this size.
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_DIRECT)
        return self._try(what, operation)

    def _error(self, what: str, error: OSError, found: str = "") -> TransferError:
        return TransferError(
            f"{self.path}: activations cannot be {what} ({error.strerror}). {found}No weight was updated with them. "
            "Free space, name a folder on another disk, or reduce the batch; then repeat the step."
        )


def _open(path: Path) -> int:
    """Open a new file and unlink it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        try:
            file = os.open(path, flags | _DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            path.unlink(missing_ok=True)  # some file systems create it before they refuse
            file = os.open(path, flags, 0o600)
        path.unlink()
        return file
    except OSError as error:
        raise TransferError(
            f"{path}: the file for activations cannot be made ({error.strerror}). Name a folder that can be written."
        ) from None


def _rounded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _aligned(buffer: Tensor, size: int) -> Tensor:
    start = -buffer.data_ptr() % _BLOCK
    return buffer[start : start + size]
