"""Extrapolates a trace to longer rows from traces of shorter ones. No torch.

Bytes are sums over tensors whose sizes are fixed, in proportion to the tokens, or to their square (masks, attention
scores without a flash kernel). So a change of memory follows a polynomial of degree two exactly. A peak is the largest
of several such sums. While the same moment is the peak, it follows one of them; where another moment becomes the peak,
it bends upwards. Bends between the measured lengths count as squares, which is too much, never too little; more lengths
resolve them. Seconds are a · tokens + c · tokens².
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
_SIZES = ("sent_bytes", "released_bytes")
_CHANGES = ("forward_delta_bytes", "backward_delta_bytes")
HIDDEN_SHARE = 5
"""A peak that does not grow with the square of the tokens, in a call that holds n bytes per token squared, counts as if
another moment with so many times n became the peak beyond the measured lengths: the mask or the scores that the call
holds, and copies of them in fp32."""
_BEND_SHARE = 0.01
"""A bend that changes a peak by a smaller share is left as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthPoint:
    tokens: int
    trace: ModelTrace


def extrapolated(points: Sequence[LengthPoint], tokens: int) -> ModelTrace | None:
    """The trace of rows of `tokens`, from at least two lengths. None if the traces differ in more than sizes."""
    points = sorted(points, key=lambda point: point.tokens)
    traces = [point.trace for point in points]
    if len(points) < 2 or len({point.tokens for point in points}) < len(points):
        raise ValueError(f"extrapolation needs two lengths: {[point.tokens for point in points]}")
    if any(structure_of(trace) != structure_of(traces[0]) for trace in traces):
        return None
    curve = _Curve(tuple(point.tokens for point in points), tokens, all(t.counts_launches for t in traces))
    last = traces[-1]
    shared = tuple(_shared(curve, same) for same in zip(*(trace.shared for trace in traces), strict=True))
    held = _squares_held(curve, traces)
    calls = tuple(
        {s: _work(curve, [call.get(s) or call["keep"] for call in same], held[number]) for s in _names(same)}
        for number, same in enumerate(zip(*(trace.calls for trace in traces), strict=True))
    )
    inputs = {
        name: tuple(curve.size([trace.inputs[name][dim] for trace in traces]) for dim in range(len(shape)))
        for name, shape in last.inputs.items()
    }
    lengths = [str(point.tokens) for point in points]
    words = f"extrapolated to rows of {tokens} tokens from {', '.join(lengths[:-1])} and {lengths[-1]}"
    return replace(
        last,
        inputs=inputs,
        calls=calls,
        shared=shared,
        held_bytes=curve.size([trace.held_bytes for trace in traces]),
        provenance=f"{last.provenance}, {words}",
        profile_keys=tuple(dict.fromkeys(key for trace in traces for key in trace.profile_keys)),
        extrapolated_from=tuple(point.tokens for point in points),
    )


def has_bends(points: Sequence[LengthPoint], tokens: int) -> bool:
    """Whether a peak grows faster than in proportion between three lengths, so that a fourth would tell more."""
    points = sorted(points, key=lambda point: point.tokens)
    if len(points) != 3:
        return False
    curve = _Curve(tuple(point.tokens for point in points), tokens, False)
    calls = zip(*(point.trace.calls for point in points), strict=True)
    works = ([call[s] for call in same] for same in calls for s in _names(same) if all(s in call for call in same))
    for same in works:
        for name in _PEAKS:
            values = [getattr(work, name) for work in same]
            if curve.peak(values) > (1 + _BEND_SHARE) * curve.line(values):
                return True
    return False


def _up(value: Fraction) -> int:
    return -int(-value // 1)


def _names(same: Sequence[dict[str, Work]]) -> list[str]:
    return list(dict.fromkeys(name for call in same for name in call))


@dataclass(frozen=True, slots=True)
class _Curve:
    lengths: tuple[int, ...]
    """At least two, ascending."""
    tokens: int
    counts_launches: bool

    def line(self, values: Sequence[int]) -> Fraction:
        """On the line through the last two points."""
        (x, y), (a, b) = self.lengths[-2:], values[-2:]
        return b + Fraction(b - a, y - x) * (self.tokens - y)

    def square(self, values: Sequence[int]) -> Fraction:
        """The coefficient of tokens². Zero if the values lie on a line, or bend downwards."""
        return max(Fraction(0), self._signed_square(values))

    def _signed_square(self, values: Sequence[int], end: int = 0) -> Fraction:
        """Of the last three points, or of the three before the `end` last ones."""
        lengths = self.lengths[: len(self.lengths) + end]
        if len(lengths) < 3:
            return Fraction(0)
        (x, y, z), (a, b, c) = lengths[-3:], values[-3:]
        return (Fraction(c - b, z - y) - Fraction(b - a, y - x)) / (z - x)

    def peak(self, values: Sequence[int]) -> int:
        return max(0, _up(self.line(values) + self.square(values) * self._beyond))

    def sum(self, values: Sequence[int]) -> int:
        """Of sizes of tensors, or of frees."""
        square = self._signed_square(values)
        is_exact = len(values) < 4 or square == self._signed_square(values[:-1], -1)
        return _up(self.line(values) + (square if is_exact else max(Fraction(0), square)) * self._beyond)

    def size(self, values: Sequence[int]) -> int:
        return max(0, self.sum(values))

    @property
    def _beyond(self) -> int:
        return (self.tokens - self.lengths[-1]) * (self.tokens - self.lengths[-2])

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


def _work(curve: _Curve, works: Sequence[Work], held: Fraction) -> Work:
    def values(name: str) -> list[Any]:
        return [getattr(work, name) for work in works]

    fields: dict[str, Any] = {name: curve.seconds(values(name)) for name in _SECONDS}
    fields |= {name: curve.size(values(name)) for name in _SIZES}
    fields |= {name: curve.sum(values(name)) for name in _CHANGES}
    fields |= {name: curve.peak(values(name)) + _hidden(curve, values(name), held) for name in _PEAKS}
    for name, syncs in _LAUNCH_SECONDS:
        fields[syncs] = any(values(syncs))
        fields[name] = curve.launch_seconds(values(name), syncs_host=all(values(syncs)))
    return replace(works[-1], **fields)


def _hidden(curve: _Curve, values: Sequence[int], held: Fraction) -> int:
    """What a peak needs more if a moment with squares of tokens becomes the peak beyond the measured lengths."""
    if curve.square(values) * 2 >= held:
        return 0
    squares = curve.tokens**2 - curve.lengths[-1] ** 2
    return _up((HIDDEN_SHARE * held - curve.square(values)) * squares)


def _squares_held(curve: _Curve, traces: Sequence[ModelTrace]) -> list[Fraction]:
    """By call: bytes per tokens² of what it saves or holds."""
    found = [Fraction(0)] * len(traces[0].calls)
    for number, same in enumerate(zip(*(trace.calls for trace in traces), strict=True)):
        for s in _names(same):
            works = [call.get(s) or call["keep"] for call in same]
            for name in ("forward_delta_bytes", "sent_bytes"):
                found[number] = max(found[number], curve.square([getattr(work, name) for work in works]))
    for tensors in zip(*(trace.shared for trace in traces), strict=True):
        square = curve.square([tensor.num_bytes for tensor in tensors])
        for call in {call for tensor in tensors for call, _ in (*tensor.held_by, *tensor.sent_by)}:
            if 0 <= call < len(found):
                found[call] = max(found[call], square)
    return found


def _shared(curve: _Curve, tensors: Sequence[SharedTensor]) -> SharedTensor:
    """A tensor counts as freed where it is freed at all lengths."""
    last = tensors[-1]
    freed = [tensor.freed_in for tensor in tensors]
    early = [tensor.freed_early_in for tensor in tensors]
    return replace(
        last,
        num_bytes=curve.size([tensor.num_bytes for tensor in tensors]),
        freed_in=-1 if min(freed) < 0 else max(freed),
        freed_early_in=tuple(x for x in last.freed_early_in if all(x in one for one in early)),
    )
