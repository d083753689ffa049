"""Shows a training run: steps, loss, tokens/s, time left, measured and planned memory."""

import time
from collections import deque
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from transformers import TrainerCallback

from outsize.base.units import show_bytes, show_duration
from outsize.integrations.hf import OutsizeTrainer

_WINDOW_STEPS = 20
_BAR_WIDTH = 12
_GIB = 2**30


class ProgressCallback(TrainerCallback):
    def __init__(self, trainer: OutsizeTrainer, console: Console, tokens_per_row: float):
        """`tokens_per_row`: of the average row, without padding. Counting tokens on a GPU would wait for it."""
        self._trainer, self._console, self._tokens_per_row = trainer, console, tokens_per_row
        self._steps: deque[tuple[float, int]] = deque(maxlen=_WINDOW_STEPS)
        """Seconds and rows of the last steps."""
        self._rows = 0
        """Trained on before the current step."""
        self._steps_left = 0
        self._logs: dict[str, float] = {}
        self.losses: list[tuple[int, float]] = []
        """(step, loss) as logged."""
        self.seconds = 0.0
        """Spent in training steps."""
        facts = TextColumn("{task.fields[facts]}", table_column=Column(ratio=1, no_wrap=True, overflow="crop"))
        columns = (BarColumn(bar_width=_BAR_WIDTH), MofNCompleteColumn(), TimeRemainingColumn(), facts)
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, expand=True)
        self._bar = self._progress.add_task("training", total=None, facts="")
        self._host = psutil.Process()
        self._since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._progress.update(self._bar, total=state.max_steps, completed=state.global_step)
        self._progress.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since, self._rows = time.perf_counter(), self._trainer.num_rows_seen

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.perf_counter() - self._since
        self.seconds += seconds
        self._steps.append((seconds, self._trainer.num_rows_seen - self._rows))
        self._steps_left = state.max_steps - state.global_step
        self._progress.update(self._bar, completed=state.global_step, facts=self._bar_text(state))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if "loss" in logs:
            self.losses.append((state.global_step, logs["loss"]))
            self._logs = logs
            self._progress.update(self._bar, facts=self._bar_text(state))  # logged after the end of the step
        if "eval_loss" in logs:
            self._console.print(f"step {state.global_step}: eval loss {logs['eval_loss']:.4f}")
        elif "loss" in logs and not self._console.is_terminal:
            self._console.print(f"step {state.global_step}/{state.max_steps}: {self._log_text()}", soft_wrap=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()

    def stop(self) -> None:
        """Restore the terminal's cursor. Needed after an exception; harmless otherwise."""
        self._progress.stop()

    @property
    def tokens_per_second(self) -> float:
        """Of the run, padding not counted."""
        return self._trainer.num_rows_seen * self._tokens_per_row / self.seconds if self.seconds else 0.0

    def fields(self) -> dict[str, float]:
        """What the log of a step has beside loss, learning rate and gradient norm. Memory is in GiB."""
        engine, (other_gpu, other_host) = self._trainer.engine, self._trainer.others_bytes
        found: dict[str, float] = {}
        seconds = sum(seconds for seconds, _ in self._steps)
        if seconds:
            found["tokens_per_second"] = sum(rows for _, rows in self._steps) * self._tokens_per_row / seconds
            found["seconds_left"] = self._steps_left * seconds / len(self._steps)
        found["host_memory_gib"] = self._host.memory_info().rss / _GIB
        if engine.device.has_own_memory:  # otherwise GPU memory is host memory
            estimate = engine.plan.estimate
            found["gpu_memory_gib"] = engine.report().gpu_peak_bytes / _GIB
            found["gpu_memory_planned_gib"] = (estimate.gpu_bytes + other_gpu) / _GIB
            found["host_memory_planned_gib"] = (estimate.host_bytes + other_host) / _GIB
        return found

    def _log_text(self) -> str:
        fields = self.fields()
        facts = [f"loss {self.losses[-1][1]:.6f}"] if self.losses else []
        if "tokens_per_second" in fields:
            facts += [f"{fields['tokens_per_second']:,.0f} tokens/s", f"{show_duration(fields['seconds_left'])} left"]
        facts += self._rate_and_norm()
        size = {name: show_bytes(round(value * _GIB)) for name, value in fields.items() if "memory" in name}
        if "gpu_memory_gib" in size:
            facts.append(f"{self._gpu_name} {size['gpu_memory_gib']} of {size['gpu_memory_planned_gib']} planned")
        planned = f", {size['host_memory_planned_gib']} of it planned" if "host_memory_planned_gib" in size else ""
        facts.append(f"host {size['host_memory_gib']}{planned}")
        return ", ".join(facts)

    def _bar_text(self, state: Any) -> str:
        """As many facts as the line has room for. Time left has a column of its own."""
        fields = self.fields()
        loss = self.losses[-1][1] if self.losses else None
        facts = [] if loss is None else [f"loss {loss:.3f}" if abs(loss) >= 0.01 else f"loss {loss:.1e}"]
        if "tokens_per_second" in fields:
            facts.append(f"{fields['tokens_per_second']:,.0f} tok/s")
        facts += self._rate_and_norm()
        size = {name: show_bytes(round(value * _GIB)) for name, value in fields.items() if "memory" in name}
        if "gpu_memory_gib" in size:
            used, planned = size["gpu_memory_gib"], size["gpu_memory_planned_gib"]
            unit = used[used.rindex(" ") :]
            name = self._gpu_name.removesuffix(" GPU")
            facts.append(f"{name} {used.removesuffix(unit) if planned.endswith(unit) else used}/{planned}")
        facts.append(f"host {size['host_memory_gib']}")
        others = _BAR_WIDTH + len(f" {state.max_steps}/{state.max_steps} 0:00:00 ")
        for name in ("host", "norm", "lr", self._gpu_name.removesuffix(" GPU")):  # the least important first
            if len(", ".join(facts)) > self._console.width - others:
                facts = [fact for fact in facts if not fact.startswith(name)]
        return ", ".join(facts)

    def _rate_and_norm(self) -> list[str]:
        names = {"learning_rate": "lr", "grad_norm": "norm"}
        return [f"{name} {self._logs[key]:.3g}" for key, name in names.items() if key in self._logs]

    @property
    def _gpu_name(self) -> str:
        return "simulated GPU" if self._trainer.engine.device.is_simulated else "GPU"
