"""Shows a training run: steps, loss, tokens/s, measured and planned memory."""

import time
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from transformers import TrainerCallback

from outsize.base.units import show_bytes
from outsize.integrations.hf import OutsizeTrainer


class ProgressCallback(TrainerCallback):
    def __init__(self, trainer: OutsizeTrainer, console: Console):
        self._trainer, self._console = trainer, console
        self.losses: list[tuple[int, float]] = []
        """(step, loss) as logged."""
        self.seconds = 0.0
        """Spent in training steps."""
        # On a narrow terminal the facts are truncated; steps and time stay.
        facts = TextColumn("{task.fields[facts]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
        columns = (BarColumn(bar_width=12), MofNCompleteColumn(), TimeRemainingColumn(), facts)
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, expand=True)
        self._bar = self._progress.add_task("training", total=None, facts="")
        self._host = psutil.Process()
        self._since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._progress.update(self._bar, total=state.max_steps, completed=state.global_step)
        self._progress.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self._since
        self._progress.update(self._bar, completed=state.global_step, facts=self._facts())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if "loss" in logs:
            self.losses.append((state.global_step, logs["loss"]))
            self._progress.update(self._bar, facts=self._facts())  # logged after the end of the step
        if "eval_loss" in logs:
            self._console.print(f"step {state.global_step}: eval loss {logs['eval_loss']:.4f}")
        elif "loss" in logs and not self._console.is_terminal:
            self._console.print(f"step {state.global_step}/{state.max_steps}: {self._facts()}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Restore the terminal's cursor. Needed after an exception; harmless otherwise."""
        self._progress.stop()

    @property
    def tokens_per_second(self) -> float:
        return self._trainer.num_tokens_seen / self.seconds if self.seconds else 0.0

    def _facts(self) -> str:
        engine = self._trainer.engine
        facts = [f"loss {self.losses[-1][1]:.{3 if self._console.is_terminal else 6}f}"] if self.losses else []
        facts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        planned = ""
        if engine.device.has_own_memory:  # otherwise GPU memory is host memory
            peak, estimate = engine.report().gpu_peak_bytes, engine.plan.estimate
            facts.append(f"GPU {show_bytes(peak)} of {show_bytes(estimate.gpu_bytes)} planned")
            planned = f", {show_bytes(estimate.host_bytes)} of it planned"
        facts.append(f"host {show_bytes(self._host.memory_info().rss)}{planned}")
        return ", ".join(facts)
