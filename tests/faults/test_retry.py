"""Memory that runs out in the middle of training: the step is planned anew and made again to the same bits, or the user
is told what is left.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import trainers
import zoo
from torch import nn

import outsize
from outsize.base.errors import DeviceOutOfMemory, UpdateFailed
from outsize.integrations.hf import OutsizeTrainer
from outsize.runtime.engine import Engine
from outsize.runtime.retry import MOST_RETRIES

KIND = "gpt2"  # it has dropout, so a step that is made again must draw the same numbers


@contextmanager
def running_out(model: nn.Module, *, at: int, times: int = 1, in_backward: bool = False) -> Iterator[list[int]]:
    """The third layer finds no memory in its forward or backward number `at` and, if `times` says so, in those that
    follow.
    """
    calls: list[int] = []

    def fail() -> None:
        if "__deepcopy__" not in vars(model):
            return  # a profiling run, not training
        calls.append(len(calls))
        if at <= calls[-1] < at + times:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    def forward(module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if not in_backward:
            fail()
        elif tensor.requires_grad:
            tensor.register_hook(lambda grad: fail())

    handle = model.transformer.h[2].register_forward_hook(forward)
    try:
        yield calls
    finally:
        handle.remove()


def prepare(**spec: Any) -> Engine:
    model = zoo.make(KIND)
    optimizer = outsize.AdamW(lr=1e-2, weight_decay=0.1, **spec)
    return outsize.prepare(model, zoo.batch(KIND), optimizer=optimizer, device="sim:4MiB", chunk_bytes="8KiB")


def train(
    model: nn.Module, optimizer: Any, *, steps: int = 4, accumulate: int = 1, engine: Engine | None = None
) -> None:
    torch.manual_seed(7)
    for step in range(steps):
        for micro in range(accumulate):
            batch = zoo.batch(KIND, seed=10 * step + micro)

            def work(batch: Any = batch, last: bool = micro == accumulate - 1) -> None:
                if engine is not None and last and engine.plan.step_config.update == "in_backward":
                    with engine.last_backward():
                        model(**batch).loss.backward()
                else:
                    model(**batch).loss.backward()

            work() if engine is None else engine.retrying(work, batch)
        optimizer.step()
        optimizer.zero_grad()


def plain(**spec: Any) -> dict[str, torch.Tensor]:
    model = zoo.make(KIND)
    accumulate = spec.pop("accumulate", 1)
    train(
        model, cells.Reference(list(model.named_parameters()), lr=1e-2, weight_decay=0.1, **spec), accumulate=accumulate
    )
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(engine: Engine, expected: dict[str, torch.Tensor]) -> bool:
    return all(
        torch.equal(value, expected[name]) for name, value in engine.model.state_dict().items() if name in expected
    )


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_step_that_runs_out_of_memory_is_made_again_to_the_same_bits(
    in_backward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    engine = prepare(max_grad_norm=0.5)
    room = engine.plan.gpu_budget_bytes
    with cells.closing(engine), running_out(engine.model, at=2, in_backward=in_backward):
        train(engine.model, engine.optimizer, engine=engine)
        assert same(engine, plain(max_grad_norm=0.5))
        assert engine.plan.gpu_budget_bytes < room, "the new plan keeps more free"
    assert "Planning again" in caplog.text and "Tried to allocate" in caplog.text


def test_a_second_micro_batch_that_runs_out_in_forward_keeps_the_sums_of_the_first() -> None:
    with cells.closing(prepare()) as engine, running_out(engine.model, at=3):
        train(engine.model, engine.optimizer, accumulate=2, engine=engine)
        assert same(engine, plain(accumulate=2))


def test_in_its_backward_the_sums_are_lost_and_the_user_makes_the_step_again() -> None:
    with cells.closing(prepare()) as engine:
        before = {name: value.clone() for name, value in engine.model.state_dict().items()}
        told = pytest.raises(DeviceOutOfMemory, match=r"Call zero_grad\(\) and repeat the step's micro-batches")
        with running_out(engine.model, at=1, in_backward=True), told:
            train(engine.model, engine.optimizer, steps=1, accumulate=2, engine=engine)
        assert same(engine, before)
        engine.optimizer.zero_grad()
        train(engine.model, engine.optimizer, accumulate=2, engine=engine)
        assert same(engine, plain(accumulate=2))


def test_once_updates_in_backward_have_begun_it_says_that_a_checkpoint_is_needed() -> None:
    with cells.closing(prepare(update="in_backward")) as engine:
        with (
            running_out(engine.model, at=1, in_backward=True),
            pytest.raises(DeviceOutOfMemory, match="from the last checkpoint"),
        ):
            train(engine.model, engine.optimizer, engine=engine)
        with pytest.raises((outsize.base.errors.EngineMisuse, UpdateFailed), match="last checkpoint"):
            engine.optimizer.step()
        engine.state_was_loaded()


@pytest.mark.parametrize("times", [MOST_RETRIES, MOST_RETRIES + 1])
def test_it_is_tried_twice_and_no_more(times: int) -> None:
    with cells.closing(prepare()) as engine:
        work: Callable[[], None] = lambda: engine.model(**zoo.batch(KIND)).loss.backward()
        fails = [True] * times

        def sometimes() -> None:
            if fails:
                fails.pop()
                raise torch.OutOfMemoryError("CUDA out of memory")
            work()

        if times <= MOST_RETRIES:
            engine.retrying(sometimes, zoo.batch(KIND))
            engine.optimizer.step()
        else:
            with pytest.raises(DeviceOutOfMemory, match="planned again 2 times"):
                engine.retrying(sometimes, zoo.batch(KIND))


def test_our_trainer_makes_such_a_step_again_by_itself(tmp_path: Path) -> None:
    found = []
    for at in (2, 1000):
        trainer = trainers.ours(tmp_path / str(at), kind=KIND, plan="mixed")
        with trainers.closing(trainer), running_out(trainer.model, at=at):
            torch.manual_seed(3)
            found.append(trainers.train(trainer))
    cells.assert_same(*found)


@pytest.mark.parametrize(
    ("accumulate", "at", "times"),
    [
        pytest.param(2, 3, 1, id="second", marks=pytest.mark.full),
        pytest.param(3, 2, 1, id="third"),
        pytest.param(3, 2, 2, id="and-again-in-the-first", marks=pytest.mark.full),
    ],
)
def test_our_trainer_makes_all_micro_batches_of_a_step_again(
    accumulate: int, at: int, times: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for fails in (0, times):
        trainer = trainers.ours(
            tmp_path / str(fails), kind=KIND, plan="mixed", args={"gradient_accumulation_steps": accumulate}
        )
        with trainers.closing(trainer), running_out(trainer.model, at=at, times=fails, in_backward=True):
            torch.manual_seed(3)
            found.append(trainers.train(trainer))
    cells.assert_same(*found)
    assert caplog.text.count(f"repeating all {accumulate} micro-batches of the step so far") == times


def test_our_trainer_makes_them_again_twice_and_no_more(tmp_path: Path) -> None:
    trainer = trainers.ours(tmp_path, kind=KIND, plan="mixed", args={"gradient_accumulation_steps": 2})
    with trainers.closing(trainer), running_out(trainer.model, at=1, times=3, in_backward=True) as calls:
        with pytest.raises(DeviceOutOfMemory, match="planned again 2 times"):
            trainers.train(trainer)
        assert len(calls) == 4, "the first and the second, and twice the first again"


class CountingTrainer(OutsizeTrainer):
    """As TRL's: a loss outside of the model, with numbers for the log beside it."""

    def __init__(self, **given: Any):
        self.seen: list[float] = []
        super().__init__(**given)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch) * 0.5
        self.seen.append(loss.item())
        return loss


def test_micro_batches_that_are_made_again_may_be_longer_than_the_last_and_are_counted_once(tmp_path: Path) -> None:
    data = [
        row for i in range(4) for row in (*trainers.rows(KIND, 1, 16, first=i), *trainers.rows(KIND, 1, 8, first=i))
    ]
    found, seen = [], []
    for fails in (0, 1):
        args = trainers.arguments(
            tmp_path / str(fails),
            gradient_accumulation_steps=2,
            per_device_train_batch_size=1,
            train_sampling_strategy="sequential",
        )
        trainer = CountingTrainer(model=zoo.make(KIND), args=args, train_dataset=data, **trainers.planned("mixed"))
        with trainers.closing(trainer), running_out(trainer.model, at=3, times=fails, in_backward=True):
            torch.manual_seed(3)
            found.append(trainers.train(trainer))
            seen.append(trainer.seen)
    cells.assert_same(*found)
    assert seen[0] == seen[1][:3] + seen[1][4:], "but for the one that failed"


@pytest.mark.parametrize("saves", [False, True], ids=["nothing-saved", "saved"])
def test_once_updates_have_begun_our_trainer_names_what_is_on_disk(saves: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args: dict[str, Any] = {"max_grad_norm": 0.0, **({"save_strategy": "steps", "save_steps": 1} if saves else {})}
    told = (
        f"The newest complete one is {out / 'checkpoint-2'}:"
        if saves
        else f"from the last checkpoint. There is no checkpoint in {out}:"
    )
    trainer = trainers.ours(tmp_path, kind=KIND, plan="mixed", args=args)
    with (
        trainers.closing(trainer),
        running_out(trainer.model, at=2, in_backward=True),
        pytest.raises(DeviceOutOfMemory, match=re.escape(told)),
    ):
        trainers.train(trainer)
    if saves:
        trainer = trainers.ours(tmp_path, kind=KIND, plan="mixed", args=args)
        with trainers.closing(trainer):
            trainers.train(trainer, resume_from_checkpoint=str(out / "checkpoint-2"))
            assert trainer.state.global_step == 4


def test_it_names_no_checkpoint_of_a_run_that_has_gone_further_nor_one_without_state(tmp_path: Path) -> None:
    args = {"max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 3}
    with trainers.closing(trainers.ours(tmp_path, kind=KIND, plan="mixed", args=args)) as earlier:
        trainers.train(earlier)
    trainer = trainers.ours(tmp_path, kind=KIND, plan="mixed", args={**args, "save_steps": 1, "save_only_model": True})
    with (
        trainers.closing(trainer),
        running_out(trainer.model, at=2, in_backward=True),
        pytest.raises(DeviceOutOfMemory, match="There is no checkpoint in"),
    ):
        trainers.train(trainer)
