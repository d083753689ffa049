"""`batch_size` in a run file: micro-batch and accumulation are chosen at the start, said, kept in the checkpoints, and
kept by a run that goes on.
"""

import io
import json
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from outsize.base.errors import ConfigError
from outsize.config.read import read_config
from outsize.run.assemble import assemble
from outsize.run.train import train_run

OPEN = dict(
    kind="one-block",
    micro_batch_size=None,
    gradient_accumulation_steps=None,
    sequence_len=16,
    max_steps=2,
    save_steps=1,
)


def run(yaml: Path, *overrides: str) -> tuple[Any, str]:
    console = Console(record=True, width=160, file=io.StringIO())
    return train_run(read_config(yaml, overrides), console), console.export_text()


def recipe_of(folder: Path) -> tuple[int, int]:
    then = json.loads((folder / "run.json").read_text())
    assert "batch_size" not in then
    return then["micro_batch_size"], then["gradient_accumulation_steps"]


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, int], str]:
    """A run with `batch_size: 4` alone, what it chose, and what it showed."""
    folder = tmp_path_factory.mktemp("chosen")
    _, text = run(folders.write_run(folder, **OPEN, batch_size=4), "device=sim:1MiB")
    return folder, recipe_of(folder / "out" / "checkpoint-1"), text


def test_the_choice_is_shown_and_trains_the_bits_of_a_run_that_has_it_as_a_setting(
    chosen: tuple[Path, tuple[int, int], str], tmp_path: Path
) -> None:
    folder, (rows, passes), text = chosen
    assert rows * passes == 4 and f"micro-batches {rows} × {passes} of 4 rows a step; " in text
    assert f"input_ids {rows}×16" in text
    run(folders.write_run(tmp_path, **{**OPEN, "micro_batch_size": rows, "gradient_accumulation_steps": passes}))
    expected = load_file(tmp_path / "out" / "model.safetensors")
    found = load_file(folder / "out" / "model.safetensors")
    assert expected.keys() == found.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_run_that_continues_keeps_the_split_of_its_checkpoint(chosen: tuple[Path, tuple[int, int], str]) -> None:
    """On a machine where it would choose another, or written with the numbers that were chosen: the bits are
    the same.
    """
    folder, (rows, passes), _ = chosen
    whole = load_file(folder / "out" / "model.safetensors")
    resumed = f"resume_from_checkpoint={folder / 'out' / 'checkpoint-1'}"
    small, told = (
        ["device=sim:200KiB"],
        [f"micro_batch_size={rows}", f"gradient_accumulation_steps={passes}", "batch_size=null"],
    )
    for name, changes in (("small", small), ("told", told)):
        _, text = run(folder / "run.yaml", resumed, f"output_dir={folder / name}", *changes)
        assert recipe_of(folder / name / "checkpoint-2") == (rows, passes) and "rows a step" not in text
        again = load_file(folder / name / "model.safetensors")
        assert all(torch.equal(again[key], value) for key, value in whole.items())
    new = assemble(read_config(folder / "run.yaml", [*small, f"output_dir={folder / 'new'}"]))
    assert (new.trainer.args.per_device_train_batch_size, new.trainer.args.gradient_accumulation_steps) != (
        rows,
        passes,
    )
    with pytest.raises(ConfigError, match=rf"batch_size was 4 \({rows} × {passes}\) and is 8"):
        run(folder / "run.yaml", resumed, f"output_dir={folder / 'other'}", "batch_size=8")


@pytest.mark.parametrize(
    ("given", "split"),
    [
        ({}, (1, 1)),
        ({"batch_size": 6, "micro_batch_size": 3}, (3, 2)),
        ({"batch_size": 6, "gradient_accumulation_steps": 6}, (1, 6)),
    ],
)
def test_what_is_given_is_not_chosen(given: dict[str, int], split: tuple[int, int], tmp_path: Path) -> None:
    assembled = assemble(read_config(folders.write_run(tmp_path, **{**OPEN, **given})))
    args = assembled.trainer.args
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == split and assembled.chosen_by == ""
    assert args.per_device_eval_batch_size == split[0]
    assert tuple(assembled.trainer._plan_batch["input_ids"].shape) == (split[0], 16)
