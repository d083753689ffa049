"""The number of CPU threads of a run: the user's, the checkpoint's, or the faster one."""

import logging
from collections.abc import Iterator

import psutil
import pytest
import torch
from torch import nn

from outsize.device.cpu import CpuDevice
from outsize.run.cpu_threads import set_threads

MODEL = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process for which the user has set nothing."""
    before = torch.get_num_threads()
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    torch.set_num_threads(psutil.cpu_count() or 1)
    yield
    torch.set_num_threads(before)


def test_one_thread_is_chosen_only_with_a_note() -> None:
    many, seed = torch.get_num_threads(), torch.get_rng_state()
    note = set_threads(MODEL, 8, CpuDevice(), None)
    assert torch.get_num_threads() == (1 if note else many)
    assert all(param.grad is None for param in MODEL.parameters()) and torch.equal(torch.get_rng_state(), seed)


def test_large_operators_keep_all_threads() -> None:
    with torch.device("meta"):
        model = nn.Linear(4096, 4096)
    many = torch.get_num_threads()
    assert set_threads(model, 4096, CpuDevice(), None) == "" and torch.get_num_threads() == many


def test_a_resumed_run_has_the_threads_of_its_checkpoint() -> None:
    many = torch.get_num_threads()
    assert set_threads(MODEL, 8, CpuDevice(), many) == "" and torch.get_num_threads() == many
    assert set_threads(MODEL, 8, CpuDevice(), many + 1) == f"CPU threads: {many + 1}, as in the checkpoint"
    assert torch.get_num_threads() == many + 1


@pytest.mark.parametrize("variable", ["OMP_NUM_THREADS", None])
def test_the_users_number_stays_and_other_bits_on_resume_are_named(
    variable: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if variable:
        monkeypatch.setenv(variable, "2")
    torch.set_num_threads(7 + (psutil.cpu_count() or 1))
    now = torch.get_num_threads()
    with caplog.at_level(logging.WARNING):
        assert set_threads(MODEL, 8, CpuDevice(), now) == set_threads(MODEL, 8, CpuDevice(), None) == ""
        assert not caplog.records
        assert set_threads(MODEL, 8, CpuDevice(), 3) == "" and torch.get_num_threads() == now
    assert "OMP_NUM_THREADS=3 keeps them" in caplog.text
