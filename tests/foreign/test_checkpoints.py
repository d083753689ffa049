"""A run continues from plain Trainer's checkpoint to the same bits, and plain Trainer stops at one of ours."""

import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import cells
import pytest
import torch
import trainers
import zoo
from cells import Outcome
from transformers import AutoModelForCausalLM, Trainer

from outsize.base.errors import BadFile
from outsize.checkpoint.folder import newest, read_manifest, rotate
from outsize.model.build import build_model
from outsize.run.export import export_folder

CASES: dict[str, tuple[str, torch.dtype]] = {
    "dropout": ("gpt2", torch.float32),
    "bf16-tied": ("llama", torch.bfloat16),
    "fp32": ("llama-untied", torch.float32),
}
ARGS: dict[str, Any] = {"lr_scheduler_type": "cosine", "warmup_steps": 1}


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    )


def model_of(name: str) -> Any:
    kind, dtype = CASES[name.removeprefix("lora-")]
    model = zoo.make(kind, dtype)
    return lora(model) if name.startswith("lora-") else model


def settings(name: str, folder: Path, **args: Any) -> dict[str, Any]:
    kind = CASES[name.removeprefix("lora-")][0]
    return {
        "model": model_of(name),
        "args": trainers.arguments(folder, **{**ARGS, **args}),
        "train_dataset": trainers.rows(kind),
    }


def ours(name: str, folder: Path, plan: str = "resident", **args: Any) -> trainers.OutsizeTrainer:
    return trainers.OutsizeTrainer(**settings(name, folder, **args), **trainers.planned(plan))


@functools.cache
def started(name: str) -> Path:
    """The folder of a plain run with torch's own AdamW, with a checkpoint of its second step."""
    folder = Path(tempfile.mkdtemp())
    trainer = Trainer(**settings(name, folder, save_strategy="steps", save_steps=2))
    trainer.train()
    shutil.rmtree(folder / "out" / "checkpoint-4")
    return folder / "out"


@functools.cache
def continued(name: str) -> Outcome:
    """By plain Trainer with the reference optimizer, which has no groups of nothing."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = copied(name, Path(folder))
        _spoil(
            checkpoint,
            lambda state: state.update(param_groups=[group for group in state["param_groups"] if group["params"]]),
        )
        if name.startswith("lora-"):  # nothing in it goes without decay
            halve = lambda state: state.update({key: state[key][:1] for key in ("base_lrs", "_last_lr", "lr_lambdas")})
            _spoil(checkpoint, halve, "scheduler.pt")
        return trainers.train(
            trainers.PlainTrainer(**settings(name, Path(folder))), resume_from_checkpoint=str(checkpoint)
        )


def copied(name: str, folder: Path) -> Path:
    """A checkpoint of plain Trainer to be spoilt."""
    return Path(shutil.copytree(started(name), folder / "out")) / "checkpoint-2"


CONTINUED = [
    ("dropout", "streamed"),
    ("bf16-tied", "resident"),
    ("bf16-tied", "mixed"),
    ("fp32", "streamed"),
    ("lora-fp32", "streamed"),
    ("lora-bf16-tied", "resident"),
]


@pytest.mark.parametrize(("name", "plan"), CONTINUED)
def test_a_run_resumes_from_a_checkpoint_of_plain_trainer(name: str, plan: str, tmp_path: Path) -> None:
    """It equals plain Trainer with the reference optimizer, resumed in the same way. One case has dropout."""
    expected = continued(name)
    torch.manual_seed(99)
    with trainers.closing(ours(name, tmp_path, plan)) as trainer:
        found = trainers.train(trainer, resume_from_checkpoint=str(started(name) / "checkpoint-2"))
        assert trainer.state.global_step == 4 and len(found.norms) == 2
    cells.assert_same(found, expected)


def test_resume_from_checkpoint_true_takes_the_newest_of_either_kind(tmp_path: Path) -> None:
    copied("fp32", tmp_path)
    with trainers.closing(ours("fp32", tmp_path, "streamed", save_strategy="steps", save_steps=3)) as trainer:
        trainer.state.save_steps = 3
        cells.assert_same(trainers.train(trainer, resume_from_checkpoint=True), continued("fp32"))
    folders = {path.name for path in (tmp_path / "out").iterdir()}
    assert folders == {"checkpoint-2", "checkpoint-4"} and newest(tmp_path / "out") == tmp_path / "out" / "checkpoint-4"
    rotate(tmp_path / "out", 1)
    assert {path.name for path in (tmp_path / "out").iterdir()} == folders, (
        "what plain Trainer wrote is not ours to remove"
    )
    with trainers.closing(ours("fp32", tmp_path, max_steps=6)) as trainer:
        trainer.train(resume_from_checkpoint=True)
        assert (
            len([entry for entry in trainer.state.log_history if "loss" in entry]) == 6
            and trainer.state.global_step == 6
        )


def test_a_sharded_checkpoint_and_a_model_without_memory(tmp_path: Path) -> None:
    folder = copied("fp32", tmp_path)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="40KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    zoo.make("llama-untied").save_pretrained(tmp_path / "fresh")
    unmaterialized = build_model(str(tmp_path / "fresh"), dtype=torch.float32)
    for given in ({}, {"model": unmaterialized.model, "weights": unmaterialized.weights}):
        trainer = trainers.OutsizeTrainer(
            **{**settings("fp32", tmp_path / "again"), **trainers.planned("streamed"), **given}
        )
        with trainers.closing(trainer):
            cells.assert_same(trainers.train(trainer, resume_from_checkpoint=str(folder)), continued("fp32"))


def test_the_best_model_may_be_in_a_checkpoint_of_plain_trainer(tmp_path: Path) -> None:
    folder = copied("fp32", tmp_path)
    state = json.loads((folder / "trainer_state.json").read_text())
    (folder / "trainer_state.json").write_text(
        json.dumps({**state, "best_metric": 0.0, "best_model_checkpoint": str(folder), "best_global_step": 2})
    )
    best = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    args = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    given = settings("fp32", tmp_path, **args, metric_for_best_model="eval_loss", greater_is_better=False)
    trainer = trainers.OutsizeTrainer(
        **given, **trainers.planned("streamed"), eval_dataset=trainers.rows("llama-untied", 2)
    )
    with trainers.closing(trainer):
        trainer.train(resume_from_checkpoint=str(folder))
        assert trainer.state.best_model_checkpoint == str(folder)
        assert all(torch.equal(value, best[name]) for name, value in trainer.model.state_dict().items())


def _spoil(folder: Path, change: Any, name: str = "optimizer.pt") -> None:
    state = torch.load(folder / name, weights_only=True)
    torch.save(change(state) or state, folder / name)


SPOILT: dict[str, tuple[Any, str]] = {
    "another-optimizer": (
        lambda s: s["state"].update({0: {"momentum_buffer": torch.zeros(1)}}),
        "holds momentum_buffer for .*, which is not the state of AdamW",
    ),
    "amsgrad": (
        lambda s: s["param_groups"][0].update(amsgrad=True),
        "AdamW with amsgrad=True, which outsize does not have",
    ),
    "other-shape": (
        lambda s: s["state"][0].update(exp_avg=torch.zeros(3)),
        r"holds an exp_avg of shape \(3,\) for .* Continue with the model",
    ),
    "other-groups": (
        lambda s: s["param_groups"][0]["params"].remove(0),
        r"has groups of \[\d+, \d+\] parameters, this model has \[\d+, \d+\]",
    ),
    "no-state": (
        lambda s: {"outsize": "note", "state": {}, "param_groups": []},
        "holds no optimizer state. Name another checkpoint",
    ),
}


@pytest.mark.parametrize("how", SPOILT)
def test_an_optimizer_state_that_is_not_understood_is_refused_by_name(how: str, tmp_path: Path) -> None:
    folder = copied("fp32", tmp_path)
    change, words = SPOILT[how]
    _spoil(folder, change)
    with trainers.closing(ours("fp32", tmp_path)) as trainer, pytest.raises(BadFile, match=words):
        trainer.train(resume_from_checkpoint=str(folder))


def test_a_plain_checkpoint_without_state_or_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = copied("fp32", tmp_path)
    with trainers.closing(ours("dropout", tmp_path)) as trainer, pytest.raises(BadFile, match=r" lacks |has the shape"):
        trainer.train(resume_from_checkpoint=str(folder))
    (folder / "optimizer.pt").write_bytes(b"no pickle")
    with (
        trainers.closing(ours("fp32", tmp_path)) as trainer,
        pytest.raises(BadFile, match=r"optimizer.pt cannot be read: .*. Name another checkpoint"),
    ):
        trainer.train(resume_from_checkpoint=str(folder))
    (folder / "optimizer.pt").unlink()
    with pytest.raises(
        BadFile,
        match=r"optimizer.pt is missing, so training cannot continue from it.* leave resume_from_checkpoint out",
    ):
        ours("fp32", tmp_path).train(resume_from_checkpoint=str(folder))


# The other way.


@pytest.mark.parametrize("plain", [Trainer, trainers.PlainTrainer])
def test_plain_trainer_stops_at_a_checkpoint_of_outsize(plain: Any, tmp_path: Path) -> None:
    """It went on with an empty optimizer before, and said nothing."""
    with trainers.closing(ours("fp32", tmp_path, "streamed", save_strategy="steps", save_steps=2)) as trainer:
        trainer.train()
    for resume in (True, str(tmp_path / "out" / "checkpoint-2")):
        with pytest.raises(ValueError, match="different number of parameter groups"):
            plain(**settings("fp32", tmp_path, max_steps=6)).train(resume_from_checkpoint=resume)


def test_the_folder_says_what_it_is_and_nothing_of_ours_is_confused_by_that(tmp_path: Path) -> None:
    with trainers.closing(ours("fp32", tmp_path, "streamed", save_strategy="steps", save_steps=2)) as trainer:
        expected = trainers.train(trainer)
    folder = tmp_path / "out" / "checkpoint-2"
    note = (folder / "outsize-checkpoint.md").read_text()
    assert all(
        words in note
        for words in (
            "Step 2.",
            "OutsizeTrainer(...).train(resume_from_checkpoint=",
            "from_pretrained(",
            "`Trainer` cannot continue",
        )
    )
    held = torch.load(folder / "optimizer.pt", weights_only=True)
    assert held["outsize"] == note and not held["state"] and not held["param_groups"]
    assert torch.load(folder / "scheduler.pt", weights_only=True)["last_epoch"] == 2
    assert {"optimizer.pt", "scheduler.pt", "outsize-checkpoint.md"} <= read_manifest(folder)["files"].keys()
    assert newest(tmp_path / "out") == tmp_path / "out" / "checkpoint-4"
    with trainers.closing(ours("fp32", tmp_path)) as trainer:
        found = trainers.train(trainer, resume_from_checkpoint=str(folder))
        cells.assert_same(Outcome(found.losses, expected.norms[:2] + found.norms, found.weights, found.state), expected)
    export_folder(folder, tmp_path / "exported")
    assert {path.name for path in (tmp_path / "exported").iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    AutoModelForCausalLM.from_pretrained(folder)


def test_a_checkpoint_without_optimizer_state_has_the_note_alone(tmp_path: Path) -> None:
    with trainers.closing(ours("fp32", tmp_path, save_strategy="steps", save_steps=4, save_only_model=True)) as trainer:
        trainer.train()
    names = {path.name for path in (tmp_path / "out" / "checkpoint-4").iterdir()}
    assert "outsize-checkpoint.md" in names and "optimizer.pt" not in names
