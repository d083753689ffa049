"""Chooses the fastest split of an optimizer step's rows into micro-batches.

Two sizes are traced, the others are scaled from them, and each is planned. Scaled bytes beyond the traced sizes are
never too many, so a split that does not fit by them does not fit. The fastest split is traced before it is chosen.
Fewer rows save memory; more rows share one pass over the weights.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from outsize.base.errors import ConfigError, DeviceOutOfMemory, PlanInfeasible
from outsize.loss.chunked_loss import ChosenLoss
from outsize.model.batch import Measured
from outsize.model.graph import BlockGraph
from outsize.planner.search import TIE
from outsize.profile.scale import Point, scaled
from outsize.profile.trace import ModelTrace
from outsize.progress import counted
from outsize.schedule.plan import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    rows: int
    """Rows of a micro-batch."""
    passes: int
    """Number of micro-batches of a step."""

    def __str__(self) -> str:
        return f"{self.rows} × {self.passes}"


def splits_of(
    batch_size: int | None, micro_batch_size: int | None, passes: int | None, *, name: str = "accumulate"
) -> list[Split]:
    """The possible splits, smallest micro-batch first. `name`: the user's name of `passes`, for messages."""
    if batch_size is None:
        return [Split(rows=micro_batch_size or 1, passes=passes or 1)]
    small = [rows for rows in range(1, math.isqrt(batch_size) + 1) if batch_size % rows == 0]
    every = [
        Split(rows=rows, passes=batch_size // rows)
        for rows in sorted({*small, *(batch_size // rows for rows in small)})
    ]
    left = [
        split
        for split in every
        if split.rows == (micro_batch_size or split.rows) and split.passes == (passes or split.passes)
    ]
    if not left:
        given = [
            f"{what} {value}"
            for what, value in (("micro_batch_size", micro_batch_size), (name, passes))
            if value is not None
        ]
        divisors = ", ".join(str(split.rows) for split in every)
        raise ConfigError(
            f"batch_size {batch_size} is not micro_batch_size × {name}: {', '.join(given)}. Leave one of them out, or "
            f"correct it: {batch_size} is divided by {divisors}."
        )
    return left


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    rows: int
    graph: BlockGraph
    trace: ModelTrace
    loss: ChosenLoss
    measured: Measured | None = None

    @property
    def point(self) -> Point:
        return Point(rows=self.rows, trace=self.trace)

    def makes_its_loss_alike(self, rows: int) -> bool:
        """Whether the loss at `rows` rows is chunked exactly if it is chunked here."""
        patch, labels = self.loss.patch, math.prod(self.trace.inputs.get("labels", (0,)))
        return patch is None or (labels * rows > patch.chunk * self.rows) == (labels > patch.chunk)


class HasPlan(Protocol):
    @property
    def plan(self) -> Plan: ...


A = TypeVar("A", bound=HasPlan)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Generic[A]):
    split: Split
    answer: A
    words: str
    """Times of the other splits; empty if there are none."""


def fastest(splits: Sequence[Split], trace: Callable[[int], Traced], solve: Callable[[Traced, Split], A]) -> Choice[A]:
    """The fastest split; of equal ones the one with the smaller micro-batch.

    Args:
        splits: of one batch, smallest micro-batch first.
        trace: traces a number of rows.
        solve: plans, or raises PlanInfeasible.
    """
    if len(splits) == 1:
        return Choice(split=splits[0], answer=solve(trace(splits[0].rows), splits[0]), words="")
    sizes = _Sizes(trace, [split.rows for split in splits])
    found: dict[Split, A] = {}
    for split in counted(splits, "planning micro-batches", total=len(splits)):
        try:
            found[split] = solve(sizes.estimated(split.rows), split)
        except PlanInfeasible:
            continue  # a larger one may fit: a single pass need not keep gradients
        except DeviceOutOfMemory:
            break  # larger ones need more
    while found:
        best = _best(found)
        if best.rows in sizes.taken:
            return Choice(split=best, answer=found[best], words=_words(splits, found, best))
        try:
            found[best] = solve(sizes.take(best.rows), best)
        except (PlanInfeasible, DeviceOutOfMemory):
            del found[best]
    # From its own trace: it may fit after all, and otherwise the error has the exact minimum.
    return Choice(
        split=splits[0], answer=solve(sizes.take(splits[0].rows), splits[0]), words=_words(splits, {}, splits[0])
    )


class _Sizes:
    """Traces by rows: measured if needed, otherwise scaled."""

    def __init__(self, trace: Callable[[int], Traced], rows: Sequence[int]):
        self._trace = trace
        self.taken: dict[int, Traced] = {}
        try:
            for size in [size for size in rows if size > 1][:2]:  # one row is a special case: see profile/scale.py
                self.take(size)
        except DeviceOutOfMemory:
            pass  # reported when a split needs it

    def take(self, rows: int) -> Traced:
        if rows not in self.taken:
            self.taken[rows] = self._trace(rows)
        return self.taken[rows]

    def estimated(self, rows: int) -> Traced:
        near = sorted(
            (one for one in self.taken.values() if one.rows > 1 and one.makes_its_loss_alike(rows)),
            key=lambda one: abs(one.rows - rows),
        )[:2]
        if rows not in self.taken and len(near) == 2 and near[0].loss.chunk == near[1].loss.chunk:
            trace = scaled(near[0].point, near[1].point, rows)
            if trace is not None:
                return Traced(rows=rows, graph=near[0].graph, trace=trace, loss=near[0].loss)
        return self.take(rows)


def _best(found: dict[Split, A]) -> Split:
    best, *others = found
    for split in others:
        if _seconds(found[split]) * (1 + TIE) < _seconds(found[best]):
            best = split
    return best


def _seconds(answer: HasPlan) -> float:
    return answer.plan.estimate.step_seconds


def _words(splits: Sequence[Split], found: dict[Split, A], best: Split) -> str:
    others = []
    for split in splits:
        if split in found and split != best:
            ratio = _seconds(found[split]) / _seconds(found[best])
            others.append(f"{split} takes {ratio:.2f} times as long" if ratio > 1 + TIE else f"{split} is no faster")
        elif split != best:
            others.append(f"{split} does not fit")
    return f"micro-batches {best} of {best.rows * best.passes} rows a step; {', '.join(others)}"
