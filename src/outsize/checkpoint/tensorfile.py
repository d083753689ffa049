"""TensorFile: a safetensors file, written and read one tensor at a time, at places that are known beforehand.

The safetensors library writes a file from a dict of all its tensors and reads a tensor into memory of its own; both
would hold a second copy of what a chunk already holds. Here bytes go from a chunk's home to the file and back with
nothing in between, from any thread and in any order. The files are the library's own, to the byte.
"""

import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import BadFile, tell

# In the order in which the library lays tensors out: the last first.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_RANK = {dtype: i for i, dtype in enumerate(_DTYPES.values())}
_PART_BYTES = 64 * 2**20
"""Large tensors are read by several threads in parts of this size."""
_MOST_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True, slots=True)
class Spec:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Spec":
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Entry:
    spec: Spec
    start: int
    """In bytes from the beginning of the file."""

    @property
    def end(self) -> int:
        return self.start + self.spec.nbytes


class TensorFile:
    def __init__(self, path: Path):
        """Open for reading. A file that is cut off, or no safetensors file, is refused by name."""
        try:
            self._own(path, os.open(path, os.O_RDONLY))
            with self._closed_if_it_fails():
                self.entries = _read_header(self._fd, path)
        except OSError as error:
            raise BadFile(
                tell(f"{path} can be read", str(error.strerror), "Put the file back, or name another folder")
            ) from None

    @classmethod
    def create(cls, path: Path, specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> "TensorFile":
        """A file of its final size with nothing in it yet; every tensor is to be written once."""
        file = cls.__new__(cls)
        header, file.entries = _layout(specs, metadata)
        file._own(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
        with file._closed_if_it_fails():
            os.ftruncate(file._fd, max((entry.end for entry in file.entries.values()), default=len(header)))
            _pwrite(file._fd, memoryview(header), 0)
        return file

    def _own(self, path: Path, fd: int) -> None:
        """The descriptor goes with this object, at the latest."""
        self.path, self._fd = path, fd
        self._close = weakref.finalize(self, os.close, fd)

    @contextmanager
    def _closed_if_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, name: str, tensor: Tensor) -> None:
        """From any device; a device's tensor passes through the host by itself, one at a time."""
        entry = self.entries[name]
        assert tensor.dtype == entry.spec.dtype and tuple(tensor.shape) == entry.spec.shape, name
        _pwrite(self._fd, _bytes(tensor.detach().to("cpu").contiguous()), entry.start)

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill a CPU tensor of this shape. Another dtype is converted, as `Tensor.to` does."""
        entry = self.entries[name]
        if tuple(tensor.shape) != entry.spec.shape:
            found = f"{name} in {self.path} has {entry.spec.shape}"
            raise BadFile(tell(f"{name} has the shape {tuple(tensor.shape)}", found, "Use the files of this model"))
        if tensor.dtype == entry.spec.dtype and tensor.is_contiguous():
            self._read(_bytes(tensor), entry.start)
            return
        whole = torch.empty(entry.spec.shape, dtype=entry.spec.dtype)
        self._read(_bytes(whole), entry.start)
        with torch.no_grad():
            tensor.copy_(whole)

    def read(self, name: str) -> Tensor:
        tensor = torch.empty(self.entries[name].spec.shape, dtype=self.entries[name].spec.dtype)
        self.read_into(name, tensor)
        return tensor

    def _read(self, into: memoryview, start: int) -> None:
        parts = [(at, into[at : at + _PART_BYTES]) for at in range(0, len(into), _PART_BYTES)]
        run = map if len(parts) < 2 else _readers().map
        # All of them end before the first fault is raised: nobody reads on into memory that is used otherwise by then.
        for fault in list(run(lambda part: _pread(self._fd, part[1], start + part[0]), parts)):
            if fault is not None:
                raise BadFile(
                    tell(f"{self.path} holds all of its tensors", fault, "It is cut off or damaged: get it again")
                )

    def close(self) -> None:
        self._fd = -1
        self._close()


def _layout(specs: Mapping[str, Spec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Entry]]:
    order = sorted(specs, key=lambda name: (-_RANK[specs[name].dtype], name))
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name in order:
        spec = specs[name]
        table[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    entries, at = {}, len(header)
    for name in order:
        entries[name] = Entry(specs[name], at)
        at = entries[name].end
    return header, entries


def _read_header(fd: int, path: Path) -> dict[str, Entry]:
    size = os.fstat(fd).st_size
    again = "It is damaged or cut off: get it again"
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
        raise BadFile(
            tell(f"{path} is a safetensors file", f"its {size} bytes do not hold the header that they announce", again)
        )
    try:
        rows = {
            name: _row(item) for name, item in json.loads(os.pread(fd, length, 8)).items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadFile(
            tell(f"{path} is a safetensors file", f"its header cannot be read ({type(error).__name__}: {error})", again)
        ) from None
    entries: dict[str, Entry] = {}
    at = 8 + length
    for name, (dtype, shape, begin, end) in sorted(rows.items(), key=lambda item: item[1][2:]):
        if dtype not in _DTYPES:
            raise BadFile(
                tell(
                    f"{path} has tensors of dtypes that torch has",
                    f"{name} is {dtype}",
                    "Convert it with what wrote it",
                )
            )
        entries[name] = Entry(Spec(_DTYPES[dtype], shape), at)
        if begin != at - 8 - length or end - begin != entries[name].spec.nbytes or min(shape, default=0) < 0:
            found = f"{name} has bytes {begin} to {end} for {shape} of {dtype}, after byte {at - 8 - length}"
            raise BadFile(tell(f"{path} has its tensors end to end, each of its own size", found, again))
        at = entries[name].end
    if at != size:
        raise BadFile(tell(f"{path} has {at} bytes", f"there are {size}", again))
    return entries


def _row(item: Any) -> tuple[str, tuple[int, ...], int, int]:
    begin, end = item["data_offsets"]
    return str(item["dtype"]), tuple(map(index, item["shape"])), index(begin), index(end)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


def _pread(fd: int, into: memoryview, start: int) -> str | None:
    """What went wrong, if anything did."""
    done = 0
    while done < len(into):
        try:
            got = os.preadv(fd, [into[done:]], start + done)
        except OSError as error:
            return f"byte {start + done} cannot be read ({error.strerror})"
        if not got:
            return f"it ends at byte {start + done}"
        done += got
    return None


def _pwrite(fd: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + _PART_BYTES], start + done)


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="outsize-read")
