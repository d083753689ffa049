"""OutsizeTrainer does what transformers' Trainer does, wherever a training script touches it. That its bits are the
same: tests/parity/test_trainer.py.
"""

import inspect
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cells
import numpy as np
import pytest
import torch
import trainers
import zoo
from accelerate import init_empty_weights
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import (
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    EarlyStoppingCallback,
    Trainer,
    TrainerCallback,
)

from outsize.base.errors import BadFile, ConfigError, EngineMisuse
from outsize.device.choose import choose_device
from outsize.integrations.hf import OutsizeMixin, OutsizeTrainer
from outsize.integrations.longest_row import longest_row

KIND = "one-block"


@pytest.fixture
def ours(tmp_path: Path) -> Iterator[Callable[..., OutsizeTrainer]]:
    """A Trainer of ours on the CPU, over a model of one layer. Its engine ends with the test."""
    made: list[OutsizeTrainer] = []

    def make(*, args: dict[str, Any] | None = None, **given: Any) -> OutsizeTrainer:
        made.append(trainers.ours(tmp_path, kind=given.pop("kind", KIND), args=args, **given))
        return made[-1]

    yield make
    for trainer in made:
        trainer.stop_engine()


@pytest.fixture
def plain(tmp_path: Path) -> Callable[..., Trainer]:
    def make(*, args: dict[str, Any] | None = None, kind: str = KIND, **given: Any) -> Trainer:
        if "model_init" not in given:
            given.setdefault("model", zoo.make(kind))
        given.setdefault("train_dataset", trainers.rows(kind))
        return trainers.PlainTrainer(args=trainers.arguments(tmp_path / "plain", **args or {}), **given)

    return make


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def on_meta() -> Any:
    with init_empty_weights(include_buffers=False):
        model: Any = zoo.KINDS[KIND].build(torch.float32, True, num_blocks=1).train()
    model.tie_weights()
    assert all(param.is_meta for param in model.parameters())
    return model


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def checkpoints(trainer: Any) -> list[str]:
    return sorted(path.name for path in Path(trainer.args.output_dir).glob("checkpoint-*"))


class Recording(OutsizeTrainer):
    """Remembers the rows it trained on."""

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        self.__dict__.setdefault("trained_on", []).extend(inputs["input_ids"].tolist())
        return super().training_step(model, inputs, num_items_in_batch)


# --- transformers as we know it

SIGNATURES = """
    __init__(self, model=None, args=None, data_collator=None, train_dataset=None, eval_dataset=None, processing_class=None, model_init=None,
        compute_loss_func=None, compute_metrics=None, callbacks=None, optimizers=(None, None), optimizer_cls_and_kwargs=None,
        preprocess_logits_for_metrics=None)
    _move_model_to_device(self, model, device)
    train(self, resume_from_checkpoint=None, trial=None, ignore_keys_for_eval=None)
    get_train_dataloader(self)
    _get_dataloader(self, dataset, description, batch_size, sampler_fn=None, is_training=False, dataloader_key=None)
    _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint)
    _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial)
    create_optimizer(self, model=None)
    training_step(self, model, inputs, num_items_in_batch=None)
    compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None)
    _clip_grad_norm(self, model)
    _get_grad_norm(self, model, grad_norm=None)
    evaluation_loop(self, dataloader, description, prediction_loss_only=None, ignore_keys=None, metric_key_prefix='eval')
    _finalize_training(self, trial, num_train_samples, start_time)
    _save_checkpoint(self, model, trial)
    _save(self, output_dir=None, state_dict=None)
    _load_from_checkpoint(self, resume_from_checkpoint, model=None)
    _load_optimizer_and_scheduler(self, checkpoint)
    _load_rng_state(self, checkpoint)
    _load_best_model(self)
    get_decay_parameter_names(self, model)
    _get_num_items_in_batch(self, batch_samples, device)
    _prepare_inputs(self, inputs)
    _get_output_dir(self, trial)
    _push_from_checkpoint(self, checkpoint_folder)
    store_flos(self)
"""
"""Of Trainer, in 5.17 and in 5.22: what we override or call."""
TABLE = {
    line.partition("(")[0].strip(): " ".join(line.split())
    for line in SIGNATURES.replace(",\n        ", ", ").strip().splitlines()
}


@pytest.mark.parametrize("name", TABLE)
def test_the_installed_trainer_has_the_method_that_we_rely_on(name: str) -> None:
    signature = inspect.signature(getattr(Trainer, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert f"{name}{signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)}" == TABLE[name]


def test_every_override_is_in_the_table_and_can_be_called_as_the_original() -> None:
    overrides = {
        name for name, value in vars(OutsizeMixin).items() if inspect.isfunction(value) and name in dir(Trainer)
    }
    assert overrides <= TABLE.keys()
    for name in overrides - {"__init__"}:
        parameters = inspect.signature(getattr(Trainer, name)).parameters
        inspect.signature(getattr(OutsizeMixin, name)).bind(*parameters)
        inspect.signature(getattr(OutsizeMixin, name)).bind(**dict.fromkeys(parameters))


# --- preparing


def test_a_model_on_meta_is_never_moved_and_trains_as_one_that_was_loaded(ours: Any, tmp_path: Path) -> None:
    zoo.make(KIND).save_pretrained(tmp_path / "model")
    trainer = ours(model=on_meta(), weights=tmp_path / "model")
    trainer.train()
    expected = ours(model=AutoModelForCausalLM.from_pretrained(tmp_path / "model").train())
    expected.train()
    assert trainers.logged(trainer) == trainers.logged(expected)
    assert_equal(weights_of(trainer), weights_of(expected))


def test_accelerate_places_neither_model_nor_optimizer(ours: Any) -> None:
    trainer = ours()
    trainer.train()
    assert trainer.optimizer.optimizer is trainer.engine.optimizer and not trainer.optimizer.device_placement
    assert trainer.accelerator.device_placement, "batches are still placed"


def test_accelerates_autocast_keeps_no_casts_of_weights(ours: Any) -> None:
    """Its cache would hold a bf16 copy of every layer until the forward ends, streamed or not."""
    trainer = ours(args={"bf16": True})
    seen = set()
    trainer.model.model.layers[0].register_forward_pre_hook(
        lambda *_: seen.add((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
    )
    trainer.train()
    assert seen == {(True, False)} and torch.is_autocast_cache_enabled()


def test_the_plan_is_made_for_the_longest_rows_and_printed(ours: Any, capsys: pytest.CaptureFixture[str]) -> None:
    short = trainers.rows(KIND, 2, tokens=6)
    wanted = {"input_ids": (2, 16), "labels": (2, 16), "num_items_in_batch": ()}
    trainer = ours(
        train_dataset=short + trainers.rows(KIND, 6), sequence_len=16, args={"train_sampling_strategy": "sequential"}
    )
    assert trainer.preview().plan.inputs == wanted
    trainer.train()
    assert trainer.engine.plan.inputs == wanted
    assert "batch input_ids 2×16" in capsys.readouterr().out
    assert ours(train_dataset=short[:1], sequence_len=4).preview().plan.inputs["input_ids"] == (2, 6), (
        "what is seen to be longer counts"
    )


def test_the_length_in_the_arguments_is_a_habit_that_the_model_may_cut_short(ours: Any) -> None:
    """GPT-2 here has 128 positions, and an embedding that knows no more."""
    trainer = ours(kind="gpt2")
    trainer.args.max_length = 1024
    assert trainer.preview().plan.inputs["input_ids"] == (2, 128)


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    return {name: torch.tensor([row[name] + [1] * (longest - len(row[name])) for row in rows]) for name in rows[0]}


def test_a_dataset_whose_rows_are_shorter_than_the_length_in_the_arguments_is_planned_for(ours: Any) -> None:
    """TRL's `max_length` is 1024 unless it is set."""
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in (6, 9, 13, 7)]
    data = datasets.Dataset.from_list(rows)
    trainer = ours(train_dataset=data, data_collator=padded)
    trainer.args.max_length = 100
    assert trainer.preview().plan.inputs["input_ids"] == (2, 13)
    trainer.args.pad_to_multiple_of = 8
    assert trainer._largest_shape == (2, 16)
    trainer.args.max_length = 10
    assert trainer._largest_shape == (2, 10)
    trainer.train_dataset = rows  # without a table that has lengths
    assert trainer._largest_shape == (2, 10)


def test_the_longest_row_is_read_from_the_column_of_tokens() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list([{"input_ids": [1] * n} for n in (2, 5, 3)])
    assert longest_row(data) == longest_row(data.with_format("torch")) == longest_row(data.select([2, 0])) == 5
    assert longest_row(data.select([0])) == 2
    assert longest_row(data.with_transform(lambda batch: batch)) is None  # its rows are other ones
    assert longest_row(data.rename_column("input_ids", "chosen_ids")) is None
    assert longest_row(datasets.Dataset.from_list([{"input_ids": "text"}])) is None
    assert longest_row([{"input_ids": [1]}]) is longest_row(data.to_iterable_dataset()) is None


def test_rows_that_are_laid_end_to_end_are_planned_for_as_one(ours: Any) -> None:
    items = [{"input_ids": row["input_ids"].tolist()} for row in trainers.rows(KIND, 4, tokens=6)]
    trainer = ours(train_dataset=items, data_collator=DataCollatorWithFlattening(), sequence_len=10)
    assert trainer.preview().plan.inputs["input_ids"] == (1, 20)
    trainer.train()


def test_a_batch_of_the_users_is_planned_for_instead(ours: Any) -> None:
    assert ours(plan_batch=zoo.batch(KIND, size=3, tokens=9)).preview().plan.inputs["input_ids"] == (3, 9)


def mean_of_squares(outputs: Any, labels: Any, num_items_in_batch: Any) -> Tensor:
    return outputs.logits.float().square().sum() / num_items_in_batch


@pytest.mark.parametrize(
    "how",
    [{}, {"compute_loss_func": mean_of_squares}, {"args": {"label_smoothing_factor": 0.1}}, {"args": {"bf16": True}}],
)
def test_a_larger_batch_than_planned_is_planned_for_when_it_comes(how: dict[str, Any], ours: Any, plain: Any) -> None:
    data = trainers.rows(KIND, 2, tokens=6) + trainers.rows(KIND, 2, tokens=16) + trainers.rows(KIND, 4, tokens=9)
    settings = {**how, "train_dataset": data, "args": {"train_sampling_strategy": "sequential", **how.get("args", {})}}
    trainer, expected = ours(**settings), plain(**settings)
    assert trainer.preview().plan.inputs["input_ids"] == (2, 6)
    cells.assert_same(trainers.train(trainer), trainers.train(expected))
    assert trainer.engine.plan.inputs["input_ids"] == (2, 16)


def test_a_plan_that_is_made_again_is_measured_at_the_size_it_is_for(ours: Any) -> None:
    """The last batch is one long row; a later one may have two. What the loss takes outside of the model is
    part of it.
    """
    given = {
        "compute_loss_func": mean_of_squares,
        "device": trainers.machine(),
        "args": {"train_sampling_strategy": "sequential", "max_steps": 2},
    }
    trainer = ours(train_dataset=trainers.rows(KIND, 2) + trainers.rows(KIND, 1, tokens=40), sequence_len=16, **given)
    trainer.train()
    made = trainer.engine.plan
    trainer.stop_engine()
    expected = ours(train_dataset=trainers.rows(KIND, 2, tokens=40), **given).preview().plan
    assert (
        made.inputs["input_ids"] == expected.inputs["input_ids"] == (2, 40)
        and made.estimate.gpu_bytes == expected.estimate.gpu_bytes
    )


def test_the_device_is_where_the_trainer_puts_its_batches(ours: Any) -> None:
    trainer = ours(device=choose_device("cpu"))
    trainer.args._setup_devices = torch.device("meta")  # type: ignore[misc]  # as it would be a GPU elsewhere
    with pytest.raises(ConfigError, match="use_cpu=True"):
        trainer.train()


def test_without_data_there_is_nothing_to_plan_for(ours: Any) -> None:
    with pytest.raises(ConfigError, match="has no batch"):
        ours(train_dataset=trainers.rows(KIND, 1), args={"dataloader_drop_last": True}).start_engine()
    with pytest.raises(EngineMisuse, match="start_engine"):
        _ = ours().engine


# --- looking at the first batch


class Stream(IterableDataset):
    def __init__(self, rows: list[dict[str, Tensor]], *, once: bool):
        self._rows = iter(rows) if once else rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from self._rows


def data_of(kind: str) -> Any:
    rows = trainers.rows(KIND, 8)
    if kind == "datasets":
        lists = [{name: value.tolist() for name, value in row.items()} for row in rows]
        return pytest.importorskip("datasets").Dataset.from_list(lists).to_iterable_dataset().shuffle(seed=1)
    return rows if kind == "by number" else Stream(rows, once=kind == "one pass")


KINDS_OF_DATA = ["by number", "stream", "one pass", "datasets"]


@pytest.mark.parametrize("kind", KINDS_OF_DATA)
def test_looking_leaves_all_random_generators_as_they_were(kind: str, ours: Any) -> None:
    trainer = ours(train_dataset=data_of(kind))
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    trainer.start_engine()
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected


@pytest.mark.parametrize(
    ("kind", "before"),
    [*((kind, "nothing") for kind in KINDS_OF_DATA), ("one pass", "preview"), ("one pass", "evaluate")],
)
def test_every_row_is_trained_on_once_and_in_the_plain_order(
    kind: str, before: str, ours: Any, plain: Any, tmp_path: Path
) -> None:
    expected = plain(train_dataset=data_of(kind))
    expected.train()
    given = {"train_dataset": data_of(kind), "eval_dataset": trainers.rows(KIND, 3), **trainers.planned("resident")}
    with trainers.closing(Recording(model=zoo.make(KIND), args=trainers.arguments(tmp_path), **given)) as trainer:
        getattr(trainer, before, lambda: None)()
        trainer.train()
        rows = [row["input_ids"].tolist() for row in trainers.rows(KIND, 8)]
        assert sorted(trainer.trained_on) == sorted(rows)
        assert [e["loss"] for e in trainers.logged(trainer) if "loss" in e] == [
            e["loss"] for e in trainers.logged(expected) if "loss" in e
        ]


def test_a_stream_to_evaluate_on_loses_nothing_either(ours: Any) -> None:
    trainer = ours(train_dataset=None, compute_metrics=lambda prediction: {"rows": len(prediction.label_ids)})
    assert trainer.evaluate(data_of("one pass"))["eval_rows"] == 8


class Sized(Stream):
    def __len__(self) -> int:
        return 8


def test_a_stream_with_a_length_says_how_many_steps_an_epoch_has(ours: Any) -> None:
    trainer = ours(
        train_dataset=Sized(trainers.rows(KIND, 8), once=False), args={"max_steps": -1, "num_train_epochs": 2}
    )
    assert trainer.train().global_step == 8


def test_batches_at_the_end_of_a_stream_that_fill_no_step_stop_no_save(
    ours: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Three batches in steps of two: Trainer leaves the third one's gradients lying, and saves."""
    data = Stream(trainers.rows(KIND, 6), once=False)
    trainer = ours(
        train_dataset=data, args={"gradient_accumulation_steps": 2, "save_strategy": "epoch", "max_steps": 2}
    )
    trainer.train()
    assert checkpoints(trainer) == ["checkpoint-1", "checkpoint-2"] and caplog.text.count("do not fill a step") == 1


# --- what is logged is what a plain Trainer logs

ALIKE: dict[str, dict[str, Any]] = {
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "sequential": {"train_sampling_strategy": "sequential", "logging_steps": 2, "logging_first_step": True},
    "batch_rebalance": {"train_sampling_strategy": "batch_rebalance", "gradient_accumulation_steps": 2, "max_steps": 2},
    "drop_last": {"dataloader_drop_last": True, "max_steps": -1, "num_train_epochs": 1},
    "keep_last": {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 4},
    "data_seed": {"data_seed": 7, "seed": 8},
    "tokens": {"include_num_input_tokens_seen": "all"},
    "tokens_without_padding": {"include_num_input_tokens_seen": "non_padding"},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 1},
    "warmup_stable_decay": {
        "lr_scheduler_type": "warmup_stable_decay",
        "lr_scheduler_kwargs": {"num_decay_steps": 2},
        "warmup_steps": 1,
    },
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0},
        "metric_for_best_model": "rows",
        "eval_strategy": "steps",
    },
    "epochs": {"max_steps": -1, "num_train_epochs": 2, "eval_strategy": "epoch", "logging_strategy": "epoch"},
    "workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "averaged": {"average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
}


RARELY_DIFFERENT = {"sequential", "keep_last", "data_seed", "tokens", "cosine", "warmup_stable_decay", "averaged"}
"""In `make test-all`: each has its like among the others, or in tests/parity/test_trainer.py."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in RARELY_DIFFERENT else []) for name in ALIKE]
)
def test_the_log_is_a_plain_trainers(name: str, ours: Any, plain: Any) -> None:
    logs = []
    for make in (ours, plain):
        settings = {"eval_steps": 1, **ALIKE[name]}
        held_out = {"eval_dataset": trainers.rows(KIND, 3), "compute_metrics": lambda p: {"rows": len(p.predictions)}}
        trainer = make(args=settings, train_dataset=trainers.rows(KIND, 11), **held_out)
        trainer.train()
        logs.append(trainers.logged(trainer))
    assert logs[0] == logs[1]


def test_norms_are_a_plain_trainers_to_fp32(ours: Any, plain: Any) -> None:
    for args in ({}, {"max_grad_norm": 0.0}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}):
        norms = []
        for trainer in (ours(args=args), plain(args=args)):
            trainer.train()
            norms.append([entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry])
        assert len(norms[0]) == 4 and norms[0] == pytest.approx(norms[1], rel=2e-7 * 8)


def test_a_second_run_continues_as_a_plain_one_does(ours: Any, plain: Any) -> None:
    outcomes = []
    for trainer in (ours(args={"max_steps": 2}), plain(args={"max_steps": 2})):
        trainer.train()
        outcomes.append(trainers.train(trainer))
    cells.assert_same(*outcomes)


def test_a_second_run_with_other_terms_has_another_plan_and_the_same_optimizer(ours: Any, plain: Any) -> None:
    """Without clipping no gradient is kept; a window of two needs them."""
    outcomes = []
    for trainer in (
        ours(args={"max_steps": 2, "max_grad_norm": 0.0}),
        plain(args={"max_steps": 2, "max_grad_norm": 0.0}),
    ):
        trainer.train()
        trainer.args.gradient_accumulation_steps = 2
        outcomes.append(trainers.train(trainer))
    cells.assert_same(*outcomes)


def test_clipping_that_is_turned_on_later_clips(ours: Any) -> None:
    weights = []
    for norm in (0.0, 1e-3):
        trainer = ours(args={"max_steps": 1, "max_grad_norm": 0.0, "weight_decay": 0.0})
        trainer.train()
        trainer.args.max_grad_norm = norm
        trainer.train()
        weights.append(trainer.engine.optimizer_state("model.norm.weight")["exp_avg"])
    assert not torch.equal(*weights)


def test_a_model_that_is_made_for_each_run_is_prepared_for_each_run(ours: Any, plain: Any) -> None:
    outcomes = []
    for make in (ours, plain):
        trainer = make(model_init=lambda: zoo.make(KIND, seed=1))
        first = trainers.train(trainer)
        engine = getattr(trainer, "_engine", None)
        outcomes += [first, trainers.train(trainer)]
        if engine is not None:
            with pytest.raises(EngineMisuse, match="detached"):
                _ = engine.runtime
    for found in outcomes[1:]:
        cells.assert_same(cells.Outcome(found.losses, found.norms[-4:], found.weights, found.state), outcomes[0])


# --- evaluation


def test_evaluation_and_prediction_are_a_plain_trainers_before_and_after_training(ours: Any, plain: Any) -> None:
    """And evaluating first changes nothing of the training."""
    held_out = trainers.rows(KIND, 5, tokens=24, first=30)
    unlabelled = [{"input_ids": row["input_ids"]} for row in held_out]
    found = []
    for make in (ours, plain):
        trainer = make(eval_dataset=held_out, compute_metrics=lambda p: {"mean": float(p.predictions.mean())})
        for _ in range(2):
            prediction = trainer.predict(held_out)
            found += [
                trainer.evaluate()["eval_loss"],
                trainer.evaluate({"a": held_out[:2]})["eval_a_loss"],
                prediction.metrics["test_mean"],
            ]
            found += [prediction.predictions.tolist(), trainer.predict(unlabelled).predictions.tolist()]
            trainer.train()
        found.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_a_model_is_evaluated_without_training_data(ours: Any, plain: Any) -> None:
    held_out = trainers.rows(KIND, 3)
    found = [make(train_dataset=None).evaluate(held_out)["eval_loss"] for make in (ours, plain)]
    assert found[0] == found[1]


def test_an_evaluation_before_training_plans_for_the_training_data(ours: Any) -> None:
    trainer = ours(eval_dataset=trainers.rows(KIND, 8, tokens=40), args={"per_device_eval_batch_size": 8})
    trainer.evaluate()
    assert trainer.engine.plan.inputs["input_ids"] == (2, 16)


# --- saving and loading


class Watching(TrainerCallback):
    """Expects the folder to exist in `on_save`."""

    def __init__(self) -> None:
        self.found: list[set[str]] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append({path.name for path in (Path(args.output_dir) / f"checkpoint-{state.global_step}").iterdir()})


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
BEST: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "score", "greater_is_better": False}


def test_a_callback_finds_the_checkpoint_it_gets(ours: Any) -> None:
    watching = Watching()
    trainer = ours(args=SAVING, callbacks=[watching])
    trainer.train()
    assert not trainer._may_save_in_background and len(watching.found) == 4
    assert all(
        {"model.safetensors", "config.json", "state.safetensors", "outsize.json", "trainer_state.json"} <= names
        for names in watching.found
    )


def test_no_state_of_a_checkpoint_is_in_a_pickle(ours: Any) -> None:
    """The two that there are stop plain Trainer, and hold no tensors."""
    trainer = ours(args=SAVING)
    assert trainer._may_save_in_background
    trainer.save_model()
    trainer.train()
    trainer.save_model()
    files = [path for path in Path(trainer.args.output_dir).rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".safetensors", ".json", ".md", ".pt"} and checkpoints(trainer) == [
        f"checkpoint-{i}" for i in (1, 2, 3, 4)
    ]
    assert json.loads((Path(trainer.args.output_dir) / "training_args.json").read_text())["learning_rate"] == 1e-2
    assert {path.name for path in files if path.suffix == ".pt"} == {"optimizer.pt", "scheduler.pt"}
    assert not any(path.parent == Path(trainer.args.output_dir) for path in files if path.suffix in (".pt", ".md"))
    assert all(path.stat().st_size < 10_000 for path in files if path.suffix == ".pt")


@pytest.mark.parametrize(("limit", "left"), [(1, ["checkpoint-2"]), (2, ["checkpoint-2", "checkpoint-4"])])
def test_the_oldest_checkpoints_go_and_the_best_stays(limit: int, left: list[str], ours: Any) -> None:
    """The metric falls until step 2 and rises after it."""
    score = iter([3.0, 1.0, 2.0, 4.0])
    trainer = ours(
        eval_dataset=trainers.rows(KIND, 2),
        compute_metrics=lambda _: {"score": next(score)},
        args={**SAVING, "save_total_limit": limit, "eval_strategy": "steps", "eval_steps": 1, **BEST},
    )
    trainer.train()
    assert checkpoints(trainer) == left and trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert_equal(weights_of(trainer), best.state_dict())
    trainer.save_model()
    assert_equal(AutoModelForCausalLM.from_pretrained(trainer.args.output_dir).state_dict(), best.state_dict())


def test_training_stops_early_and_a_resumed_run_remembers_its_patience(ours: Any) -> None:
    def make(scores: list[float]) -> Any:
        score = iter(scores)
        return ours(
            eval_dataset=trainers.rows(KIND, 2),
            compute_metrics=lambda _: {"score": next(score)},
            callbacks=[EarlyStoppingCallback(2)],
            args={
                **SAVING,
                **BEST,
                "eval_strategy": "steps",
                "eval_steps": 1,
                "max_steps": 8,
                "restore_callback_states_from_checkpoint": True,
            },
        )

    assert make([3.0, 1.0, 2.0, 4.0, 0.0]).train().global_step == 4
    resumed = make([5.0, 0.0])
    assert resumed.train(resume_from_checkpoint=str(Path(resumed.args.output_dir) / "checkpoint-3")).global_step == 4


def test_a_run_resumes_from_its_newest_complete_checkpoint(ours: Any) -> None:
    first = ours(args={**SAVING, "lr_scheduler_type": "cosine"})
    whole = trainers.train(first)
    newest = Path(first.args.output_dir) / "checkpoint-4"
    (newest / "model.safetensors").write_bytes(b"cut off")
    second = ours(args={**SAVING, "lr_scheduler_type": "cosine"})
    found = trainers.train(second, resume_from_checkpoint=True)
    assert len(found.norms) == 1, "it began at step 3"
    cells.assert_same(cells.Outcome(found.losses, whole.norms[:3] + found.norms, found.weights, found.state), whole)
    assert trainers.logged(second)[:-1] == trainers.logged(first)[:-1], "rates and epochs, too"


def test_a_checkpoint_that_is_not_there_or_not_ours_is_refused(ours: Any, plain: Any) -> None:
    trainer = ours()
    with pytest.raises(ConfigError, match="no complete checkpoint"):
        trainer.train(resume_from_checkpoint=True)
    other = plain(args=SAVING)
    other.train()
    (Path(other.args.output_dir) / "checkpoint-2" / "trainer_state.json").unlink()
    with pytest.raises(BadFile, match=r"outsize\.json"):
        trainer.train(resume_from_checkpoint=f"{other.args.output_dir}/checkpoint-2")


def test_a_checkpoint_of_the_model_alone_can_be_loaded_and_not_gone_on_from(ours: Any) -> None:
    trainer = ours(args={**SAVING, "save_only_model": True})
    trainer.train()
    folder = Path(trainer.args.output_dir) / "checkpoint-4"
    assert_equal(AutoModelForCausalLM.from_pretrained(folder).state_dict(), weights_of(trainer))
    assert not {"state.safetensors", "rng.json", "scheduler.json"} & {path.name for path in folder.iterdir()}
    with pytest.raises(BadFile, match="saved without"):
        ours().train(resume_from_checkpoint=str(folder))


def test_saving_before_training_writes_the_model_as_it_is(ours: Any, tmp_path: Path) -> None:
    trainer = ours()
    before = weights_of(trainer)
    trainer.save_model(str(tmp_path / "before"))
    trainer.train()
    trainer.save_model(str(tmp_path / "after"))
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "before").state_dict(), before)
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "after").state_dict(), weights_of(trainer))


class Interrupting(TrainerCallback):
    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


def test_a_run_that_was_interrupted_between_two_batches_can_be_saved(ours: Any, tmp_path: Path) -> None:
    trainer = ours(args={"gradient_accumulation_steps": 2}, callbacks=[Interrupting()])
    before = weights_of(trainer)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict(), before)


def test_a_model_whose_weights_are_still_in_files_is_not_saved(ours: Any, tmp_path: Path) -> None:
    zoo.make(KIND).save_pretrained(tmp_path / "model")
    trainer = ours(model=on_meta(), weights=tmp_path / "model")
    for look in (lambda: None, trainer.preview):
        look()
        with pytest.raises(EngineMisuse, match="start_engine"):
            trainer.save_model()


# --- engines come and go


def test_an_engine_that_was_stopped_leaves_a_plain_model_and_is_started_again(ours: Any) -> None:
    trainer = ours()
    trainer.train()
    trained = weights_of(trainer)
    trainer.stop_engine()
    assert_equal(
        dict(trainer.model.named_parameters()), {name: trained[name] for name, _ in trainer.model.named_parameters()}
    )
    loss = trainer.evaluate(trainers.rows(KIND, 2))["eval_loss"]
    trainer.train()
    assert loss > 0 and trainer.engine.num_steps == 4


def test_the_next_trainer_for_a_model_takes_it_over(ours: Any, plain: Any) -> None:
    """As when a cell of a notebook is run again."""
    model, reference = zoo.make(KIND), zoo.make(KIND)
    ours(model=model).train()
    plain(model=reference).train()
    cells.assert_same(trainers.train(ours(model=model)), trainers.train(plain(model=reference)))


class OwnOptimizer(OutsizeTrainer):
    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        return self.optimizer


def test_an_optimizer_that_a_subclass_makes_is_refused(tmp_path: Path) -> None:
    trainer = OwnOptimizer(
        model=zoo.make(KIND),
        args=trainers.arguments(tmp_path),
        train_dataset=trainers.rows(KIND),
        **trainers.planned("resident"),
    )
    with trainers.closing(trainer), pytest.raises(ConfigError, match="get_decay_parameter_names"):
        trainer.train()


class Counter(OutsizeTrainer):
    """Counts in its loss, as TRL's Trainers do."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.calls, self.metrics, self.total = 0, {"train": [], "eval": []}, torch.zeros(())

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        self.calls += 1
        self.metrics["train"].append(num_items_in_batch)
        self.total += 1
        return loss


@pytest.mark.usefixtures("_profiles_anew")
def test_what_a_loss_counts_is_not_counted_in_the_trial_run(tmp_path: Path) -> None:
    trainer = Counter(
        model=zoo.make(KIND),
        args=trainers.arguments(tmp_path),
        train_dataset=trainers.rows(KIND),
        **trainers.planned("resident"),
    )
    metrics = trainer.metrics
    with trainers.closing(trainer):
        trainer.train()
    assert (trainer.calls, float(trainer.total)) == (4, 4.0)
    assert trainer.metrics is metrics and [int(n) for n in metrics["train"]] == [30, 30, 30, 30]
