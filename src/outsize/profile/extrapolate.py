"""Makes the trace of long rows from traces of shorter ones. No torch.

Seconds are a · tokens + c · tokens². Bytes are counted at the full length on shapes (profile/counted.py), which needs
no memory. What the device needs beyond that (workspaces of kernels) is measured at the shorter lengths, and grows along
a line.

Without a count on shapes, all bytes grow along lines, and peaks at least in proportion to the tokens: a peak is the
largest of several moments, and in longer rows another moment may be the largest. A model that then holds tensors of
tokens × tokens is not extrapolated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from outsize.model.work import SharedTensor, Work
from outsize.profile.scale import LOOP_SHARE, structure_of
from outsize.profile.trace import ModelTrace

_SECONDS = ("forward_seconds", "backward_seconds")
_LAUNCH_SECONDS = (("forward_launch_seconds", "forward_syncs_host"), ("backward_launch_seconds", "backward_syncs_host"))
_PEAKS = ("forward_peak_bytes", "backward_peak_bytes")
_SUMS = ("forward_delta_bytes", "backward_delta_bytes", "sent_bytes", "released_bytes")
_BYTES = (*_PEAKS, *_SUMS)
_NOISE_SHARE, _NOISE_BYTES = 0.001, 2**16
"""Deviations from a line that roundings of an allocator cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthPoint:
    """What was profiled with rows of one length."""

    tokens: int
    trace: ModelTrace
    counted: ModelTrace | None = None
    """Its bytes, counted on shapes."""


def extrapolated(points: Sequence[LengthPoint], tokens: int, counted: ModelTrace | None) -> ModelTrace | None:
    """The trace of rows of `tokens`. None if the traces do not allow it.

    Args:
        points: at least two lengths.
        counted: the bytes of the whole rows, counted on shapes; the two longest points then have theirs too. None:
            unknown.
    """
    points = sorted(points, key=lambda point: point.tokens)
    curve = _Curve(tuple(point.tokens for point in points), tokens, all(p.trace.counts_launches for p in points))
    traces = [point.trace for point in points]
    on_shapes = [point.counted for point in points if point.counted is not None]
    every = [*traces, *on_shapes, *([counted] if counted is not None else [])]
    if any(structure_of(trace) != structure_of(traces[0]) for trace in every):
        return None
    if counted is None:
        made = _along_lines(curve, traces)
        how = "peaks grow at least in proportion"
    else:
        made = _beside_counted(curve, traces[-len(on_shapes) :], on_shapes, counted)
        how = "bytes of the whole rows are counted on shapes"
    if made is None:
        return None
    lengths = [str(point.tokens) for point in points]
    words = f"extrapolated to rows of {tokens} tokens from {', '.join(lengths[:-1])} and {lengths[-1]}; {how}"
    return replace(
        _timed(curve, traces, made),
        inputs=_inputs(curve, traces) if counted is None else counted.inputs,
        provenance=f"{traces[-1].provenance}, {words}",
        profile_keys=tuple(dict.fromkeys(key for trace in traces for key in trace.profile_keys)),
        extrapolated_from=curve.lengths,
    )


@dataclass(frozen=True, slots=True)
class _Curve:
    lengths: tuple[int, ...]
    """At least two, ascending."""
    tokens: int
    counts_launches: bool

    def line(self, values: Sequence[int]) -> int:
        """On the line through the last two points, rounded up."""
        (x, y), (a, b) = self.lengths[-2:], values[-2:]
        return -int(-(b + Fraction(b - a, y - x) * (self.tokens - y)) // 1)

    def is_line(self, values: Sequence[int]) -> bool:
        ends = replace(self, lengths=self.lengths[:2], tokens=self.lengths[-1])
        return abs(ends.line(values[:2]) - values[-1]) <= _NOISE_SHARE * abs(values[-1]) + _NOISE_BYTES

    def in_proportion(self, values: Sequence[int]) -> int:
        return -(-values[-1] * self.tokens // self.lengths[-1])

    def seconds(self, values: Sequence[float]) -> float:
        """a · tokens + c · tokens² with the least squares of relative errors, and neither a nor c below zero."""
        rates = [value / length for value, length in zip(values, self.lengths, strict=True)]
        mean_x, mean_y = sum(self.lengths) / len(rates), sum(rates) / len(rates)
        spread = sum((x - mean_x) ** 2 for x in self.lengths)
        c = sum((x - mean_x) * (y - mean_y) for x, y in zip(self.lengths, rates, strict=True)) / spread
        a = mean_y - c * mean_x
        if c < 0:  # a fixed part, which hardly counts in long rows
            a, c = rates[-1], 0.0
        elif a < 0:
            a, c = 0.0, rates[-1] / self.lengths[-1]
        return self.tokens * (a + c * self.tokens)

    def launch_seconds(self, values: Sequence[float], *, syncs_host: bool) -> float:
        """Counted launch times lie on a line. Measured ones depend on the length only in a loop over tokens: otherwise
        they differ by noise, which extrapolation would enlarge."""
        (x, y), (low, high) = self.lengths[-2:], values[-2:]
        is_loop = high - low > LOOP_SHARE * (y / x - 1) * low
        if not (self.counts_launches or syncs_host or is_loop):
            return high
        return max(0.0, high + (high - low) / (y - x) * (self.tokens - y))


def _timed(curve: _Curve, traces: Sequence[ModelTrace], made: ModelTrace) -> ModelTrace:
    """A trace with the seconds of longer rows."""

    def work(now: Work, works: Sequence[Work]) -> Work:
        def values(name: str) -> list[Any]:
            return [getattr(one, name) for one in works]

        fields: dict[str, Any] = {name: curve.seconds(values(name)) for name in _SECONDS}
        for name, syncs in _LAUNCH_SECONDS:
            fields[syncs] = any(values(syncs))
            fields[name] = curve.launch_seconds(values(name), syncs_host=all(values(syncs)))
        return replace(now, **fields)

    calls = tuple(
        {s: work(now, _of(traces, number, s)) for s, now in works.items()} for number, works in enumerate(made.calls)
    )
    return replace(made, calls=calls, counts_launches=curve.counts_launches)


def _of(traces: Sequence[ModelTrace], number: int, strategy: str) -> list[Work]:
    """A call's Work under a strategy in each trace. A region without a Work after a strategy has that of `keep`."""
    return [trace.calls[number].get(strategy) or trace.calls[number]["keep"] for trace in traces]


def _names(traces: Sequence[ModelTrace], number: int) -> list[str]:
    return list(dict.fromkeys(name for trace in traces for name in trace.calls[number]))


def _beside_counted(
    curve: _Curve, traces: Sequence[ModelTrace], on_shapes: Sequence[ModelTrace], counted: ModelTrace
) -> ModelTrace:
    """Counted bytes, and what the device needs beyond the count."""

    def beyond(measured: Sequence[int], count: Sequence[int]) -> int:
        return curve.line([one - other for one, other in zip(measured, count, strict=True)])

    def work(number: int, strategy: str) -> Work:
        measured, count = (_of(found, number, strategy) for found in (traces, on_shapes))
        whole = _of([counted], number, strategy)[0]
        fields: dict[str, Any] = {
            name: getattr(whole, name) + beyond([getattr(w, name) for w in measured], [getattr(w, name) for w in count])
            for name in _BYTES
        }
        return replace(measured[-1], **fields)

    calls = tuple(
        {s: work(number, s) for s in _names((*traces, *on_shapes, counted), number)}
        for number in range(len(counted.calls))
    )
    shared = tuple(
        _shared(whole, measured, count, whole.num_bytes + beyond(*_num_bytes(measured, count)))
        for whole, measured, count in zip(counted.shared, _same(traces), _same(on_shapes), strict=True)
    )
    held = counted.held_bytes + beyond([t.held_bytes for t in traces], [t.held_bytes for t in on_shapes])
    return replace(traces[-1], calls=calls, shared=shared, held_bytes=held)


def _same(traces: Sequence[ModelTrace]) -> list[tuple[SharedTensor, ...]]:
    """By shared tensor: its record in each trace."""
    return list(zip(*(trace.shared for trace in traces), strict=True))


def _num_bytes(*groups: Sequence[SharedTensor]) -> list[list[int]]:
    return [[tensor.num_bytes for tensor in group] for group in groups]


def _shared(
    whole: SharedTensor, measured: Sequence[SharedTensor], count: Sequence[SharedTensor], num_bytes: int
) -> SharedTensor:
    """When a tensor is freed depends on which moment is the peak. If the count and the device disagree on it at some
    length, it counts as freed at the latest moment of all."""
    made = replace(whole, num_bytes=num_bytes)
    if all(
        (a.freed_in, a.freed_early_in) == (b.freed_in, b.freed_early_in) for a, b in zip(measured, count, strict=True)
    ):
        return made
    return _freed_latest(made, [whole, *measured])


def _freed_latest(made: SharedTensor, tensors: Sequence[SharedTensor]) -> SharedTensor:
    freed = [tensor.freed_in for tensor in tensors]
    early = tuple(x for x in made.freed_early_in if all(x in tensor.freed_early_in for tensor in tensors))
    return replace(made, freed_in=-1 if min(freed) < 0 else max(freed), freed_early_in=early)


def _along_lines(curve: _Curve, traces: Sequence[ModelTrace]) -> ModelTrace | None:
    """Bytes without a count on shapes. None if they do not grow along lines."""
    shared = _same(traces)
    sums = [[getattr(w, name) for w in works] for works in _all_works(traces) for name in _SUMS]
    if not all(curve.is_line(values) for values in (*sums, *_num_bytes(*shared))):
        return None

    def work(works: Sequence[Work]) -> Work:
        values = {name: [getattr(one, name) for one in works] for name in _BYTES}
        fields: dict[str, Any] = {name: curve.line(values[name]) for name in _BYTES}
        fields |= {name: max(fields[name], curve.in_proportion(values[name])) for name in _PEAKS}
        return replace(works[-1], **fields)

    calls = tuple(
        {s: work(_of(traces, number, s)) for s in _names(traces, number)} for number in range(len(traces[0].calls))
    )
    grown = tuple(
        _freed_latest(replace(same[-1], num_bytes=curve.line(sizes)), same)
        for same, sizes in zip(shared, _num_bytes(*shared), strict=True)
    )
    return replace(traces[-1], calls=calls, shared=grown, held_bytes=curve.line([t.held_bytes for t in traces]))


def _all_works(traces: Sequence[ModelTrace]) -> list[list[Work]]:
    return [_of(traces, number, s) for number in range(len(traces[0].calls)) for s in _names(traces, number)]


def _inputs(curve: _Curve, traces: Sequence[ModelTrace]) -> dict[str, tuple[int, ...]]:
    return {
        name: tuple(curve.line([trace.inputs[name][dim] for trace in traces]) for dim in range(len(shape)))
        for name, shape in traces[-1].inputs.items()
    }
