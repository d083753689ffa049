"""OSFT from YAML: the bits of the stand-alone optimizer under every plan, resumed too, in plain Hugging Face files."""

import json
from pathlib import Path

import folders
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from outsize.cli.main import app

OSFT = dict(adapter="osft", osft_unfreeze_rank_ratio=0.5, osft_others="norms")
PLANS = (["device=cpu"], ["device=sim:1MiB", "plan.n_persist=0", "plan.n_optimizer_gpu=0"])


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output + result.stderr
    return result.output


def losses(folder: Path) -> list[float]:
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


def test_runs_are_equal_under_every_plan_and_when_resumed(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, **OSFT, max_steps=3, save_steps=2, chat=True)
    expected: dict[str, torch.Tensor] = {}
    for number, plan in enumerate(PLANS):
        out = tmp_path / f"out-{number}"
        settings = [word for key in (f"output_dir={out}", *plan) for word in ("--set", key)]
        assert "constants" in run("train", str(yaml), *settings)
        saved = load_file(out / "model.safetensors")
        expected = expected or saved
        assert saved.keys() == expected.keys() and all(torch.equal(saved[name], expected[name]) for name in saved)
        assert losses(out / "checkpoint-3") == losses(tmp_path / "out-0" / "checkpoint-3")
    # The second half again, under the other plan.
    resumed = [f"output_dir={tmp_path / 'again'}", f"resume_from_checkpoint={tmp_path / 'out-0' / 'checkpoint-2'}"]
    run("train", str(yaml), *(word for key in (*resumed, *PLANS[1]) for word in ("--set", key)))
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype="auto")
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, start.get_parameter(name))}
    assert changed and all("norm" in name or "proj" in name for name in changed)


@pytest.mark.full  # its bytes: test_osft_runs.py
def test_outsize_plan_answers_for_such_a_run(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, **OSFT, max_steps=3, chat=True)
    assert "constants" in run("plan", str(yaml), "--hardware", "rtx4090")
