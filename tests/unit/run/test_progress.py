"""The line that a terminal shows, and the same fields in the log and in trackers."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import folders
import pytest
from rich.console import Console
from transformers import TrainerCallback
from transformers.integrations import integration_utils

from outsize.base.errors import ConfigError
from outsize.config.read import read_config
from outsize.run.assemble import assemble
from outsize.run.progress import ProgressCallback
from outsize.run.train import train_run


def test_a_narrow_terminal_shows_the_steps_and_the_loss_of_the_last_one() -> None:
    engine = SimpleNamespace(
        device=SimpleNamespace(has_own_memory=True, is_simulated=False),
        report=lambda: SimpleNamespace(gpu_peak_bytes=2**30),
        plan=SimpleNamespace(estimate=SimpleNamespace(gpu_bytes=2**30, host_bytes=2**30)),
    )
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=60, color_system=None)
    progress = ProgressCallback(
        cast(Any, SimpleNamespace(engine=engine, num_rows_seen=4, others_bytes=(0, 0))), console, 25.0
    )
    state = SimpleNamespace(max_steps=12_000, global_step=0)
    progress.on_train_begin(None, state, None)
    for step, loss in ((1, 3.25), (2, 2.5)):
        progress.on_step_begin(None, state, None)
        state.global_step = step
        progress.on_step_end(None, state, None)
        progress.on_log(None, state, None, logs={"loss": loss})
    progress.on_train_end(None, state, None)
    last = written.getvalue().split("\r")[-1]
    assert "2/12000" in last and "loss 2.500" in last and last.endswith("\x1b[?25h"), last  # and the cursor is back


@pytest.mark.parametrize(
    ("width", "facts"),
    [
        (50, "loss 2.500, 9 tok/s"),
        (70, "loss 2.500, 9 tok/s, GPU 107/108 MiB"),
        (100, "loss 2.500, 9 tok/s, lr 0.00123, norm 1.23, GPU 107/108 MiB"),
        (120, "loss 2.500, 9 tok/s, lr 0.00123, norm 1.23, GPU 107/108 MiB, host 1.00 GiB"),
    ],
)
def test_the_line_has_the_facts_that_fit_and_none_is_cut(
    width: int, facts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mib = 2**20
    engine = SimpleNamespace(
        device=SimpleNamespace(has_own_memory=True, is_simulated=False),
        report=lambda: SimpleNamespace(gpu_peak_bytes=107 * mib),
        plan=SimpleNamespace(estimate=SimpleNamespace(gpu_bytes=108 * mib, host_bytes=2**30)),
    )
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    progress = ProgressCallback(
        cast(Any, SimpleNamespace(engine=engine, num_rows_seen=4, others_bytes=(0, 0))), console, 25.0
    )
    fields = {"tokens_per_second": 9.0, "seconds_left": 1.0, "host_memory_gib": 1.0}
    fields |= {"gpu_memory_gib": 107 / 1024, "gpu_memory_planned_gib": 108 / 1024}
    monkeypatch.setattr(progress, "fields", lambda: fields)
    state = SimpleNamespace(max_steps=200, global_step=1)
    progress.on_log(None, state, None, logs={"loss": 2.5, "learning_rate": 0.001234, "grad_norm": 1.2345})
    assert progress._bar_text(state) == facts


def test_a_line_of_a_file_is_not_wrapped(tmp_path: Path) -> None:
    yaml = folders.write_run(tmp_path, kind="one-block", max_steps=2)
    file = io.StringIO()
    train_run(read_config(yaml, ["device=sim:1MiB"]), Console(file=file, width=40))
    steps = [line for line in file.getvalue().splitlines() if line.startswith("step ")]
    assert len(steps) == 2 and all(line.endswith("planned") and len(line) > 100 for line in steps), file.getvalue()


class Tracker(TrainerCallback):
    """Registered with transformers under a name of its own."""

    seen: list[dict[str, float]]

    def __init__(self) -> None:
        type(self).seen = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs))


MEMORY = {"gpu_memory_gib", "gpu_memory_planned_gib", "host_memory_gib", "host_memory_planned_gib"}


def test_the_log_and_the_trackers_get_the_fields_of_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(integration_utils.INTEGRATION_TO_CALLBACK, "local", Tracker)
    yaml = folders.write_run(tmp_path, kind="one-block", max_steps=3, report_to="local", val_set_size=2, eval_steps=2)
    console = Console(record=True, width=400, file=io.StringIO())
    train_run(read_config(yaml, ["device=sim:1MiB"]), console)
    steps = [logs for logs in Tracker.seen if "loss" in logs]
    assert len(steps) == 3 and any("eval_loss" in logs for logs in Tracker.seen)
    for logs in steps:
        assert {"learning_rate", "grad_norm", "tokens_per_second", "seconds_left", *MEMORY} <= logs.keys()
        assert all(isinstance(value, (int, float)) for value in logs.values())
        assert 0 < logs["gpu_memory_gib"] <= logs["gpu_memory_planned_gib"] < 2**-10 < logs["host_memory_gib"]
    assert steps[0]["seconds_left"] > steps[-1]["seconds_left"] == 0
    history = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    kept = [entry for entry in history if "loss" in entry]
    assert kept == [{**logs, "step": number} for number, logs in enumerate(steps, 1)]
    last = console.export_text().split("step 3/3: ")[1].split("\n")[0]
    assert f"{steps[-1]['tokens_per_second']:,.0f} tokens/s, 0 s left" in last


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_is_read(
    tmp_path: Path, tracker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    yaml = folders.write_run(tmp_path, report_to=tracker, datasets=["no/such/data.jsonl"])
    with pytest.raises(
        ConfigError, match=rf"report_to: {tracker}: .* `pip install {tracker}`\. Or remove what sets it"
    ):
        assemble(read_config(yaml))
