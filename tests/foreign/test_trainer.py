"""Callbacks that read or steer a run see and change the same as in transformers' plain Trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import trainers
import zoo
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback

from outsize.integrations.hf import OutsizeMixin

KIND = "llama-untied"


class Steers(TrainerCallback):
    """Evaluates and saves at steps of its own choice, and notes what is logged."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, str, float]] = []
        self.saved: list[list[str]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_evaluate = state.global_step in (1, 3)
        control.should_save = state.global_step == 2
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged += [
            (state.global_step, name, logs[name]) for name in ("grad_norm", "loss", "eval_loss") if name in logs
        ]

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self.saved.append(
            sorted(
                path.name
                for path in folder.iterdir()
                if path.name in ("config.json", "model.safetensors", "trainer_state.json")
            )
        )


class ReadsState(TrainerCallback):
    """Of the optimizer, in both ways that torch has."""

    def __init__(self, model: Any) -> None:
        self._names = {param: name for name, param in model.named_parameters()}
        self.by_position: list[float] = []
        self.by_parameter: list[dict[str, float]] = []
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        saved = optimizer.state_dict()["state"]
        self.by_position.append(sum(float(values["exp_avg"].double().abs().sum()) for values in saved.values()))
        self.by_parameter.append(
            {
                name: float(optimizer.state[p]["exp_avg_sq"].double().sum())
                for p, name in self._names.items()
                if p in optimizer.state
            }
        )
        self.rates.append(optimizer.param_groups[0]["lr"])


def settings(folder: Path, **args: Any) -> dict[str, Any]:
    held_out = trainers.rows(KIND, 3, first=50)
    return {
        "model": zoo.make(KIND),
        "args": trainers.arguments(folder, **args),
        "train_dataset": trainers.rows(KIND),
        "eval_dataset": held_out,
    }


def both(folder: Path, plan: str, **args: Any) -> tuple[Any, Any]:
    plain = trainers.PlainTrainer(**settings(folder / "plain", **args))
    return plain, trainers.OutsizeTrainer(**settings(folder / "ours", **args), **trainers.planned(plan))


@pytest.mark.parametrize("plan", ["streamed", pytest.param("resident", marks=pytest.mark.full)])
def test_a_callback_that_evaluates_saves_and_logs(plan: str, tmp_path: Path) -> None:
    plain, ours = both(tmp_path, plan)
    seen = []
    outcomes = []
    for trainer in (plain, ours):
        callback = Steers()
        trainer.add_callback(callback)
        outcomes.append(trainers.train(trainer))
        seen.append(callback)
    with trainers.closing(ours):
        cells.assert_same(outcomes[1], outcomes[0])
    values = [
        {(step, name): value for step, name, value in callback.logged if name != "grad_norm"} for callback in seen
    ]
    assert values[0] == values[1] and [step for step, name, _ in seen[1].logged if name == "eval_loss"] == [1, 3]
    assert [value for _, name, value in seen[1].logged if name == "grad_norm"] == outcomes[0].norms, (
        "before clipping, and not rounded"
    )
    norms = [[value for _, name, value in callback.logged if name == "grad_norm"] for callback in seen]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6), "plain Trainer adds them up in fp32"
    assert seen[0].saved == seen[1].saved == [["config.json", "model.safetensors", "trainer_state.json"]]


@pytest.mark.parametrize("plan", ["streamed", pytest.param("resident", marks=pytest.mark.full)])
def test_a_callback_that_reads_the_optimizers_state(plan: str, tmp_path: Path) -> None:
    plain, ours = both(tmp_path, plan)
    seen = []
    for trainer in (plain, ours):
        callback = ReadsState(trainer.model)
        trainer.add_callback(callback)
        trainer.train()
        seen.append(callback)
    assert seen[0].by_position == seen[1].by_position and seen[0].rates == seen[1].rates
    assert seen[0].by_parameter == seen[1].by_parameter and len(seen[1].by_parameter[0]) == len(ours.optimizer.state)
    ours.stop_engine()


@pytest.mark.parametrize("plan", ["streamed", pytest.param("resident", marks=pytest.mark.full)])
def test_early_stopping_stops_at_the_same_step_with_the_best_model(plan: str, tmp_path: Path) -> None:
    """A learning rate that spoils the model: the first evaluation is the best."""
    args = {
        "learning_rate": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": False,
        "max_steps": 8,
    }
    plain, ours = both(tmp_path, plan, **args)
    outcomes = []
    for trainer in (plain, ours):
        trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
        outcomes.append(trainers.train(trainer))
    with trainers.closing(ours):
        cells.assert_same(outcomes[1], outcomes[0])
        assert ours.state.global_step == plain.state.global_step < 8
        assert Path(ours.state.best_model_checkpoint).name == Path(plain.state.best_model_checkpoint).name
        cell = {name: value for name, value in ours.model.state_dict().items()}
        assert all(torch.equal(cell[name], value) for name, value in plain.model.state_dict().items()), (
            "the best weights are in the model"
        )


def test_a_sampler_with_a_generator_of_its_own_is_not_advanced_by_the_peek(tmp_path: Path) -> None:
    """It draws another order for every pass, as TRL's RepeatSampler does; the first pass must be training's."""

    class Shuffles(torch.utils.data.Sampler[int]):
        def __init__(self) -> None:
            self.generator = torch.Generator().manual_seed(7)

        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(8, generator=self.generator).tolist())

    class Sampled:
        def _get_train_sampler(self, *args: Any) -> Any:
            return Shuffles()

    plain = type("Plain", (Sampled, trainers.PlainTrainer), {})(**settings(tmp_path / "plain"))
    ours = type("Ours", (Sampled, trainers.OutsizeTrainer), {})(
        **settings(tmp_path / "ours"), **trainers.planned("resident")
    )
    expected = trainers.train(plain)
    with trainers.closing(ours):
        cells.assert_same(trainers.train(ours), expected)


class Distills:
    """A trainer of one's own with a teacher, which it hands to accelerate as TRL does. It needs no TRL."""

    def __init__(self, *args: Any, teacher: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        me: Any = self
        self.teacher = me.accelerator.prepare_model(teacher, evaluation_mode=True)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        with torch.no_grad():
            wanted = self.teacher(**inputs).logits
        return (outputs.logits.float() - wanted.float()).square().mean()


def distilling(base: tuple[type, ...], folder: Path, *, use_cpu: bool = True, **more: Any) -> Any:
    given = settings(folder, use_cpu=use_cpu)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        teacher = zoo.make(KIND)
        for param in teacher.parameters():
            param.data.mul_(1.5)
    return type("Tested", (base[0], Distills, *base[1:]), {})(**given, teacher=teacher, **more)


@pytest.mark.parametrize(
    "where", ["streamed", pytest.param("resident", marks=pytest.mark.full), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_the_teacher_of_a_trainer_of_ones_own_is_part_of_the_plan(where: str, tmp_path: Path) -> None:
    on_gpu = where == "cuda"
    plan = trainers.planned("streamed" if on_gpu else where, gpu=on_gpu)
    expected = trainers.train(distilling((trainers.WithReference, Trainer), tmp_path / "plain", use_cpu=not on_gpu))
    with trainers.closing(
        distilling((OutsizeMixin, Trainer), tmp_path / "ours", use_cpu=not on_gpu, **plan)
    ) as trainer:
        assert {param.device.type for param in trainer.teacher.parameters()} == {"cpu"}, "it waits for its plan"
        cells.assert_same(trainers.train(trainer), expected)
        (other,) = trainer._running
        assert other.name == type(trainer.teacher).__name__
        assert sum(trainer.engine.device.budgets.values()) >= other.gpu_bytes + trainer.engine.plan.gpu_budget_bytes
        again = trainers.planned("streamed" if on_gpu else where, gpu=on_gpu)
        second = distilling((OutsizeMixin, Trainer), tmp_path / "second", use_cpu=not on_gpu, **again)
        second.teacher = second._others[other.name] = trainer.teacher
        trainer.engine.detach()  # its promise is all of the device
        with trainers.closing(second):
            second.train()
    assert all(param.requires_grad and param.device.type == "cpu" for param in trainer.teacher.parameters())
