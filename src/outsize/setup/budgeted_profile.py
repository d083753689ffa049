"""Profiles a batch within the memory of its plan: with shorter rows if its rows are long, with fewer or shorter rows if
it does not fit.

Profiling keeps activations that a plan would offload or recompute, so it may need more memory than the plan.
"""

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from outsize.base.errors import DeviceOutOfMemory
from outsize.base.log import log
from outsize.base.units import show_bytes
from outsize.device.device import Device
from outsize.model.graph import BlockGraph
from outsize.profile.extrapolate import LengthPoint, extrapolated
from outsize.profile.lengths import LONG_TOKENS, NUM_LENGTHS, lengths_between, lengths_to_profile
from outsize.profile.scale import Point, scaled
from outsize.profile.trace import ModelTrace
from outsize.setup.batches import num_rows, num_tokens, take_rows, take_tokens

Found = tuple[BlockGraph, ModelTrace]
_MOST_SECONDS = 40.0
"""A third length is left out if profiling all would take longer."""
_MOST_TRIALS = 6


def profile_within_budget(
    trace: Callable[[Any], Found],
    count: Callable[[Any], ModelTrace | None],
    batch: Any,
    *,
    device: Device,
    budget_bytes: int,
    changes: Sequence[int] = (),
    needs_count: bool = False,
) -> Found:
    """Trace a batch. Rows that are long or do not fit are traced at shorter lengths; if memory runs out and rows are
    not the reason, the trace is extrapolated linearly from two traces of fewer rows.

    If neither is possible (a batch that is not rows of tokens), profiling may use the whole device. Raises
    DeviceOutOfMemory if nothing fits. The caller resets the device's limit.

    Args:
        count: counts bytes on shapes; None if that is impossible.
        changes: lengths of rows above which other code runs (profile/lengths.py).
        needs_count: shorter rows do not stand for longer ones without a count on shapes.
    """
    shorter = _ShorterRows(trace, count, batch, changes, needs_count=needs_count)
    is_long = (num_tokens(batch) or 0) > LONG_TOKENS
    device.limit(budget_bytes)
    found, ran_out = None, ""
    if is_long:
        found = shorter.profile()
    if found is None:
        found, ran_out = _of_fewer_rows(trace, batch)
    if found is None and budget_bytes < device.spec.gpu_bytes:
        log.info(
            "the profiling run does not fit %s: it may use more of the device, the plan may not",
            show_bytes(budget_bytes),
        )
        device.limit(device.spec.gpu_bytes)
        found, why = _if_it_fits(trace, batch)
        ran_out = why or ran_out
    if found is None and not is_long:
        device.limit(budget_bytes)
        found = shorter.profile()
    if found is None:
        raise DeviceOutOfMemory(ran_out)
    return found


def _if_it_fits(trace: Callable[[Any], Found], batch: Any) -> tuple[Found | None, str]:
    """A trace, or why memory ran out."""
    try:
        return trace(batch), ""
    except DeviceOutOfMemory as error:
        ran_out = str(error)
    gc.collect()  # frees the failed run's activations, which the exception's frames held
    return None, ran_out


def _of_fewer_rows(trace: Callable[[Any], Found], batch: Any) -> tuple[Found | None, str]:
    """The batch's trace if it fits, else scaled from its two largest halvings that fit; and why it did not fit."""
    ran_out = ""
    rows = size = num_rows(batch) or 1
    part = batch
    taken: list[tuple[BlockGraph, Point]] = []
    while part is not None and len(taken) < 2:
        found, why = _if_it_fits(trace, part)
        ran_out = ran_out or why
        if found is not None and size == rows:
            return found, ""
        if found is not None:
            taken.append((found[0], Point(rows=size, trace=found[1])))
        size //= 2
        part = take_rows(batch, size) if size else None
    if len(taken) < 2:
        return None, ran_out
    (graph, larger), (_, smaller) = taken
    made = scaled(larger, smaller, rows)
    if made is None:
        return None, ran_out
    log.warning(
        "the profiling run of %d rows does not fit the device: its numbers are scaled from %d and %d rows",
        rows,
        larger.rows,
        smaller.rows,
    )
    return (graph, made), ""


class _ShorterRows:
    """Traces a batch at shorter lengths of rows, and extrapolates."""

    def __init__(
        self,
        trace: Callable[[Any], Found],
        count: Callable[[Any], ModelTrace | None],
        batch: Any,
        changes: Sequence[int],
        *,
        needs_count: bool,
    ):
        self._trace, self._count, self._batch = trace, count, batch
        self._changes, self._needs_count = changes, needs_count
        self._tokens = num_tokens(batch) or 0

    def profile(self) -> Found | None:
        """None if the batch cannot be cut, or its lengths do not stand for one another."""
        started = time.perf_counter()
        graph: BlockGraph | None = None
        points: list[LengthPoint] = []
        seconds: list[float] = []
        wanted = list(lengths_to_profile(self._tokens, self._changes))
        if len(wanted) < 2:
            return None
        for _ in range(_MOST_TRIALS):
            if not wanted:
                break
            length = wanted.pop(0)
            if len(points) == 2 and time.perf_counter() - started + 4 * seconds[-1] > _MOST_SECONDS:
                break
            part = take_tokens(self._batch, length)
            if part is None:
                return None
            begun = time.perf_counter()
            found, _ = _if_it_fits(self._trace, part)
            if found is not None:
                graph = found[0]
                points.append(LengthPoint(tokens=length, trace=found[1]))
                seconds.append(time.perf_counter() - begun)
            elif points:
                wanted = list(lengths_between(points[-1].tokens, length, NUM_LENGTHS - len(points)))
            else:
                wanted = list(lengths_to_profile(length, self._changes))
        if graph is None or len(points) < 2 or (made := self._extrapolated(points)) is None:
            return None
        return graph, made

    def _extrapolated(self, points: list[LengthPoint]) -> ModelTrace | None:
        counted = self._count(self._batch)
        if counted is None and self._needs_count:
            return None
        if counted is not None:
            longest = [self._with_count(point) for point in points[-2:]]  # bytes beyond the count are on a line
            points = [*points[:-2], *longest]
            counted = counted if all(point.counted is not None for point in longest) else None
        made = extrapolated(points, self._tokens, counted)
        if made is None and counted is not None and not self._needs_count:
            made = extrapolated([LengthPoint(tokens=p.tokens, trace=p.trace) for p in points], self._tokens, None)
        return made

    def _with_count(self, point: LengthPoint) -> LengthPoint:
        counted = self._count(take_tokens(self._batch, point.tokens))
        return LengthPoint(tokens=point.tokens, trace=point.trace, counted=counted)
