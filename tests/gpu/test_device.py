"""What an engine changes of the process on a real GPU is as before when it has ended: memory limit and threads."""

import os
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
import zoo

import outsize
from outsize.base.errors import PlanInfeasible
from outsize.device.choose import choose_device

pytestmark = pytest.mark.gpu


@pytest.fixture
def limited() -> Any:
    """The user's own limit, which is not that of a plan."""
    choose_device("cuda")._given_fraction = 0.9  # type: ignore[attr-defined]
    torch.cuda.set_per_process_memory_fraction(0.9)
    yield 0.9
    choose_device("cuda")._given_fraction = 1.0  # type: ignore[attr-defined]
    torch.cuda.set_per_process_memory_fraction(1.0)


ON_HOST = outsize.Pins(n_persist=0, n_optimizer_gpu=0, n_optimizer_streamed=0)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("outsize-")]


@pytest.mark.parametrize("end", ["detach", "close"])
def test_the_memory_limit_and_the_threads_end_with_the_engine(end: str, limited: float) -> None:
    model, batch = zoo.make("llama", torch.bfloat16), zoo.batch("llama")
    engine = outsize.prepare(model, batch, device="cuda", gpu_memory="4GiB", pins=ON_HOST)
    model(**batch).loss.backward()
    engine.optimizer.step()
    assert own_threads() and torch.cuda.get_per_process_memory_fraction() < 0.1
    getattr(engine, end)()
    assert not own_threads() and torch.cuda.get_per_process_memory_fraction() == pytest.approx(limited)


OTHER = (
    "import torch; x = torch.empty(6 * 2**30, dtype=torch.uint8, device='cuda'); print('ready', flush=True); input()"
)


def test_memory_of_another_process_is_not_part_of_this_ones_budget() -> None:
    device = choose_device("cuda")
    before, free = device.overhead_bytes, device.free_bytes
    with subprocess.Popen(
        [sys.executable, "-c", OTHER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "ready\n"
        try:
            assert abs(device.overhead_bytes - before) < 2**29 and device.free_bytes < free - 6 * 2**30
            model, batch = zoo.make("llama", torch.bfloat16), zoo.batch("llama")
            engine = outsize.prepare(model, batch, device="cuda", gpu_memory="4GiB")
            engine.detach()
        finally:
            other.communicate("\n")


def test_a_plan_that_does_not_fit_leaves_the_limit_as_it_was(limited: float) -> None:
    with pytest.raises(PlanInfeasible):
        outsize.prepare(zoo.make("llama", torch.bfloat16), zoo.batch("llama"), device="cuda", gpu_memory="16MiB")
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(limited)


ALLOCATES = """
import logging, torch
logging.basicConfig(level=logging.WARNING)
held = torch.zeros(2**20, device="cuda")
from outsize.device.choose import choose_device
choose_device("cuda")
"""


@pytest.mark.parametrize(("setting", "is_said"), [("", True), ("expandable_segments:False", False)])
def test_settings_of_the_allocator_are_not_changed_silently(setting: str, is_said: bool) -> None:
    env = {**os.environ, "PYTORCH_ALLOC_CONF": setting}
    found = subprocess.run([sys.executable, "-c", ALLOCATES], env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert ("switched to expandable segments" in found.stderr) == is_said, found.stderr
