"""BatchCache: what is read is what was written, in memory and in files, on `cpu` and on `sim` with race detection."""

import errno
import os
from pathlib import Path

import pytest
import torch

from outsize.base.errors import SaveFailed
from outsize.device.choose import choose_device
from outsize.transfer.batch_cache import BatchCache, BatchSpec

SHAPES = [(2, 5, 8), (2, 3, 8), (1, 7, 8), (2, 5, 8)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("name", ["cpu", "sim:64MiB"])
def test_layer_after_layer_overwrites_the_batches(tmp_path: Path, name: str, in_file: bool, dtype: torch.dtype) -> None:
    device = choose_device(name)
    specs = [BatchSpec(shape, dtype) for shape in SHAPES]
    cache = BatchCache(device, specs, tmp_path / "new" if in_file else None)
    expected = [torch.randn(shape).to(dtype) for shape in SHAPES]
    for number, tensor in enumerate(expected):
        cache.write(number, tensor)
    for _layer in range(3):
        for number in range(len(SHAPES)):
            hidden = cache.read(number, number + 1 if number + 1 < len(SHAPES) else None)
            assert torch.equal(hidden, expected[number])
            expected[number] = hidden * 1.5 + 1
            cache.write(number, expected[number])
        cache.finish()
    assert all(torch.equal(cache.read(number), expected[number]) for number in (2, 2, 0, 3))
    cache.close()
    assert not in_file or not any((tmp_path / "new").iterdir())


def test_a_batch_that_was_prefetched_and_is_then_overwritten_is_read_anew() -> None:
    cache = BatchCache(choose_device("sim:64MiB"), [BatchSpec((3,), torch.float32)] * 2)
    for number in (0, 1):
        cache.write(number, torch.full((3,), float(number)))
    assert cache.read(0, 1)[0] == 0
    cache.write(1, torch.full((3,), 7.0))
    assert cache.read(1)[0] == 7
    cache.close()


def test_what_was_read_may_be_written() -> None:
    """A layer that returns its input: the slot is filled again while its old content is on its way to the host."""
    cache = BatchCache(choose_device("sim:64MiB"), [BatchSpec((3,), torch.float32)] * 5)
    for number in range(5):
        cache.write(number, torch.full((3,), float(number)))
    for _layer in range(2):
        for number in range(5):
            cache.write(number, cache.read(number, number + 1 if number < 4 else None))
    cache.finish()
    assert [float(cache.read(number)[0]) for number in range(5)] == [0, 1, 2, 3, 4]
    cache.close()


def test_a_full_disk_is_found_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SaveFailed, match=r"prune.cache_dir: .* cannot hold 96 B .*No space left.*Nothing is lost"):
        BatchCache(choose_device("cpu"), [BatchSpec((24,), torch.float32)], tmp_path)
    assert not any(tmp_path.iterdir())
