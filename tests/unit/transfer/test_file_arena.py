"""FileArena: sets of tensors that leave the device are in a file, which no folder shows and no crash leaves behind."""

import errno
import gc
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from offloads import INPUT_BYTES, Model, RatedCpu, inputs, offloading, same, step
from threaded import ThreadedCpu

from outsize.base.errors import TransferError
from outsize.device.cpu import CpuDevice
from outsize.device.device import Device
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.transfer.arena import FILE_BYTES_PER_SECOND
from outsize.transfer.file_arena import FileArena
from outsize.transfer.offloaded_tensors import OffloadedTensors

BLOCK = 4096
DEVICES = {"cpu": CpuDevice, "sim": lambda: SimDevice(lookup("64MiB")), "late copies": ThreadedCpu}
EVERY_DEVICE = pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)


def in_file(folder: Path, device: Device) -> FileArena:
    return FileArena(device, folder, staging_bytes=BLOCK)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """A disk that is full: files of this process cannot be larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 10 * BLOCK + 17])
def test_sets_of_any_size_come_back(size: int, tmp_path: Path) -> None:
    """With staging buffers of one block, so that sets take from one to eleven turns; two tensors meet in a buffer."""
    arena = in_file(tmp_path, CpuDevice())
    sets = []
    for seed in range(3):
        rng = torch.Generator().manual_seed(seed)
        pair = [torch.randint(0, 256, (n,), dtype=torch.uint8, generator=rng) for n in (size, 2 * size + 1)]
        tensors = OffloadedTensors()
        handles = [tensors.pack(tensor) for tensor in pair]
        number = arena.take(tensors.num_bytes)
        arena.copy_in(number, tensors)
        sets.append((number, tensors, handles, pair))
    for number, tensors, handles, pair in reversed(sets):
        buffer = torch.full((tensors.num_bytes,), 0xBB, dtype=torch.uint8)
        arena.copy_out(number, buffer)
        tensors.attach_buffer(buffer)
        assert all(torch.equal(tensors.unpack(handle), tensor) for handle, tensor in zip(handles, pair, strict=True))
        arena.give_back(number)
    before = arena.num_bytes
    assert arena.used_bytes == 0 and arena.take(before) is not None and arena.num_bytes == before


@EVERY_DEVICE
@pytest.mark.parametrize("strategy", ["offload", "swap"])
def test_training_has_the_same_bits_and_the_folder_is_empty(device, strategy: str, tmp_path: Path) -> None:
    model, x = Model(), inputs()
    expected = step(model, x)
    with offloading(model, device(), strategy, arena=partial(in_file, tmp_path), keep_last=1) as (offload, queue):
        for _ in range(2):
            assert same(step(model, x), expected)
            assert list(tmp_path.iterdir()) == []
        assert offload.num_sent == 10 and queue.arena.used_bytes == 0
        assert os.fstat(queue.arena._fd).st_size == queue.arena.num_bytes >= 5 * BLOCK


def test_training_at_a_gigabyte_a_second_has_the_same_bits(tmp_path: Path) -> None:
    """Copies take the time of a disk of 1 GB/s: 3 ms for each of six sets of 3 MB."""
    rows = 3_000_000 // (INPUT_BYTES // 64)
    model, x = Model(dropout=0.0), inputs(rows)
    expected = step(model, x)
    assert FILE_BYTES_PER_SECOND == 1e9
    with offloading(model, RatedCpu(seconds=0.0), arena=lambda device: FileArena(device, tmp_path)) as (offload, _):
        assert same(step(model, x), expected)
        assert offload.num_sent == 3 and offload.arena_bytes >= 9_000_000


@EVERY_DEVICE
def test_a_full_disk_names_the_file_and_loses_nothing(device, tmp_path: Path) -> None:
    """When a forward finds no space: the forward raises. Weights keep their bits, and the step can be repeated."""
    model, x = Model(), inputs()
    expected, before = step(model, x), [param.clone() for param in model.parameters()]
    with offloading(model, device(), arena=partial(in_file, tmp_path), keep_last=0) as (_, queue):
        name = re.escape(str(queue.arena.path))
        with largest_file(2 * BLOCK), pytest.raises(TransferError, match=rf"{name}: .* cannot be extended \(File too"):
            model(x)
        assert same(list(model.parameters()), before)
        assert queue.arena.used_bytes == 0 and queue.arena.num_bytes == 2 * BLOCK
        assert same(step(model, x), expected)


@EVERY_DEVICE
@pytest.mark.parametrize("is_abandoned", [False, True])
def test_an_error_of_a_thread_reaches_the_user(device, is_abandoned: bool, tmp_path: Path) -> None:
    """The file has its blocks, and writing fails: the backward raises, or the next step if there is none."""
    model, x = Model(), inputs()
    expected = step(model, x)
    with offloading(model, device(), arena=partial(in_file, tmp_path), keep_last=3) as (_, queue):
        step(model, x)
        name = re.escape(str(queue.arena.path))
        found = rf"{name}: activations cannot be written \(File too large\)"
        with largest_file(2 * BLOCK), pytest.raises(TransferError, match=found):
            loss = model(x)
            if is_abandoned:
                del loss
                model(x)
            else:
                loss.backward()
        loss = None
        gc.collect()  # the error has passed through the graph
        assert queue.num_in_flight == queue.arena.used_bytes == 0
        for _ in range(2):
            assert same(step(model, x), expected)


def test_a_file_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    model, x = Model(), inputs()
    with offloading(model, CpuDevice(), arena=partial(in_file, tmp_path), keep_last=0) as (_, queue):
        loss = model(x)
        os.ftruncate(queue.arena._fd, BLOCK)
        with pytest.raises(TransferError, match=rf"{re.escape(str(queue.arena.path))}: activations cannot be read"):
            loss.backward()


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TransferError, match=r"missing/outsize-activations-.* cannot be made"):
        FileArena(CpuDevice(), tmp_path / "missing")


def test_direct_io_is_used_and_a_file_system_without_it_is_written_all_the_same(tmp_path: Path) -> None:
    import fcntl

    arena = in_file(tmp_path, CpuDevice())
    flags = fcntl.fcntl(arena._fd, fcntl.F_GETFL)
    assert arena._staging[0].data_ptr() % BLOCK == 0
    tensors = OffloadedTensors()
    handle = tensors.pack(torch.arange(1000))
    number = arena.take(tensors.num_bytes)
    arena._staging = [torch.zeros(BLOCK + 1, dtype=torch.uint8)[1:] for _ in range(2)]  # no direct I/O from there
    arena.copy_in(number, tensors)
    if flags & os.O_DIRECT:
        assert not fcntl.fcntl(arena._fd, fcntl.F_GETFL) & os.O_DIRECT
    buffer = torch.empty(tensors.num_bytes, dtype=torch.uint8)
    arena.copy_out(number, buffer)
    tensors.attach_buffer(buffer)
    assert torch.equal(tensors.unpack(handle), torch.arange(1000))


def test_a_file_system_that_cannot_reserve_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file grows without them, and a full disk is found by the write."""

    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    model, x = Model(), inputs()
    expected = step(model, x)
    with offloading(model, CpuDevice(), arena=partial(in_file, tmp_path), keep_last=0) as (offload, queue):
        for _ in range(2):
            assert same(step(model, x), expected)
        assert offload.num_sent == 12 and os.fstat(queue.arena._fd).st_size == queue.arena.num_bytes
    with (
        offloading(model, CpuDevice(), arena=partial(in_file, tmp_path), keep_last=0) as (_, queue),
        largest_file(4 * BLOCK),
        pytest.raises(TransferError, match="cannot be extended"),
    ):
        step(model, x)


KILLED = """
import os, sys, torch
from outsize.device.cpu import CpuDevice
from outsize.transfer.file_arena import FileArena
arena = FileArena(CpuDevice(), sys.argv[1])
arena.take(1 << 20)
print(os.listdir(sys.argv[1]), flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_process_that_is_killed_leaves_no_file(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True)
    assert found.returncode == -9 and found.stdout.strip() == "[]", found.stderr
    assert list(tmp_path.iterdir()) == []
