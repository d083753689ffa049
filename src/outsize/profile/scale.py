"""A trace at another number of rows, on the line through two that were taken. No torch.

Rows of a batch do not know of each other, so what a call allocates, sends and takes is so much for each row and so much
whatever their number: two sizes tell both. Where a maximum of such step_config changes hands (a weight's gradient is
larger than the activations of few rows), the line beyond the two points says too little, and never too much; between
them it is the other way round. One row is a case of its own: models that copy something for each row only look at it
where there is one. So points of two rows and more are better ones, and what was scaled should be traced before it is
relied upon.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from outsize.model.work import Work
from outsize.profile.trace import ModelTrace

LOOPS = 0.9
"""Of growing in proportion to rows, what a timing must show to be a loop's: a busy processor alone made them 1.8 times
as long.
"""
_SECONDS = ("forward_seconds", "backward_seconds")
_SIZES = ("forward_peak_bytes", "backward_peak_bytes", "sent_bytes", "released_bytes")
_CHANGES = ("forward_delta_bytes", "backward_delta_bytes")
"""May be below zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A trace, and the rows of the batch that it was taken with."""

    rows: int
    trace: ModelTrace


def scaled(one: Point, other: Point, rows: int) -> ModelTrace | None:
    """The trace at `rows`; None where the two do not tell, since the model takes another way at another size. All else
    of a batch is equal in both.
    """
    for point in (one, other):
        if point.rows == rows:
            return point.trace
    if one.rows == other.rows or _way(one.trace) != _way(other.trace):
        return None
    low, high = sorted((one, other), key=lambda point: point.rows)
    a, b = low.trace, high.trace
    line = _Line(
        Fraction(rows - low.rows, high.rows - low.rows),
        high.rows / low.rows - 1,
        a.counts_launches and b.counts_launches,
    )
    inputs = {
        name: tuple(line.size(m, n) for m, n in zip(shape, b.inputs[name], strict=True))
        for name, shape in a.inputs.items()
    }
    # The work of a region after a strategy is that after `keep` where it is not named.
    calls = tuple(
        {s: line.work(call.get(s) or call["keep"], other.get(s) or other["keep"]) for s in call | other}
        for call, other in zip(a.calls, b.calls, strict=True)
    )
    sizes = [
        (t, replace(u, num_bytes=line.size(t.num_bytes, u.num_bytes))) for t, u in zip(a.shared, b.shared, strict=True)
    ]
    shared = tuple(
        replace(
            u,
            freed_in=-1 if min(t.freed_in, u.freed_in) < 0 else max(t.freed_in, u.freed_in),
            freed_early_in=tuple(x for x in t.freed_early_in if x in u.freed_early_in),
        )
        for t, u in sizes
    )
    provenance = f"{b.provenance}, scaled to {rows} rows from {low.rows} and {high.rows}"
    return replace(
        b,
        inputs=inputs,
        calls=calls,
        shared=shared,
        held_bytes=line.size(a.held_bytes, b.held_bytes),
        provenance=provenance,
        profile_keys=tuple(dict.fromkeys((*a.profile_keys, *b.profile_keys))),
    )


@dataclass(frozen=True, slots=True)
class _Line:
    at: Fraction
    """0: at the first of two values, 1: at the second."""
    more: float
    """By how much of the first's rows the second has more."""
    counts_launches: bool

    def change(self, a: int, b: int) -> int:
        return -int(-(a + (b - a) * self.at) // 1)  # rounded up

    def size(self, a: int, b: int) -> int:
        return max(0, self.change(a, b))

    def seconds(self, a: float, b: float) -> float:
        return max(0.0, a + (b - a) * float(self.at))

    def work(self, a: Work, b: Work) -> Work:
        kinds = ((_SECONDS, self.seconds), (_SIZES, self.size), (_CHANGES, self.change))
        fields: dict[str, Any] = {name: of(getattr(a, name), getattr(b, name)) for names, of in kinds for name in names}
        fields["forward_launch_seconds"] = self.issue(
            a.forward_launch_seconds, b.forward_launch_seconds, waits=a.forward_syncs_host and b.forward_syncs_host
        )
        fields["backward_launch_seconds"] = self.issue(
            a.backward_launch_seconds, b.backward_launch_seconds, waits=a.backward_syncs_host and b.backward_syncs_host
        )
        return replace(b, **fields)

    def issue(self, a: float, b: float, *, waits: bool) -> float:
        """Counts lie on the line. What was timed depends on rows only where a layer loops over them (the windows of
        images) or its thread waits for the
        device: else two timings tell of the processor, and would tell more of it the further they are stretched."""
        return self.seconds(a, b) if self.counts_launches or waits or b - a > LOOPS * self.more * a else b


def _way(trace: ModelTrace) -> tuple[object, ...]:
    """All that does not depend on how much there is."""
    calls = [trace.strategies(v) for v in range(len(trace.calls))]
    # Where a tensor dies within a call, before its peak or after it, does depend on how much there is.
    shared = [replace(tensor, num_bytes=0, freed_in=0, freed_early_in=()) for tensor in trace.shared]
    return trace.graph, {name: len(shape) for name, shape in trace.inputs.items()}, calls, shared
