"""A measured step, delimited as a predicted one: from the end of one last backward to the end of the next."""

from collections.abc import Sequence
from dataclasses import dataclass

from outsize.hardware.lanes import LANES
from outsize.report.step import PassSpan, StepSpan, phases_of
from outsize.report.trace import Span
from outsize.schedule.actions import Kind, parse_action


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    step_seconds: float
    """Measured in steps without a recording, since recording takes a little time."""
    gpu_bytes: int | None
    """The peak; None if it was not measured."""
    spans: Sequence[Span]
    """Spans of a few whole steps; empty without a recording."""
    where: str
    """The device, for readers."""
    tokens_per_second: float | None = None
    """Over the whole timed window. None if none was timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    seconds: float
    spans: tuple[StepSpan, ...]
    phases: tuple[PassSpan, ...]
    busy_seconds: dict[str, float]
    """By lane: the mean per step."""


def last_step(spans: Sequence[Span], accumulate: int) -> MeasuredStep | None:
    """The last whole step of a recording; None if there is none."""
    actions = [(parse_action(span.name), span.end) for span in spans if span.lane == "compute" and span.name]
    backward = [(action.index, end) for action, end in actions if action.kind == Kind.BACKWARD]
    last_call = min((call for call, _ in backward), default=0)
    ends = sorted(end for call, end in backward if call == last_call)[accumulate - 1 :: accumulate]
    if len(ends) < 2:
        return None
    begin, end = ends[-2:]
    seconds = end - begin
    found = []
    for span in spans:
        if span.name and span.end > begin and span.start < end:
            # The recording does not number steps. Between the two ends, only this step computes.
            found.append(StepSpan(span.lane, span.name, span.start - begin, span.end - begin, 0))
    found.sort(key=lambda span: (span.lane, span.start, span.end))
    computed = [span for span in found if span.lane == "compute"]
    # Over all steps of the recording: lanes overlap with neighbouring steps.
    busy = {str(lane): sum(span.end - span.start for span in spans if span.lane == lane) / len(ends) for lane in LANES}
    return MeasuredStep(
        seconds=seconds, spans=tuple(found), phases=tuple(phases_of(computed, seconds)), busy_seconds=busy
    )
