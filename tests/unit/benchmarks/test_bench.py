"""`python -m benchmarks.bench` on a machine without a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import outsize
from benchmarks.bench import app
from outsize.base.errors import ConfigError

runner = CliRunner()
SMALL = [
    "--device",
    "sim:8MiB",
    "--micro-batch",
    "2",
    "--seq",
    "16",
    "--steps",
    "2",
    "--warm-up",
    "1",
    "--host-memory",
    "1GiB",
]


@pytest.fixture(autouse=True)
def _children_find_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(outsize.__file__).parents[1]))


def test_tiny_on_sim_prints_a_table_and_writes_everything(tmp_path: Path) -> None:
    found, trace = tmp_path / "found.json", tmp_path / "trace.json"
    result = runner.invoke(
        app, ["--model", "tiny", *SMALL, "--compare", "plain", "--json", str(found), "--trace", str(trace)]
    )
    assert result.exit_code == 0, result.output
    for words in (
        "simulated",
        "measured",
        "predicted",
        "tokens/s",
        "GPU peak",
        "start-up",
        "lanes",
        "× the limit",
        "not compared",
    ):
        assert words in result.output
    data = json.loads(found.read_text())
    assert data["bench"]["model"] == "tiny" and data["bench"]["update"] == "in_backward"
    assert data["speed"]["tokens_per_second"] > 0 and len(data["speed"]["step_seconds"]) == 1
    assert (
        data["plan"]["fingerprint"] in result.output and data["date"] and data["command"].startswith("benchmarks.bench")
    )
    assert {"outsize", "torch", "transformers"} <= data["machine"]["versions"].keys()
    assert data["limit"]["seconds"] > 0 and data["limit"]["bottleneck"] in data["limit"]["bounds"]
    assert data["baselines"]["plain"]["speed"]["tokens_per_second"] > 0 and data["baselines"]["plain"]["ratio"] is None
    events = json.loads(trace.read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert names.count("F0") == 3 and any(name.startswith("U") for name in names)


def test_clipping_and_accumulation(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    result = runner.invoke(app, [*SMALL, "--clip", "1.0", "--accumulate", "2", "--json", str(found)])
    assert result.exit_code == 0, result.output
    data = json.loads(found.read_text())
    assert data["bench"]["update"] == "after_step" and data["limit"]["bounds"]["host updates that nothing hides"] > 0
    assert "2 micro-batches a step" in result.output and "clipped at 1" in result.output


def test_several_models_have_a_process_each_and_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def here(command: list[str]) -> SimpleNamespace:
        """The process that would be started, in this one: it saves seconds of importing."""
        started.append(command[:3])
        return SimpleNamespace(returncode=CliRunner().invoke(app, command[3:]).exit_code)

    monkeypatch.setattr(subprocess, "run", here)
    found = tmp_path / "all.json"
    result = runner.invoke(app, ["--model", "tiny,tiny", *SMALL, "--json", str(found)])
    assert result.exit_code == 0, result.output
    assert len(json.loads(found.read_text())) == 2 and started == [[sys.executable, "-m", "benchmarks.bench"]] * 2
    assert [line.split()[0] for line in result.output.splitlines() if "host updates" in line or "compute" in line][
        -2:
    ] == ["tiny", "tiny"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "llama3b"], "Did you mean llama-3b?"),
        (["--update", "in_backwards"], "Did you mean in-backward?"),
        (["--compare", "plain,checkpoint"], "Did you mean checkpointed?"),
        (["--json", "no/such/folder/x.json"], "does not exist"),
        (["--model", "tiny,llama-1b", "--trace", "x.json"], "Name one model"),
        (["--clip", "1", "--update", "in-backward"], "--clip needs all gradients"),
        ([*SMALL, "--gpu-memory", "24GB"], "use GiB"),
    ],
)
def test_wrong_words_are_reported_in_a_sentence(args: list[str], words: str) -> None:
    result = runner.invoke(app, args)
    assert isinstance(result.exception, ConfigError) and words in str(result.exception)


def test_help_names_the_shapes() -> None:
    result = runner.invoke(app, ["--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0 and "qwen3-32b" in result.output and "--compare" in result.output
