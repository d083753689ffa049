"""TensorFile: a safetensors file that is written and read one tensor, or range of its elements, at a time.

The safetensors library writes a file from a dict of all its tensors and reads a tensor into new memory; both would
need a second copy of what a chunk already holds. Here bytes are copied directly between a chunk's home and the file,
from any thread and in any order. The files equal the library's to the byte.
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

from outsize.base.errors import BadFile

# The library orders tensors by dtype, the last of this table first.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
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
_DAMAGED = "It is damaged or truncated: get it again."


@dataclass(frozen=True, slots=True)
class TensorSpec:
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorSpec":
        return cls(tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StoredTensor:
    spec: TensorSpec
    start: int
    """First byte in the file."""

    @property
    def end(self) -> int:
        return self.start + self.spec.nbytes


class TensorFile:
    def __init__(self, path: Path):
        """Open for reading. Raises BadFile if it is truncated or not a safetensors file."""
        try:
            self._own(path, os.open(path, os.O_RDONLY))
            with self._closed_if_it_fails():
                self.entries = _read_header(self._fd, path)
        except OSError as error:
            raise BadFile(
                f"{path} cannot be read: {error.strerror}. Put the file back, or name another folder."
            ) from None

    @classmethod
    def create(cls, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> "TensorFile":
        """Create a file of its final size. Every tensor must be written once."""
        file = cls.__new__(cls)
        header, file.entries = _layout(specs, metadata)
        file._own(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
        with file._closed_if_it_fails():
            os.ftruncate(file._fd, max((entry.end for entry in file.entries.values()), default=len(header)))
            _pwrite(file._fd, memoryview(header), 0)
        return file

    def _own(self, path: Path, fd: int) -> None:
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

    def write(self, name: str, tensor: Tensor, first: int = 0) -> None:
        """Write a tensor from any device, or the elements of one from number `first` on."""
        assert tensor.dtype == self.entries[name].spec.dtype, name
        data = _bytes(tensor.detach().to("cpu").contiguous())
        _pwrite(self._fd, data, self._start(name, first, len(data)))

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill a CPU tensor of the same shape. Another dtype is converted, as by `Tensor.to`."""
        spec = self.entries[name].spec
        if tuple(tensor.shape) != spec.shape:
            raise BadFile(
                f"{name} has the shape {spec.shape} in {self.path} and {tuple(tensor.shape)} in the model. "
                "Use the files of this model."
            )
        if tensor.dtype == spec.dtype and tensor.is_contiguous():
            self.read_range(name, tensor.view(-1), 0)
        else:
            with torch.no_grad():
                tensor.copy_(self.read(name))

    def read(self, name: str) -> Tensor:
        spec = self.entries[name].spec
        tensor = torch.empty(spec.shape, dtype=spec.dtype)
        self.read_range(name, tensor.view(-1), 0)
        return tensor

    def read_range(self, name: str, flat: Tensor, first: int) -> None:
        """Fill a flat CPU tensor of the file's dtype with elements from number `first` on."""
        assert flat.dtype == self.entries[name].spec.dtype and flat.is_contiguous(), name
        data = _bytes(flat)
        self._read(data, self._start(name, first, len(data)))

    def _start(self, name: str, first: int, num_bytes: int) -> int:
        """The byte of an element. Raises if `num_bytes` from there on reach beyond the tensor."""
        entry = self.entries[name]
        start = entry.start + first * entry.spec.dtype.itemsize
        assert entry.start <= start and start + num_bytes <= entry.end, name
        return start

    def _read(self, into: memoryview, start: int) -> None:
        parts = [(at, into[at : at + _PART_BYTES]) for at in range(0, len(into), _PART_BYTES)]
        run = map if len(parts) < 2 else _readers().map
        # Wait for all parts before raising the first error: no thread may write to the memory after that.
        for fault in list(run(lambda part: _pread(self._fd, part[1], start + part[0]), parts)):
            if fault is not None:
                raise BadFile(f"{self.path}: {fault}. {_DAMAGED}")

    def close(self) -> None:
        self._fd = -1
        self._close()


def _layout(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, StoredTensor]]:
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
        entries[name] = StoredTensor(specs[name], at)
        at = entries[name].end
    return header, entries


def _read_header(fd: int, path: Path) -> dict[str, StoredTensor]:
    size = os.fstat(fd).st_size
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or length > min(_MOST_HEADER_BYTES, size - 8):
        raise BadFile(f"{path} is not a safetensors file: its {size} bytes do not hold the header. {_DAMAGED}")
    try:
        rows = {
            name: _row(item) for name, item in json.loads(os.pread(fd, length, 8)).items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"its header cannot be read ({type(error).__name__}: {error})"
        raise BadFile(f"{path} is not a safetensors file: {found}. {_DAMAGED}") from None
    entries: dict[str, StoredTensor] = {}
    at = 8 + length
    for name, (dtype, shape, begin, end) in sorted(rows.items(), key=lambda item: item[1][2:]):
        if dtype not in _DTYPES:
            raise BadFile(f"{path}: {name} has the dtype {dtype}, which torch does not have. Convert it to another.")
        entries[name] = StoredTensor(TensorSpec(_DTYPES[dtype], shape), at)
        if begin != at - 8 - length or end - begin != entries[name].spec.nbytes or min(shape, default=0) < 0:
            found = f"{name} has bytes {begin} to {end} for {shape} of {dtype}, after byte {at - 8 - length}"
            raise BadFile(f"{path}: its tensors do not follow each other: {found}. {_DAMAGED}")
        at = entries[name].end
    if at != size:
        raise BadFile(f"{path} has {size} bytes instead of {at}. {_DAMAGED}")
    return entries


def _row(item: Any) -> tuple[str, tuple[int, ...], int, int]:
    begin, end = item["data_offsets"]
    return str(item["dtype"]), tuple(map(index, item["shape"])), index(begin), index(end)


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


def _pread(fd: int, into: memoryview, start: int) -> str | None:
    """Returns the error as text, or None."""
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
