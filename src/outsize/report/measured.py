"""What a run did, cut to the step that a prediction is of: from the end of one step's last backward to that of the
next.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outsize.hardware.lanes import LANES
from outsize.report.step import Phase, StepSpan, phases_of
from outsize.report.trace import Span


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    step_seconds: float
    """Of steps that nobody recorded: recording costs a little."""
    gpu_bytes: int | None
    """High-water; None where nobody counted."""
    spans: Sequence[Span]
    """Of a few whole steps and nothing else; empty where nothing was recorded."""
    where: str
    """On what, in words."""
    tokens_per_second: float | None = None
    """Over the whole window that was timed, its first and last step included, as `outsize bench` prints it; None where
    nobody timed one.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    seconds: float
    spans: tuple[StepSpan, ...]
    phases: tuple[Phase, ...]
    busy_seconds: dict[str, float]
    """Per lane and step, in the mean of the recording."""


def last_step(spans: Sequence[Span], accumulate: int) -> MeasuredStep | None:
    """The last whole step of a recording; None if there is none."""
    backward = [span for span in spans if span.lane == "compute" and span.name.startswith("B")]
    if not backward:
        return None
    last_call = min((span.name for span in backward), key=lambda name: int(name[1:]))
    ends = sorted(span.end for span in backward if span.name == last_call)[accumulate - 1 :: accumulate]
    if len(ends) < 2:
        return None
    begin, end = ends[-2:]
    seconds = end - begin
    found = []
    for span in spans:
        if span.name and span.end > begin and span.start < end:
            # Whose step a span is of is not recorded; forward and backward lie between the two ends, since nothing else
            # computes there.
            found.append(StepSpan(span.lane, span.name, span.start - begin, span.end - begin, 0))
    found.sort(key=lambda span: (span.lane, span.start, span.end))
    computed = [span for span in found if span.lane == "compute"]
    # Over all steps of the recording: at its ends no step has both neighbours.
    busy = {str(lane): sum(span.end - span.start for span in spans if span.lane == lane) / len(ends) for lane in LANES}
    return MeasuredStep(
        seconds=seconds, spans=tuple(found), phases=tuple(phases_of(computed, seconds)), busy_seconds=busy
    )
