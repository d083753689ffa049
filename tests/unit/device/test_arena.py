"""Host memory of a run: exact, zeroed, private to the process, and an error that names the size."""

import os
from pathlib import Path

import psutil
import pytest

from outsize.device.arena import arena

MiB = 2**20


def test_it_has_the_requested_size_and_is_zero_and_writable() -> None:
    for num_bytes in (0, 1, 4097, 5 * MiB + 3):
        tensor = arena(num_bytes)
        assert tensor.numel() == num_bytes and not tensor.any()
        tensor.fill_(7)
        assert num_bytes == 0 or tensor.sum() == 7 * num_bytes


def test_it_is_given_back_with_the_last_view() -> None:
    before = psutil.Process().memory_info().rss
    view = arena(256 * MiB)[5:6]
    assert psutil.Process().memory_info().rss - before > 200 * MiB
    del view
    assert psutil.Process().memory_info().rss - before < 64 * MiB


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at /proc")
def test_a_forked_child_does_not_have_it() -> None:
    """A loader's worker would keep the memory of an old plan alive; and pages that are copied on a write must not be
    under a DMA.
    """
    tensor = arena(8 * MiB)
    where = f"{tensor.data_ptr():x}"[:8]
    assert any(line.startswith(where) for line in Path("/proc/self/maps").read_text().splitlines())
    child = os.fork()
    if child == 0:
        os._exit(any(line.startswith(where) for line in Path("/proc/self/maps").read_text().splitlines()))
    assert os.waitpid(child, 0)[1] == 0


def test_too_much_is_refused_with_its_size() -> None:
    with pytest.raises(MemoryError, match="1125899906842624 bytes"):
        arena(2**50)
