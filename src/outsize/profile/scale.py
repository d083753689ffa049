"""Scales a trace to another number of rows, along the line through two measured traces. No torch.

Rows of a batch are independent, so the bytes and seconds of a call have a part per row and a fixed part, and two sizes
determine both. Where a number is the maximum of two such sums (a weight's gradient is larger than the activations of
few rows), the line is too low beyond the two points, never too high, and too high between them. One row is a special
case: models that copy something for each row only view it if there is one. So use points of two rows or more, and
profile at the final size before relying on a scaled trace.
"""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from outsize.model.work import Work
from outsize.profile.trace import ModelTrace

LOOP_SHARE = 0.9
"""Share of growth in proportion to rows from which a measured launch time counts as that of a loop. A busy CPU alone
made launch times 1.8 times as long.
"""
_SECONDS = ("forward_seconds", "backward_seconds")
_SIZES = ("forward_peak_bytes", "backward_peak_bytes", "sent_bytes", "released_bytes")
_CHANGES = ("forward_delta_bytes", "backward_delta_bytes")
"""Fields of Work that may be negative."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A trace, and the rows of its batch."""

    rows: int
    trace: ModelTrace


def scaled(one: Point, other: Point, rows: int) -> ModelTrace | None:
    """The trace at `rows`. None if the two traces differ in more than sizes: the model runs differently at another
    size. The batches differ only in rows.
    """
    for point in (one, other):
        if point.rows == rows:
            return point.trace
    if one.rows == other.rows or structure_of(one.trace) != structure_of(other.trace):
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
    # A region without a Work after a strategy has that of `keep`.
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
    """Position: 0 at the first point, 1 at the second."""
    more: float
    """How many more rows the second point has, relative to the first."""
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
        fields["forward_launch_seconds"] = self.launch_seconds(
            a.forward_launch_seconds, b.forward_launch_seconds, syncs_host=a.forward_syncs_host and b.forward_syncs_host
        )
        fields["backward_launch_seconds"] = self.launch_seconds(
            a.backward_launch_seconds,
            b.backward_launch_seconds,
            syncs_host=a.backward_syncs_host and b.backward_syncs_host,
        )
        return replace(b, **fields)

    def launch_seconds(self, a: float, b: float, *, syncs_host: bool) -> float:
        """Counted launch times lie on the line. Measured ones depend on rows only if a layer loops over them (windows
        of images) or syncs the host. Otherwise two timings differ by noise, which extrapolation would enlarge."""
        return self.seconds(a, b) if self.counts_launches or syncs_host or b - a > LOOP_SHARE * self.more * a else b


def structure_of(trace: ModelTrace) -> tuple[object, ...]:
    """The parts of a trace that depend neither on the number of rows nor on their length."""
    calls = [trace.strategies(v) for v in range(len(trace.calls))]
    # Whether a tensor is freed before or after the peak of a call does depend on them.
    shared = [replace(tensor, num_bytes=0, freed_in=0, freed_early_in=()) for tensor in trace.shared]
    dims = {name: len(shape) for name, shape in trace.inputs.items()}
    return trace.graph, dims, calls, shared, trace.tile_tokens, trace.tiled
