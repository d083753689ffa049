"""Runs that go wrong: each gives one clear message, and nothing is lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import folders
import pytest
from typer.testing import CliRunner, Result

from outsize.checkpoint.folder import checkpoints
from outsize.cli.main import app
from outsize.run.export import export_folder

SOURCE = Path(__file__).parent.parent.parent / "src"


def train(yaml: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", str(yaml), *arguments])


def refused(result: Result, *parts: str) -> None:
    message = result.stderr.strip()
    assert result.exit_code == 2 and not isinstance(result.exception, (ValueError, OSError)), (
        result.exit_code,
        message,
        result.exception,
    )
    assert all(part in message for part in parts), message


def test_five_mistakes_are_all_reported_at_once(tmp_path: Path) -> None:
    yaml = folders.write_run(
        tmp_path,
        learning_rte=1,
        micro_batch_size="two",
        sequence_len=-5,
        deepspeed="zero3.json",
        warmup_steps=3,
        warmup_ratio=0.1,
    )
    refused(train(yaml), "learning_rate", "micro_batch_size", "sequence_len", "deepspeed", "warmup_ratio")
    assert not (tmp_path / "out").exists()


def test_an_output_dir_that_cannot_be_written_is_reported_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(train(folders.write_run(tmp_path, output_dir=str(tmp_path / "file" / "out"))), "output_dir", "file/out")


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "data.jsonl"), ('{"text": "a cat"}\n{"text": "a do', "data.jsonl:2"), ('{"other": "x"}\n', "other")],
    ids=["empty", "ends in the middle of a line", "without the column"],
)
def test_data_that_cannot_be_used_is_named(tmp_path: Path, text: str, told: str) -> None:
    yaml = folders.write_run(tmp_path)
    (tmp_path / "data.jsonl").write_text(text)
    refused(train(yaml), told)


def test_a_sample_longer_than_a_row_is_split_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    yaml = folders.write_run(tmp_path, max_steps=1)
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write(json.dumps({"text": "the cat " * 40}) + "\n")
    assert train(yaml).exit_code == 0
    warned = [record.getMessage() for record in caplog.records if "longer than sequence_len" in record.getMessage()]
    assert len(warned) == 1 and "data.jsonl:41" in warned[0]


def test_a_tokenizer_without_a_pad_token_is_reported_and_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    yaml = folders.write_run(tmp_path, max_steps=1)
    folders.write_tokenizer(tmp_path / "model", pad=False)
    with caplog.at_level("INFO", logger="outsize"):
        assert train(yaml).exit_code == 0
    assert sum("pad" in record.getMessage() for record in caplog.records if record.name == "outsize") == 1


@pytest.mark.parametrize("damage", ["truncated", "header"])
def test_a_corrupted_shard_is_named_before_training(tmp_path: Path, damage: str) -> None:
    yaml = folders.write_run(tmp_path)
    folders.write_model(tmp_path / "model", max_shard_size="20KB")
    (tmp_path / "model" / "model.safetensors").unlink()
    shard = sorted((tmp_path / "model").glob("model-*.safetensors"))[1]
    data = shard.read_bytes()
    shard.write_bytes(data[:-7] if damage == "truncated" else data[:12] + b"\xff" * 8 + data[20:])
    refused(train(yaml), shard.name)


def test_a_checkpoint_of_another_model_is_refused_and_kept(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, save_steps=2)
    assert train(yaml, "--set", "max_steps=2").exit_code == 0
    shutil.rmtree(tmp_path / "model")
    folders.write_model(tmp_path / "model", "gpt2")
    folders.write_tokenizer(tmp_path / "model")
    refused(train(yaml, "--resume"), "checkpoint-2")
    assert [step for step, _ in checkpoints(tmp_path / "out")] == [2]


def test_another_recipe_is_refused_by_the_names_of_what_changed_and_another_budget_is_not(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, save_steps=2, max_steps=2)
    assert train(yaml).exit_code == 0
    asked = ("learning_rate=3e-3", "seed=7", "adapter=lora", "lora_r=4", "lora_target_linear=true")
    result = train(yaml, "--resume", *(word for change in asked for word in ("--set", change)))
    refused(result, "seed was 42 and is 7", "adapter was null and is lora", "lora_r was 8 and is 4", "base_model: ")
    edited = tmp_path / "edited.yaml"
    edited.write_text(
        yaml.read_text()
        .replace("learning_rate: 0.01", "learning_rate: 0.003")
        .replace("weight_decay: 0.1", "weight_decay: 0")
    )
    refused(
        train(edited, "--resume"),
        "learning_rate was 0.01 and is 0.003",
        "--set learning_rate=0.003",
        "--set weight_decay=0",
    )
    assert (
        train(
            yaml, "--resume", "--set", "max_steps=3", "--set", "device=sim:2MiB", "--set", "plan.n_persist=1"
        ).exit_code
        == 0
    )
    assert [step for step, _ in checkpoints(tmp_path / "out")] == [2, 3]


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    refused(train(folders.write_run(tmp_path), "--resume"), "complete checkpoint")


def test_a_finished_run_that_is_resumed_trains_nothing_more_and_exports(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, save_steps=2)
    assert train(yaml).exit_code == 0
    exported = tmp_path / "out" / "model.safetensors"
    before = exported.read_bytes()
    exported.unlink()  # killed between the last checkpoint and the end
    for asked in ([], ["--set", "max_steps=3"], ["--set", "max_steps=null", "--set", "num_epochs=0.4"]):
        result = train(yaml, "--resume", *asked)
        assert result.exit_code == 0 and "Nothing was trained" in result.output
        assert exported.read_bytes() == before and [step for step, _ in checkpoints(tmp_path / "out")] == [2, 4]


@pytest.mark.full
def test_a_finished_lora_run_that_is_resumed_exports_its_adapter(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, adapter="lora", lora_target_linear=True, max_steps=2)
    assert train(yaml).exit_code == 0
    exported = tmp_path / "out" / "adapter_model.safetensors"
    before = exported.read_bytes()
    exported.unlink()
    assert train(yaml, "--resume").exit_code == 0 and exported.read_bytes() == before


def test_a_new_run_beside_old_checkpoints_warns_and_with_a_limit_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    yaml = folders.write_run(tmp_path, save_steps=2)
    assert train(yaml).exit_code == 0
    refused(
        train(yaml, "--set", "save_total_limit=1", "--set", "max_steps=2"),
        "save_total_limit",
        "checkpoint-4",
        "--resume",
    )
    assert [step for step, _ in checkpoints(tmp_path / "out")] == [2, 4]
    assert train(yaml, "--set", "max_steps=2").exit_code == 0
    assert sum("earlier run" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"report_to": "nothing"}, "report_to"),
        ({"lr_scheduler": "cosine_with_min_lr"}, "lr_scheduler_kwargs"),
        ({"lr_scheduler_kwargs": {"fast": 1}}, "lr_scheduler_kwargs"),
        ({"attn_implementation": "nothing"}, "attn_implementation"),
        ({"base_model": "no/such/folder"}, "no/such/folder: there is no such folder"),
        ({"chat_template_jinja": "no/such.jinja"}, "chat_template_jinja"),
        ({"resume_from_checkpoint": "no/such/folder"}, "resume_from_checkpoint"),
        ({"adapter": "lora", "lora_target_linear": True, "lora_modules_to_save": ["nothing"]}, "lora_modules_to_save"),
        (
            {
                "val_set_size": 4,
                "load_best_model_at_end": True,
                "save_strategy": "epoch",
                "metric_for_best_model": "accuracy",
            },
            "metric_for_best_model",
        ),
    ],
)
def test_what_cannot_be_used_is_reported_by_its_key(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    refused(train(folders.write_run(tmp_path, **keys)), told)


def test_a_tracker_that_is_not_installed_is_reported_with_the_keys_that_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    refused(
        train(folders.write_run(tmp_path, wandb_project="p")),
        "pip install wandb",
        "report_to, use_wandb, wandb_project",
    )


def test_packing_for_an_encoder_is_refused(tmp_path: Path) -> None:
    refused(
        train(folders.write_run(tmp_path, kind="t5", sample_packing=True)),
        "sample_packing",
        "T5ForConditionalGeneration",
    )


@pytest.mark.full
def test_the_adapter_of_an_encoder_and_decoder_can_be_merged(tmp_path: Path) -> None:
    assert (
        train(folders.write_run(tmp_path, kind="t5", adapter="lora", lora_target_linear=True, max_steps=1)).exit_code
        == 0
    )
    export_folder(tmp_path / "out", tmp_path / "merged", merge=True)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["architectures"] == [
        "T5ForConditionalGeneration"
    ]


def test_a_classifier_is_refused_by_its_name(tmp_path: Path) -> None:
    refused(train(folders.write_run(tmp_path, kind="bert")), "BertForSequenceClassification", "language model head")


def test_rows_beyond_the_models_positions_are_refused_with_the_remedy(tmp_path: Path) -> None:
    refused(train(folders.write_run(tmp_path, kind="gpt2", sequence_len=129)), "sequence_len", "128 positions. Lower")
    shutil.rmtree(tmp_path / "model")
    folders.write_model(tmp_path / "model")
    folders.write_tokenizer(tmp_path / "model")
    yaml = folders.write_run(tmp_path, sequence_len=129)
    refused(train(yaml, "--dry-run"), "sequence_len", "128 positions. Set rope_parameters")


def test_a_token_that_the_model_does_not_know_is_named(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path)
    tokenizer = folders.write_tokenizer(tmp_path / "model")
    tokenizer.add_tokens(["cat"])
    tokenizer.save_pretrained(tmp_path / "model")
    refused(train(yaml), "97 (cat)", "resize_token_embeddings")


def test_nothing_but_what_we_say_is_printed(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, max_steps=1, adapter="lora", lora_target_linear=True)
    commands = [["train", str(yaml)], ["export", str(tmp_path / "out"), str(tmp_path / "merged"), "--merge"]]
    script = f"from outsize.cli.main import app\nfor command in {commands!r}:\n    app(command, standalone_mode=False)"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert (tmp_path / "merged" / "model.safetensors").exists()


def test_a_dry_run_plans_and_leaves_nothing(tmp_path: Path) -> None:
    result = train(folders.write_run(tmp_path, device="sim:1MiB", gradient_checkpointing=True), "--dry-run")
    assert (
        result.exit_code == 0
        and "the plan" in result.output
        and "tokens/s" in result.output
        and "Without effect here: gradient_checkpointing" in result.output
    )
    assert list((tmp_path / "out").iterdir()) == []


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def started(yaml: Path, *arguments: str) -> "subprocess.Popen[str]":
    command: list[Any] = [sys.executable, "-m", "outsize.cli.main", "train", yaml, *arguments]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_until(process: "subprocess.Popen[str]", text: str) -> None:
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if text in line:
            return
    raise AssertionError("".join(lines))


def test_an_interrupt_saves_and_stops_and_the_run_resumes_from_there(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, max_steps=100_000)
    process = started(yaml)
    read_until(process, "step 2/")
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=600)[0]
    assert process.returncode == 130 and "--resume" in said and "Finishing this step" in said
    ((step, _),) = checkpoints(tmp_path / "out")
    assert step >= 2 and not (tmp_path / "out" / "model.safetensors").exists()
    assert train(yaml, "--resume", "--set", f"max_steps={step + 1}").exit_code == 0


def test_a_second_interrupt_leaves_at_once(tmp_path: Path) -> None:
    process = started(folders.write_run(tmp_path, max_steps=100_000, gradient_accumulation_steps=100_000))
    read_until(process, "the plan")
    read_until(process, "╰")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        read_until(process, "Finishing") if _ == 0 else None
    assert process.wait(timeout=600) == 130 and not checkpoints(tmp_path / "out")


def test_a_gradient_that_is_not_finite_stops_the_run_with_its_block_or_is_left_out(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, learning_rate=1e30, lr_scheduler="constant", max_steps=3)
    refused(train(yaml), "gradient", "nonfinite: skip")
    assert train(yaml, "--set", "nonfinite=skip").exit_code == 0
