"""The line that a terminal shows."""

import io
from types import SimpleNamespace
from typing import Any, cast

from rich.console import Console

from outsize.run.progress import ProgressCallback


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
