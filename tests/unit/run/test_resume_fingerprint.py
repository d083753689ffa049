"""Resuming a run: strict where its bits depend on it, free where they do not, and by request for what changes the steps
to come.
"""

import io
import json
import logging
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import killed
import pytest
import torch
import yaml as yaml_format
from rich.console import Console

from outsize.base.errors import ConfigError
from outsize.checkpoint.folder import checkpoints
from outsize.config.read import read_config
from outsize.run.assemble import assemble, find_checkpoint
from outsize.run.resume_fingerprint import threads_in
from outsize.run.train import train_run

NUM_ROWS = 10
SMALL: dict[str, Any] = dict(kind="one-block", sequence_len=64, max_steps=7, save_steps=4)
"""Three steps of 4, 4 and 2 rows in an epoch: the checkpoint of step 4 is in the middle of the second."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a whole run of seven steps: its YAML, data, record of batches and checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    yaml = folders.write_run(folder, **SMALL)
    folders.write_text(folder / "data.jsonl", NUM_ROWS)
    killed.main([str(yaml), str(folder / "record.jsonl")])
    return folder


def resume(run: Path, to: Path, *changes: str) -> dict[int, list[list[int]]]:
    """Resume from step 4 into another folder. Returns the rows of each step, without padding."""
    record = to / "record.jsonl"
    to.mkdir(exist_ok=True)
    given = [f"resume_from_checkpoint={run / 'out' / 'checkpoint-4'}", f"output_dir={to}", *changes]
    killed.main([str(run / "run.yaml"), str(record), *(f"--set={change}" for change in given)])
    return rows_in(record)


def rows_in(record: Path) -> dict[int, list[list[int]]]:
    steps: dict[int, list[list[int]]] = {}
    for line in map(json.loads, record.read_text().splitlines()):
        if "ids" in line:
            steps.setdefault(line["step"], []).extend(
                [token for token in row if token != 1] for row in line["ids"]
            )  # 1: <pad>
    return steps


def total_for(run: Path, *changes: str, yaml: Path | None = None) -> Any:
    """What a resumed run would be, without training it."""
    return assemble(
        read_config(yaml or run / "run.yaml", [f"resume_from_checkpoint={run / 'out' / 'checkpoint-4'}", *changes])
    )


def edited(run: Path, tmp_path: Path, **keys: Any) -> Path:
    """The YAML with other values."""
    path = tmp_path / "edited.yaml"
    path.write_text(yaml_format.safe_dump({**yaml_format.safe_load((run / "run.yaml").read_text()), **keys}))
    return path


def changes_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "changed setting" in record.getMessage()]


# --- data, by content


def cut(lines: list[str]) -> list[str]:
    return lines[:-1]


def shuffled(lines: list[str]) -> list[str]:
    return random.Random(1).sample(lines, len(lines))


def one_word(lines: list[str]) -> list[str]:
    return [lines[0].replace("the", "dog", 1) if "the" in lines[0] else lines[0].replace(" ", " dog ", 1), *lines[1:]]


@pytest.mark.parametrize("change", [cut, shuffled, one_word])
def test_other_content_at_the_same_path_is_refused(
    run: Path, tmp_path: Path, change: Callable[[list[str]], list[str]]
) -> None:
    data, kept = run / "data.jsonl", tmp_path / "kept.jsonl"
    shutil.copyfile(data, kept)
    try:
        data.write_text("".join(change(data.read_text().splitlines(keepends=True))))
        with pytest.raises(ConfigError, match=rf"datasets: the content of {data} has changed since the run began"):
            total_for(run)
    finally:
        shutil.copyfile(kept, data)
    total_for(run)


def test_the_same_content_elsewhere_is_the_same_data(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`./data.jsonl` is `data.jsonl`; a file that was moved, or written with other spaces, is what it was."""
    monkeypatch.chdir(run)
    with caplog.at_level(logging.INFO, logger="outsize"):
        for path in ("data.jsonl", "./data.jsonl", "../" + run.name + "/data.jsonl"):
            total_for(run, yaml=edited(run, tmp_path, datasets=[path]))
        assert "with the same content" not in caplog.text
        moved = tmp_path / "moved.json"
        moved.write_text(
            json.dumps(
                [{"id": i, **json.loads(line)} for i, line in enumerate((run / "data.jsonl").read_text().splitlines())],
                indent=2,
            )
        )
        total_for(run, yaml=edited(run, tmp_path, datasets=[{"path": str(moved)}]))
    assert f"the data of {run / 'data.jsonl'} is now {moved}, with the same content" in caplog.text


def test_datasets_in_another_order_or_number_are_refused(tmp_path: Path) -> None:
    for name, first in (("a.jsonl", 0), ("b.jsonl", 5)):
        (tmp_path / name).write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in folders.sentences(10)[first : first + 5])
        )
    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    yaml = folders.write_run(tmp_path, **{**SMALL, "max_steps": 1, "save_steps": 1}, datasets=[a, b])
    killed.main([str(yaml), str(tmp_path / "record.jsonl")])
    again = [f"resume_from_checkpoint={tmp_path / 'out' / 'checkpoint-1'}"]
    assemble(read_config(yaml, again))
    for datasets, told in (
        ([b, a], "the order has changed"),
        ([a], "there were 2, now there are 1"),
        ([a, a], rf"the content of {b[:-7]}a.jsonl has changed"),
    ):
        with pytest.raises(ConfigError, match=told):
            assemble(read_config(edited(tmp_path, tmp_path, datasets=datasets), again))


# --- settings


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (
            {"learning_rate": 0.003},
            r"learning_rate was 0\.01 and is 0\.003\. Set it back, or confirm the change with --set learning_rate=0\.003\.",
        ),
        ({"max_steps": 9}, r"max_steps was 7 and is 9\. Set it back, or confirm the change with --set max_steps=9\."),
        ({"lr_scheduler": "linear"}, "--set lr_scheduler=linear"),
        ({"sdp_kernel": "flash"}, "sdp_kernel was auto and is flash. Set it back, or confirm"),
        (
            {"micro_batch_size": 4, "gradient_accumulation_steps": 1},
            r"--set micro_batch_size=… and --set gradient_accumulation_steps=…",
        ),
        ({"seed": 7}, "seed was 42 and is 7. It cannot be changed on resume"),
    ],
)
def test_a_change_of_the_file_is_refused_and_says_how_to_confirm_it(
    run: Path, tmp_path: Path, keys: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        total_for(run, yaml=edited(run, tmp_path, **keys))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("seed=7", "seed was 42 and is 7. --set cannot change it on resume"),
        ("data_seed=7", "data_seed was null and is 7. --set"),
        ("bf16=false", "bf16 was true and is false. --set"),
        ("sequence_len=60", "sequence_len was 64 and is 60. --set"),
        ("micro_batch_size=4", r"batch_size was 4 \(2 × 2\) and is 8 \(4 × 2\). A resumed run keeps its global batch"),
    ],
)
def test_what_the_steps_so_far_depend_on_is_not_changed_by_asking(run: Path, change: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        total_for(run, change)


@pytest.mark.parametrize("split", [(1, 4), (4, 1)])
def test_another_split_of_the_same_batch_sees_exactly_the_remaining_rows(
    run: Path, tmp_path: Path, split: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    whole = rows_in(run / "record.jsonl")
    assert [len(rows) for rows in whole.values()] == [4, 4, 2, 4, 4, 2, 4] and sorted(
        whole[4] + whole[5] + whole[6]
    ) == sorted(whole[1] + whole[2] + whole[3])
    seen = resume(run, tmp_path / "out", f"micro_batch_size={split[0]}", f"gradient_accumulation_steps={split[1]}")
    assert seen == {step: whole[step] for step in (5, 6, 7)}
    assert changes_in(caplog) == [
        f"resuming with a changed setting: gradient_accumulation_steps: 2 → {split[1]}",
        f"resuming with a changed setting: micro_batch_size: 2 → {split[0]}",
    ]
    then = json.loads((tmp_path / "out" / "checkpoint-7" / "run.json").read_text())
    assert (then["micro_batch_size"], then["gradient_accumulation_steps"]) == split


def rates(folder: Path) -> dict[int, float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {entry["step"]: entry["learning_rate"] for entry in history if "loss" in entry}


def test_another_learning_rate_schedule_and_length_hold_from_the_first_resumed_step(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As if the run had had them from the start, and no step before is made again."""
    changes = [
        "learning_rate=0.004",
        "lr_scheduler=linear",
        "max_steps=null",
        "num_epochs=3",
        "weight_decay=0.3",
        "adam_beta2=0.9",
        "save_steps=3",
    ]
    seen = resume(run, tmp_path / "out", *changes)
    assert list(seen) == [5, 6, 7, 8, 9]
    found = rates(tmp_path / "out" / "checkpoint-9")
    before = rates(run / "out" / "checkpoint-4")
    assert {step: found[step] for step in before} == before
    assert [found[step] for step in range(5, 10)] == pytest.approx([0.004 * (9 - done) / 9 for done in range(4, 9)])
    assert [message.split(": ", 1)[1] for message in changes_in(caplog)] == [
        "adam_beta2: 0.999 → 0.9",
        "learning_rate: 0.01 → 0.004",
        "lr_scheduler: cosine → linear",
        "max_steps: 7 → null",
        "num_epochs: 1.0 → 3.0",
        "weight_decay: 0.1 → 0.3",
    ]
    groups = json.loads((tmp_path / "out" / "checkpoint-9" / "outsize.json").read_text())["groups"]
    assert {group["weight_decay"] for group in groups} == {0.3, 0.0} and {group["betas"][1] for group in groups} == {
        0.9
    }
    assert [step for step, _ in checkpoints(tmp_path / "out")] == [6, 9], "save_steps is free, and is the new one"


def test_a_key_is_changed_by_any_of_its_names(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = read_config(
        run / "run.yaml",
        ["per_device_train_batch_size=1", "gradient_accumulation_steps=4", "datasets.0=x", "learning_rate = 1e-3"],
    )
    assert config.overridden == ("micro_batch_size", "gradient_accumulation_steps", "datasets", "learning_rate")
    assert read_config(run / "run.yaml").overridden == ()


# --- runs in one folder


def test_a_checkpoint_of_an_earlier_run_in_the_folder_is_not_resumed(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, **SMALL)
    train_run(read_config(yaml), Console(file=io.StringIO()))
    assert find_checkpoint(read_config(yaml, ["resume_from_checkpoint=true"])) == tmp_path / "out" / "checkpoint-7"
    train_run(read_config(yaml, ["max_steps=4"]), Console(file=io.StringIO()))
    assert [step for step, _ in checkpoints(tmp_path / "out")] == [4, 7]
    assert find_checkpoint(read_config(yaml, ["resume_from_checkpoint=true"])) == tmp_path / "out" / "checkpoint-4"
    shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    with pytest.raises(
        ConfigError, match=r"of the last run\. .*checkpoint-7 is of an earlier run; --set resume_from_ch"
    ):
        find_checkpoint(read_config(yaml, ["resume_from_checkpoint=true"]))
    assert find_checkpoint(read_config(yaml, ["auto_resume_from_checkpoints=true"])) is None


def test_resuming_a_finished_run_says_that_a_changed_setting_had_no_effect(run: Path, tmp_path: Path) -> None:
    console = Console(record=True, width=300, file=io.StringIO())
    given = [f"resume_from_checkpoint={run / 'out' / 'checkpoint-7'}", f"output_dir={tmp_path}", "learning_rate=0.002"]
    train_run(read_config(run / "run.yaml", given), console)
    last = console.export_text().splitlines()[-1]
    assert last.startswith(
        "Nothing was trained: the checkpoint has all 7 steps. learning_rate had no effect. Raise num_"
    )


def test_another_rank_than_the_adapters_is_refused_with_two_ways_that_work(run: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(run / "out" / "checkpoint-4", tmp_path / "checkpoint-4"))
    (checkpoint / "adapter_config.json").write_text("{}")
    found = (
        rf"with its rank: lora_model_dir: {checkpoint}, .*merge it first \(outsize export {checkpoint} merged --merge\)"
    )
    with pytest.raises(ConfigError, match=found):
        assemble(read_config(run / "run.yaml", [f"resume_from_checkpoint={checkpoint}", "seed=7"]))


def test_checkpoints_store_the_number_of_threads(run: Path) -> None:
    assert threads_in(run / "out" / "checkpoint-4") == torch.get_num_threads()
