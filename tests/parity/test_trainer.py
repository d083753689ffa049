"""OutsizeTrainer equals transformers' Trainer with the reference optimizer: every logged loss, every norm, all weights
and moments, to the bit.

A case is a way of training; it is run under plans that have nothing in common but the model.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import trainers
import zoo
from cells import Outcome
from torch import Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    kind: str = "llama-untied"
    dtype: torch.dtype = torch.float32
    frozen: bool = False
    args: tuple[tuple[str, Any], ...] = ()
    """Of TrainingArguments."""
    given: tuple[tuple[str, Any], ...] = ()
    """Of the Trainer."""
    num_rows: int = 8

    def model(self) -> Any:
        model = zoo.make(self.kind, self.dtype)
        if self.frozen:
            zoo.freeze_some(model)
        return model

    def settings(self, folder: Path, **more: Any) -> dict[str, Any]:
        args = trainers.arguments(folder, **{**dict(self.args), **more})
        return {
            "model": self.model(),
            "args": args,
            "train_dataset": trainers.rows(self.kind, self.num_rows),
            **dict(self.given),
        }


def case(*, args: dict[str, Any] | None = None, given: dict[str, Any] | None = None, **fields: Any) -> Case:
    return Case(args=tuple((args or {}).items()), given=tuple((given or {}).items()), **fields)


def squared_logits(outputs: Any, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
    """A loss that no model has."""
    return (
        outputs.logits.float().square().sum() / num_items_in_batch + outputs.logits.float().flatten(0, 1)[:, 0].mean()
    )


CASES = {
    "fp32": case(args={"lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "bf16-tied": case(kind="llama", dtype=torch.bfloat16),
    "dropout": case(kind="gpt2"),
    "incomplete-window": case(
        kind="gpt2", num_rows=6, args={"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 2}
    ),
    "in-backward": case(kind="gpt2", dtype=torch.bfloat16, args={"max_grad_norm": 0.0}),
    "unclipped-window": case(
        dtype=torch.bfloat16, frozen=True, args={"gradient_accumulation_steps": 2, "max_grad_norm": 0.0, "max_steps": 2}
    ),
    "autocast": case(kind="gpt2", args={"bf16": True, "gradient_accumulation_steps": 2, "max_steps": 2}),
    "neftune": case(args={"neftune_noise_alpha": 5.0}),
    "label-smoothing": case(kind="gpt2", args={"label_smoothing_factor": 0.1}),
    "own-loss": case(
        args={"gradient_accumulation_steps": 2, "max_steps": 2}, given={"compute_loss_func": squared_logits}
    ),
}


@functools.cache
def plain(name: str) -> Outcome:
    """Several plans share it."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainers.PlainTrainer(**CASES[name].settings(Path(folder)))
        outcome = trainers.train(trainer)
    clip = dict(CASES[name].args).get("max_grad_norm", trainers.MAX_GRAD_NORM)
    assert not clip or max(outcome.norms) > clip, "clipping must clip, or it is not tested"
    return outcome


def ours(
    name: str, plan: str, folder: Path, *, eval_dataset: Any = None, **args: Any
) -> AbstractContextManager[trainers.OutsizeTrainer]:
    settings = CASES[name].settings(folder, **args)
    return trainers.closing(trainers.OutsizeTrainer(**settings, eval_dataset=eval_dataset, **trainers.planned(plan)))


@pytest.mark.parametrize(
    ("name", "plan"),
    [  # two of the three plans by turns; the third in `make test-all`
        pytest.param(name, plan, marks=[pytest.mark.full] if (i + j) % 3 == 0 else [])
        for i, name in enumerate(CASES)
        for j, plan in enumerate(trainers.PINS)
    ],
)
def test_training_equals_the_plain_trainer(
    name: str, plan: str, tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    with ours(name, plan, tmp_path) as trainer:
        cells.assert_same(trainers.train(trainer), plain(name))
        made = trainer.engine.plan
        assert made.step_config.update == ("in_backward" if name == "in-backward" else "after_step")
        if plan != "resident":
            assert {str(home).partition("/")[0] for home in made.decision.homes} == (
                {"host"} if plan == "streamed" else {"gpu", "host"}
            )
            assert {*made.decision.strategies} == (
                {"keep"} if plan == "streamed" else {"keep", "recompute", "swap", "offload"}
            )
            assert trainer.engine.report().gpu_peak_bytes <= made.estimate.gpu_bytes
    parity_cell((name, plan))


@pytest.mark.parametrize(
    "plan", [plan if plan == "mixed" else pytest.param(plan, marks=pytest.mark.full) for plan in trainers.PINS]
)
def test_evaluation_changes_nothing(plan: str, tmp_path: Path, parity_cell: Callable[[object], None]) -> None:
    """Every second step in ours, never in the plain one. Dropout would notice a random number drawn between."""
    held_out = trainers.rows("gpt2", 3, tokens=24, first=50)
    with ours(
        "dropout", plan, tmp_path, eval_dataset=held_out, eval_strategy="steps", eval_steps=2, eval_on_start=True
    ) as trainer:
        trainer.compute_metrics = lambda prediction: {"rows": len(prediction.predictions)}
        found = trainers.train(trainer)
        evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
        assert [entry["step"] for entry in evaluations] == [0, 2, 4] and {
            entry["eval_rows"] for entry in evaluations
        } == {3}
    cells.assert_same(found, plain("dropout"))
    parity_cell(plan)


RESUMED = [
    ("incomplete-window", "streamed", "mixed"),
    ("incomplete-window", "mixed", "resident"),
    ("in-backward", "resident", "streamed"),
    ("autocast", "mixed", "streamed"),
]


@pytest.mark.parametrize(("name", "first", "second"), RESUMED)
def test_a_run_resumed_under_another_plan_equals_one_that_was_not_interrupted(
    name: str, first: str, second: str, tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    """The interrupted run goes on to its end, past its checkpoint, so that saving is seen to change nothing."""
    expected = plain(name)
    middle = len(expected.norms) // 2
    with ours(name, first, tmp_path, save_strategy="steps", save_steps=middle) as trainer:
        cells.assert_same(trainers.train(trainer), expected)
        parity_cell((name, first))
    torch.manual_seed(99)  # another process would be elsewhere, too
    with ours(name, second, tmp_path) as trainer:
        found = trainers.train(trainer, resume_from_checkpoint=str(tmp_path / "out" / f"checkpoint-{middle}"))
    assert len(found.norms) == len(expected.norms) - middle
    cells.assert_same(dataclasses.replace(found, norms=expected.norms[:middle] + found.norms), expected)
    parity_cell((name, second))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bf16-tied", "dropout", "in-backward", "autocast", "label-smoothing", "own-loss"])
def test_training_on_a_gpu_equals_the_plain_trainer_there(
    name: str, tmp_path: Path, parity_cell: Callable[[object], None]
) -> None:
    """Also through a checkpoint: the GPU has a generator of its own."""
    case = CASES[name]
    expected = trainers.train(trainers.PlainTrainer(**case.settings(tmp_path / "plain", use_cpu=False)))
    middle = len(expected.norms) // 2
    for plan, start in (("streamed", None), ("mixed", str(tmp_path / "out" / f"checkpoint-{middle}"))):
        settings = case.settings(
            tmp_path, use_cpu=False, save_strategy="steps", save_steps=middle, eval_strategy="steps", eval_steps=1
        )
        trainer = trainers.OutsizeTrainer(
            **settings, eval_dataset=trainers.rows(case.kind, 3), **trainers.planned(plan, gpu=True)
        )
        with trainers.closing(trainer):
            found = trainers.train(trainer, resume_from_checkpoint=start)
        cells.assert_same(
            dataclasses.replace(found, norms=expected.norms[: len(expected.norms) - len(found.norms)] + found.norms),
            expected,
        )
        parity_cell((name, plan, "gpu"))
