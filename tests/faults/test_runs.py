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

SOURCE = Path(__file__).parent.parent.parent / "src"


def train(yaml: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["train", str(yaml), *arguments])


def refused(result: Result, *parts: str) -> None:
    message = result.stderr.strip()
    assert result.exit_code == 2 and not isinstance(result.exception, (ValueError, OSError)), (result.exit_code, message, result.exception)
    assert all(part in message for part in parts), message


def test_five_mistakes_are_all_told_at_once(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, learning_rte=1, micro_batch_size="two", sequence_len=-5, deepspeed="zero3.json", warmup_steps=3, warmup_ratio=0.1)
    refused(train(yaml), "learning_rate", "micro_batch_size", "sequence_len", "deepspeed", "warmup_ratio")
    assert not (tmp_path / "out").exists()


def test_an_output_dir_that_cannot_be_written_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
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


def test_a_tokenizer_without_a_pad_token_is_told_and_trains(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    refused(train(yaml, "--resume", "--set", "learning_rate=3e-3", "--set", "seed=7", "--set", "weight_decay=0"), "learning_rate", "seed", "weight_decay")
    assert train(yaml, "--resume", "--set", "max_steps=3", "--set", "device=sim:2MiB", "--set", "plan.n_persist=1").exit_code == 0
    assert [step for step, _ in checkpoints(tmp_path / "out")] == [2, 3]


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    refused(train(folders.write_run(tmp_path), "--resume"), "complete checkpoint")


def test_a_dry_run_plans_and_leaves_nothing(tmp_path: Path) -> None:
    result = train(folders.write_run(tmp_path, device="sim:1MiB"), "--dry-run")
    assert result.exit_code == 0 and "the plan" in result.output and "tokens/s" in result.output
    assert list((tmp_path / "out").iterdir()) == []


def started(yaml: Path, *arguments: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OUTSIZE_CACHE": "", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command: list[Any] = [sys.executable, "-m", "outsize.cli.main", "train", yaml, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def read_until(process: "subprocess.Popen[str]", text: str) -> None:
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if text in line:
            return
    raise AssertionError("".join(lines))


def test_an_interrupt_saves_and_stops_and_the_run_goes_on_from_there(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, max_steps=100_000)
    process = started(yaml)
    read_until(process, "step 2/")
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=120)[0]
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
    assert process.wait(timeout=60) == 130 and not checkpoints(tmp_path / "out")
