"""Timing of training steps that overlap: the updates of one step run under the forward of the next.

All lanes are drained before the timed window and after it, never inside: the window holds exactly the work of its
steps. It is slightly long, because the last updates have no forward to run under. The times between steps are not.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outsize.runtime.engine import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """How to measure time on a device."""

    drain: Callable[[], None]
    """Wait until everything issued is done."""
    now: Callable[[], float]
    mark: Callable[[], Any]
    """Record when the device finishes what was issued so far, without waiting for it."""
    between: Callable[[Any, Any], float]
    """Seconds from one mark to another. Drain first."""

    @staticmethod
    def of_stream(device: torch.device, drain: Callable[[], None]) -> "Clock":
        """Events on the current stream of an accelerator: the issuing thread runs ahead of it."""

        def mark() -> torch.Event:
            event = torch.Event(device, enable_timing=True)
            event.record()
            return event

        return Clock(drain=drain, now=time.perf_counter, mark=mark, between=lambda a, b: a.elapsed_time(b) / 1e3)

    @staticmethod
    def of_host(drain: Callable[[], None], now: Callable[[], float] = time.perf_counter) -> "Clock":
        """For devices that finish work as it is issued, or whose clock is simulated."""
        return Clock(drain=drain, now=now, mark=now, between=lambda a, b: b - a)

    @staticmethod
    def of_engine(engine: Engine) -> "Clock":
        if engine.device.is_gpu:
            return Clock.of_stream(engine.device.torch_device, engine.drain)
        return Clock.of_host(engine.drain, lambda: engine.report().seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    first_step_seconds: float
    """Wall-clock, drained. It includes all warm-up."""
    window_seconds: float
    step_seconds: tuple[float, ...]
    """From the end of one step to the end of the next: one fewer than the steps, unless there is only one."""
    losses: tuple[float, ...]
    """Of all steps, warm-up included."""

    @property
    def median_step_seconds(self) -> float:
        return statistics.median(self.step_seconds)


def time_steps(step: Callable[[], Tensor | float], clock: Clock, *, warm_up: int, steps: int) -> Timed:
    """`step` runs one training step and returns its loss. Losses are read at the end, since reading one drains."""
    assert warm_up >= 1 and steps >= 1
    started = time.perf_counter()
    losses = [step()]
    clock.drain()
    first = time.perf_counter() - started
    losses += [step() for _ in range(warm_up - 1)]
    clock.drain()
    begin, marks = clock.now(), []
    for _ in range(steps):
        losses.append(step())
        marks.append(clock.mark())
    clock.drain()
    window = clock.now() - begin
    between = tuple(clock.between(a, b) for a, b in itertools.pairwise(marks)) or (window,)
    return Timed(
        first_step_seconds=first, window_seconds=window, step_seconds=between, losses=tuple(map(float, losses))
    )
