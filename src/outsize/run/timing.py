"""Seconds of training steps that overlap: the updates of one run under the next one's forward, so a step alone has no
length.

The lanes are drained before the window and after it, and never inside. The window holds exactly its steps' work and
divides by their number; it is a little long, since the last updates have no forward to hide under. The times between
steps are those of the run at its pace.
"""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Clock:
    """How a device tells the time."""

    drain: Callable[[], None]
    """Until all that was issued is done."""
    now: Callable[[], float]
    mark: Callable[[], Any]
    """Notes when the device is done with what was issued, without waiting for it."""
    between: Callable[[Any, Any], float]
    """Seconds from one mark to another; drain first."""

    @staticmethod
    def of_stream(device: torch.device, drain: Callable[[], None]) -> "Clock":
        """Of an accelerator: marks on the current stream, which computes, since the thread that issues runs ahead of
        it.
        """

        def mark() -> torch.Event:
            event = torch.Event(device, enable_timing=True)
            event.record()
            return event

        return Clock(drain=drain, now=time.perf_counter, mark=mark, between=lambda a, b: a.elapsed_time(b) / 1e3)

    @staticmethod
    def of_host(drain: Callable[[], None], now: Callable[[], float] = time.perf_counter) -> "Clock":
        """Where everything is done as it is issued, or time is counted."""
        return Clock(drain=drain, now=now, mark=now, between=lambda a, b: b - a)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    first_step_seconds: float
    """Wall-clock, drained: the first step warms everything up."""
    window_seconds: float
    step_seconds: tuple[float, ...]
    """From one step's end to the next one's: one fewer than the steps, unless there is but one."""
    losses: tuple[float, ...]
    """Of all steps, those of the warm-up included."""


def time_steps(step: Callable[[], Tensor | float], clock: Clock, *, warm_up: int, steps: int) -> Timed:
    """`step` makes one and returns its loss. One that is on a device is read at the end: reading waits for all that was
    issued.
    """
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
        first_step_seconds=first,
        window_seconds=window,
        step_seconds=between,
        losses=tuple(float(loss) for loss in losses),
    )
