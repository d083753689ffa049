import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from outsize.base.errors import BadFile, SaveFailed
from outsize.checkpoint.training_state import load_rng, load_scheduler, save_rng, save_scheduler
from outsize.device.cpu import CpuDevice
from outsize.device.rng import HostRng, rng_untouched

DEVICE = CpuDevice()
SETTINGS: dict[str, dict[str, Any]] = {
    "warmup_stable_decay": {"num_decay_steps": 2},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
}
BY_METRIC = ("reduce_lr_on_plateau", "greedy")


def draw() -> tuple[Any, ...]:
    """A number of every generator, normal ones too: those are drawn in pairs, and one may wait."""
    return (
        random.random(),
        random.gauss(),
        np.random.rand(),
        np.random.randn(),
        torch.rand(()).item(),
        torch.randn(()).item(),
    )


def test_what_is_drawn_inside_is_as_if_it_had_not_been() -> None:
    with rng_untouched(DEVICE):
        inside = draw()
    assert draw() == inside
    with pytest.raises(KeyError), rng_untouched(DEVICE):
        after = draw()
        raise KeyError
    assert draw() == after


def test_generators_go_on_from_a_file_where_they_were(tmp_path: Path) -> None:
    random.gauss(), np.random.randn()  # the second of a pair waits in both
    save_rng(tmp_path, DEVICE)
    expected = draw()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    assert draw() != expected
    load_rng(tmp_path, DEVICE)
    assert draw() == expected
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}


def test_generators_know_whether_they_have_moved() -> None:
    for move in (random.random, np.random.rand, lambda: torch.rand(())):
        before = HostRng.now()
        assert before.is_now()
        move()
        assert not before.is_now()
        before.restore()
        assert before.is_now()


def scheduler_of(kind: str, steps: int) -> Any:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = get_scheduler(
        kind, optimizer, num_warmup_steps=2, num_training_steps=9, scheduler_specific_kwargs=SETTINGS.get(kind, {})
    )
    advance(scheduler, kind, steps)
    return scheduler


def advance(scheduler: Any, kind: str, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        scheduler.optimizer.step()
        scheduler.step(*([1.0] if kind in BY_METRIC else []))
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("kind", [kind.value for kind in SchedulerType])
def test_every_schedule_of_transformers_resumes_from_a_file(kind: str, tmp_path: Path) -> None:
    """The optimizer's own groups, with their rates, are in the engine's part of a checkpoint."""
    first = scheduler_of(kind, 4)
    save_scheduler(tmp_path, first)
    second = scheduler_of(kind, 0)
    load_scheduler(tmp_path, second)
    assert second.state_dict() == first.state_dict()
    second.optimizer.param_groups[0].update(lr=first.optimizer.param_groups[0]["lr"])
    assert advance(second, kind, 14) == advance(first, kind, 14)


def test_a_schedule_with_more_than_numbers_says_so(tmp_path: Path) -> None:
    scheduler = scheduler_of("linear", 0)
    scheduler.notes = object()
    with pytest.raises(SaveFailed, match=r"save_only_model=True"):
        save_scheduler(tmp_path, scheduler)


def test_a_file_that_is_gone_or_cut_off_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"rng\.json"):
        load_rng(tmp_path, DEVICE)
    (tmp_path / "scheduler.json").write_text('{"last_epoch": 3')
    with pytest.raises(BadFile, match=r"scheduler\.json"):
        load_scheduler(tmp_path, scheduler_of("linear", 0))
