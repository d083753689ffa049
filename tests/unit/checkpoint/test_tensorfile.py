"""TensorFile: the library's files to the byte, in any order and from any thread; what is not whole is refused
by name.
"""

import gc
import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from outsize.base.errors import BadFile
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e5m2,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.int16,
    torch.uint16,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.uint32,
    torch.float32,
    torch.complex64,
    torch.float64,
    torch.int64,
    torch.uint64,
]


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    """Any bits that the dtype allows; NaN is among them."""
    count = torch.Size(shape).numel()
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return bits.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def bits(tensor: Tensor) -> Tensor:
    return (
        tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
    )


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def specs(tensors: dict[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec.of(tensor) for name, tensor in tensors.items()}


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> Path:
    path.unlink(missing_ok=True)
    with TensorFile.create(path, specs(tensors), metadata or {}) as file:
        for name in reversed(list(tensors)):
            file.write(name, tensors[name])
    return path


MANY = {
    **{f"t{i}": some(dtype, 2 + i % 3, 3) for i, dtype in enumerate(DTYPES)},
    "scalar": torch.tensor(1.5),
    "count": torch.tensor(7),
    "none": torch.empty(0),
    "nothing by three": torch.empty(0, 3, dtype=torch.bfloat16),
    'a "name" with\ttabs\nand \\ and /': torch.ones(2),
    "größe 数 🙂": torch.zeros(3),
    "\x7f\x01": torch.ones(1),
}


# --- the same files


@pytest.mark.parametrize("metadata", [{}, {"format": "pt"}, {"note": 'ü "x"'}])
def test_a_file_is_the_librarys_to_the_byte(tmp_path: Path, metadata: dict[str, str]) -> None:
    save_file(MANY, tmp_path / "theirs", metadata=metadata or None)
    assert write(tmp_path / "ours", MANY, metadata).read_bytes() == (tmp_path / "theirs").read_bytes()


@given(
    names=st.lists(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=6).filter(lambda name: name != "__metadata__"),
        unique=True,
        max_size=5,
    ),
    shapes=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=5, max_size=5),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=5, max_size=5),
)
def test_a_file_of_any_tensors_is_the_librarys_to_the_byte(
    tmp_path_factory: Any, names: list[str], shapes: list[list[int]], dtypes: list[torch.dtype]
) -> None:
    folder = tmp_path_factory.mktemp("files")
    tensors = {name: some(dtype, *shape) for name, shape, dtype in zip(names, shapes, dtypes, strict=False)}
    save_file(tensors, folder / "theirs")
    assert write(folder / "ours", tensors).read_bytes() == (folder / "theirs").read_bytes()
    with TensorFile(folder / "theirs") as file:
        assert (
            all(same(file.read(name), tensor) for name, tensor in tensors.items())
            and file.entries.keys() == tensors.keys()
        )


def test_what_is_written_is_read_back_by_us_and_by_the_library(tmp_path: Path) -> None:
    write(tmp_path / "f", MANY)
    theirs = load_file(tmp_path / "f")
    with TensorFile(tmp_path / "f") as file:
        assert file.entries.keys() == MANY.keys() == theirs.keys()
        assert all(same(file.read(name), tensor) and same(theirs[name], tensor) for name, tensor in MANY.items())


def test_many_threads_write_and_read_one_file(tmp_path: Path) -> None:
    tensors = {f"t{i}": some(torch.float32, 50, i) for i in range(40)}
    with TensorFile.create(tmp_path / "f", specs(tensors), {}) as file, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: file.write(name, tensors[name]), tensors))
    with TensorFile(tmp_path / "f") as file, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda name: same(file.read(name), tensors[name]), tensors))


def test_a_tensor_that_is_read_by_several_threads_is_whole(tmp_path: Path) -> None:
    large = some(torch.uint8, 130 * 2**20 + 1)
    write(tmp_path / "f", {"before": torch.ones(3), "large": large, "after": torch.ones(2)})
    with TensorFile(tmp_path / "f") as file:
        assert same(file.read("large"), large)


def test_permuted_tensors_are_written_as_they_look_and_read_into_as_they_lie(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).reshape(2, 3, 4)
    write(tmp_path / "f", {"t": tensor.permute(2, 0, 1), "gaps": tensor[:, :, ::2], "wide": torch.ones(1).expand(5)})
    with TensorFile(tmp_path / "f") as file:
        into = torch.empty(2, 3, 4).permute(2, 0, 1)
        file.read_into("t", into)
        assert torch.equal(into, tensor.permute(2, 0, 1)) and torch.equal(file.read("gaps"), tensor[:, :, ::2])
        assert torch.equal(file.read("wide"), torch.ones(5))


def test_reading_into_a_part_of_a_buffer_leaves_the_rest(tmp_path: Path) -> None:
    write(tmp_path / "f", {"t": torch.ones(3)})
    buffer = torch.full((5,), 7.0)
    with TensorFile(tmp_path / "f") as file:
        file.read_into("t", buffer[1:4])
    assert buffer.tolist() == [7, 1, 1, 1, 7]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_reading_into_another_dtype_is_what_tensor_to_does_for_every_bit_pattern(
    tmp_path: Path, dtype: torch.dtype, to: torch.dtype
) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    write(tmp_path / "f", {"t": every})
    with TensorFile(tmp_path / "f") as file:
        file.read_into("t", into := torch.empty(2**16, dtype=to))
    assert same(into, every.to(to))


def test_a_parameter_can_be_written_and_read_into(tmp_path: Path) -> None:
    param, other = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.zeros(2, 2))
    write(tmp_path / "f", {"p": param})
    with TensorFile(tmp_path / "f") as file:
        file.read_into("p", other)
    assert torch.equal(other, param)


# --- what is not whole


def header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def with_header(path: Path, table: Any, data: bytes) -> None:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_a_file_cut_off_anywhere_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "f", {"a": some(torch.float32, 5), "b": some(torch.bfloat16, 3)})
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BadFile, match=str(path)):
            TensorFile(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(BadFile, match="bytes"):
        TensorFile(path)


A, B = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]}
DAMAGED = {
    "no JSON": b"{]",
    "no text": b"\xff\xfe\x00",
    "a list": [A, B],
    "a tensor that is a number": {"a": 1, "b": B},
    "no dtype": {"a": {k: v for k, v in A.items() if k != "dtype"}, "b": B},
    "a dtype that is a list": {"a": {**A, "dtype": []}, "b": B},
    "a dtype that nobody knows": {"a": {**A, "dtype": "F3"}, "b": B},
    "another dtype": {"a": {**A, "dtype": "F64"}, "b": B},
    "another shape": {"a": {**A, "shape": [3]}, "b": B},
    "a shape of words": {"a": {**A, "shape": ["two"]}, "b": B},
    "a shape of fractions": {"a": {**A, "shape": [2.0]}, "b": B},
    "a shape below zero": {"a": {**A, "shape": [-1, -2]}, "b": B},
    "no shape": {"a": {**A, "shape": None}, "b": B},
    "an offset below zero": {"a": {**A, "data_offsets": [-8, 0]}, "b": {**B, "data_offsets": [0, 12], "shape": [3]}},
    "offsets that are fractions": {"a": {**A, "data_offsets": [0.0, 8.0]}, "b": B},
    "one offset": {"a": {**A, "data_offsets": [0]}, "b": B},
    "offsets the wrong way round": {"a": {**A, "data_offsets": [8, 0]}, "b": B},
    "tensors that overlap": {"a": A, "b": {**B, "data_offsets": [4, 12], "shape": [2]}},
    "a hole": {"a": {**A, "data_offsets": [0, 4], "shape": [1]}, "b": B},
    "nothing at the end": {"a": A},
    "brackets without end": b'{"a":' + b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_header_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    path = write(tmp_path / "f", {"a": torch.ones(2), "b": torch.ones(1)})
    assert header(path)[0] == {"a": A, "b": B}, "or else the damages above are none"
    with_header(path, DAMAGED[damage], header(path)[1])
    with pytest.raises(BadFile, match=str(path)):
        TensorFile(path)


def test_every_flipped_bit_of_a_header_is_refused_or_still_a_file_of_its_size(tmp_path: Path) -> None:
    """A name or a dtype of the same size may change without a trace; nothing else may pass, and nothing but BadFile may
    come.
    """
    path = write(tmp_path / "f", {"a": torch.ones(2), "b": torch.ones(1)})
    whole = path.read_bytes()
    for at in range(len(whole) - 12):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                with TensorFile(path) as file:
                    assert sum(entry.spec.nbytes for entry in file.entries.values()) == 12
                    assert all(file.read(name).nbytes == entry.spec.nbytes for name, entry in file.entries.items())
            except BadFile as error:
                assert str(path) in str(error)


@pytest.mark.parametrize("length", [100, 2**33, 2**64 - 1])
def test_a_header_that_is_longer_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "f").write_bytes(struct.pack("<Q", length) + b"{}      ")
    with pytest.raises(BadFile, match="do not hold the header"):
        TensorFile(tmp_path / "f")


def test_what_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", tmp_path / "missing" / "f"):
        with pytest.raises(BadFile, match=str(path)):
            TensorFile(path)


@pytest.mark.parametrize("size", [100, 130 * 2**20])
def test_a_file_that_shrinks_after_it_was_opened_is_refused_when_it_is_read(tmp_path: Path, size: int) -> None:
    """The larger one is read by several threads: all of them are done when the error comes."""
    path = write(tmp_path / "f", {"t": some(torch.uint8, size)})
    with TensorFile(path) as file:
        os.truncate(path, path.stat().st_size - size // 2)
        with pytest.raises(BadFile, match=rf"{path}.*it ends at byte {path.stat().st_size}"):
            file.read("t")


def test_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "f", {"t": torch.ones(2, 3)})
    with TensorFile(tmp_path / "f") as file, pytest.raises(BadFile, match=r"t has the shape \(2, 3\).*\(3, 2\)"):
        file.read_into("t", torch.empty(3, 2))


# --- files as such


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def test_no_descriptor_is_left_whatever_happens(tmp_path: Path) -> None:
    before = descriptors()
    path = write(tmp_path / "f", {"t": torch.ones(2)})
    file = TensorFile(path)
    file.close()
    file.close()
    with pytest.raises(OSError):
        TensorFile.create(path, {}, {})
    with pytest.raises(OSError):
        TensorFile.create(tmp_path / "huge", {"t": TensorSpec(torch.uint8, (2**62,))}, {})
    path.write_bytes(b"damaged")
    with pytest.raises(BadFile):
        TensorFile(path)
    write(path, {"t": torch.ones(2)})
    forgotten = TensorFile(path)
    assert descriptors() != before
    del forgotten, file
    gc.collect()
    assert descriptors() == before


def test_a_closed_file_reads_nothing_even_if_its_descriptor_is_in_use_elsewhere_by_now(tmp_path: Path) -> None:
    path = write(tmp_path / "f", {"t": torch.ones(2)})
    file = TensorFile(path)
    file.close()
    with path.open("rb"), pytest.raises(BadFile, match="cannot be read"):
        file.read("t")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_that_the_umask_leaves(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        path = write(tmp_path / "f", {"t": torch.ones(2)})
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_file_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        TensorFile.create(tmp_path / "f", {}, {})
    assert (tmp_path / "f").read_text() == "mine"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_a_tensor_is_written_and_read_by_ranges_of_its_elements(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": some(dtype, 3, 7), "b": some(dtype, 5)}
    whole = write(tmp_path / "whole", tensors)
    flat = tensors["a"].reshape(-1)
    with TensorFile.create(tmp_path / "parts", {k: TensorSpec.of(t) for k, t in tensors.items()}, {}) as file:
        file.write("a", flat[13:], 13)
        file.write("b", tensors["b"])
        file.write("a", flat[:13], 0)
        for first, part in ((1, flat), (-1, flat[:1]), (20, flat[:2])):
            with pytest.raises(AssertionError):
                file.write("a", part, first)
    assert (tmp_path / "parts").read_bytes() == whole.read_bytes()
    with TensorFile(whole) as file:
        part = torch.empty(5, dtype=dtype)
        file.read_range("a", part, 11)
        assert same(part, flat[11:16])
        with pytest.raises(AssertionError):
            file.read_range("a", part, 17)
