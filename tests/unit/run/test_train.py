"""What a run prints."""

import io
import json
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from outsize.cli.main import app
from outsize.config.read import read_config
from outsize.run.prompt_format import read_prompts
from outsize.run.train import preview_run, train_run


@pytest.mark.parametrize("keys", [{}, {"adapter": "lora", "lora_r": 2, "lora_target_linear": True}])
def test_the_result_loads_as_the_last_line_says(tmp_path: Path, keys: dict[str, Any]) -> None:
    yaml = folders.write_run(tmp_path, kind="one-block", max_steps=1, **keys)
    console = Console(record=True, width=400, file=io.StringIO())
    train_run(read_config(yaml, ["device=sim:1MiB"]), console)
    text = console.export_text()
    assert "of the simulated GPU at most" in text and "simulated GPU" in text.split("step 1/1: ")[1]
    assert "tokens/s, 0 s left, lr " in text and ", norm " in text
    assert "the plan, on a simulated GPU" in text
    assert read_prompts(tmp_path / "out") == ["{instruction}"] and "the text as it is, without the chat" in text
    code, chat = text.split("\nload")[1].split("\nchat")
    names: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in code.splitlines()), names)
    assert {param.dtype for name, param in names["model"].named_parameters() if "lora" not in name} == {torch.bfloat16}
    if keys:
        base = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
        card = (tmp_path / "out" / "README.md").read_text()
        assert base == str(tmp_path / "model") and f"Of `{base}`" in card and "| `r` | 2 |" in card
        assert card == (tmp_path / "out" / "checkpoint-1" / "README.md").read_text()
    command = chat.splitlines()[0].split()
    answer = CliRunner().invoke(app, [*command[1:], "--prompt", "the cat", "--max-new-tokens", "2", "--device", "cpu"])
    assert command[0] == "outsize" and answer.exit_code == 0, answer.output


def test_a_dry_run_says_how_long_the_run_is_and_that_the_data_are_few(tmp_path: Path, caplog: Any) -> None:
    keys = dict(max_steps=None, num_epochs=3, micro_batch_size=2, gradient_accumulation_steps=2, warmup_steps=10)
    yaml = folders.write_run(tmp_path, kind="one-block", save_steps=None, **keys)
    folders.write_text(tmp_path / "data.jsonl", 3)
    console = Console(record=True, width=200, file=io.StringIO())
    planned = preview_run(read_config(yaml, ["device=sim:1MiB"]), console)
    text = console.export_text()
    assert "3 rows to train on, of at most " in text and " tokens: 3 steps in 3 epochs." in text
    assert f"run   3 steps, {3 * planned.plan.estimate.step_seconds:.0f} s if every batch is as large" in text
    assert "Dry run: nothing was trained." in text
    assert "a step has 4 rows (micro_batch_size × gradient_accumulation_steps), but the data has 3." in caplog.text
    assert "warmup_steps: 10, but the run has 3 steps" in caplog.text
    assert not list((tmp_path / "out").glob("*"))
