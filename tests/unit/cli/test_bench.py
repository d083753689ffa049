"""`outsize bench` on a machine without a GPU."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from outsize.cli.main import app
from outsize.run.shapes import SHAPES, shape_config

runner = CliRunner()
SMALL = ["bench", "--device", "sim:8MiB", "--micro-batch", "2", "--seq", "16", "--steps", "2", "--host-memory", "1GiB"]


@pytest.mark.parametrize("more", [[], ["--clip", "1.0", "--accumulate", "2"]])
def test_prints_plan_and_measurement(more: list[str]) -> None:
    result = runner.invoke(app, [*SMALL, "--model", "tiny", *more])
    assert result.exit_code == 0, result.output
    assert "simulated" in result.output and "model.layers" in result.output, "the plan"
    assert re.search(r"^tokens/s +[\d,]+ +[\d,]+", result.output, re.MULTILINE)
    assert re.search(r"^step .* mean of 2", result.output, re.MULTILINE)
    measured, predicted = re.findall(r"^GPU peak +(\S+ \S+) +(\S+ \S+)", result.output, re.MULTILINE)[0]
    assert measured == predicted


def test_takes_a_folder_with_a_config(tmp_path: Path) -> None:
    config = shape_config(SHAPES["tiny"])
    config.num_hidden_layers = 2
    config.save_pretrained(tmp_path)
    result = runner.invoke(app, [*SMALL, "--model", str(tmp_path)])
    assert result.exit_code == 0 and "tokens/s" in result.output, result.output


def test_long_rows_forward_and_backward_cost_the_same_gradients_however_activations_are_kept() -> None:
    found = {}
    for kept in ("hidden_states", "hidden_states+attention", "disk", "checkpoint"):
        args = ["bench", "--long", "--device", "cpu", "--seq", "48", "--steps", "2", "--activations", kept]
        args += ["--sdp-kernel", "flash"]
        result = runner.invoke(app, args)
        assert result.exit_code == 0, result.output
        assert "gradients in bf16 kept, no optimizer" in result.output and "tokens/s" in result.output
        found[kept] = json.loads(result.output.partition("RESULT ")[2])
        assert found[kept]["case"] == f"outsize {kept}" and found[kept]["timed"] == 2
        assert found[kept]["model"] == "tiny" and found[kept]["seq"] == 48 and found[kept]["bs"] == 1
    assert len({(tuple(one["losses"]), one["gnorm"]) for one in found.values()}) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--long", "--clip", "1.0"], "--clip has no effect without a plan"),
        (["--activations", "checkpoint"], "no effect without --long"),
        (["--sdp-kernel", "flash"], "no effect without --long"),
        (["--long", "--sdp-kernel", "cudn"], "Did you mean cudnn?"),
        (["--long", "--device", "cpu", "--sdp-kernel", "cudnn"], "cudnn is a kernel of CUDA GPUs"),
        (["--long", "--activations", "hidden"], "Did you mean hidden_states?"),
        (["--long", "--device", "sim:8MiB"], "sim has no speed of its own"),
        (["--model", "llama3b"], "Did you mean llama-3b?"),
        (["--device", "sim:8MiB", "--gpu-memory", "24GB"], "use GiB"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_wrong_options_are_reported_without_a_traceback(args: list[str], message: str) -> None:
    result = runner.invoke(app, ["bench", *args], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.stderr and "Traceback" not in result.output


def test_help_names_the_models() -> None:
    result = runner.invoke(app, ["bench", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "qwen3-32b" in result.output
