"""Timing of a few early training steps: they are compared with the plan lane by lane, and the rates they show are saved
for later plans.

Nothing waits for the timing. The lanes record their times, which are read one or more steps later, when the device has
finished the steps.
Only steps that did exactly what the plan says are used. After an evaluation, another number of micro-batches, a second
engine on the same device or a save, later steps are timed instead. A timeline that a user records takes precedence.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outsize.base.log import log
from outsize.base.units import show_bytes, show_seconds
from outsize.calibration.rates import CALIBRATED_RATES, save_step_rates
from outsize.device.device import Device
from outsize.device.timeline import Span, Timeline
from outsize.hardware.lanes import LANES, lane_words
from outsize.schedule.actions import TYPES, Kind, action_seconds, parse_action
from outsize.schedule.placement import Placement
from outsize.schedule.plan import Plan
from outsize.schedule.render import extrapolation
from outsize.schedule.schedule import Schedule

WARM_UP_STEPS = 2
"""Steps after idle lanes that differ from those that follow: the first is guarded and has no updates to overlap with,
the second starts after such a step.
"""
TIMED_STEPS = 2
LAST_STEP = 20
"""After this step, a run is not timed any more."""
MIN_BUSY_SHARE = 0.05
"""Share of the step that a lane must be busy for its rate to be saved."""
_MARK = "step"
"""Name of an empty action at the end of a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTiming:
    """The mean time of the timed steps."""

    first: int
    last: int
    """Numbers of the first and the last timed step."""
    step_seconds: float
    busy_seconds: dict[str, float]
    """By lane, per step. Without `compute` under a plan whose block calls are not seen (Placement.is_plain)."""

    def compared_with(self, plan: Plan) -> str:
        """One log line. Lanes without work are left out."""
        planned = plan.estimate
        lanes = [
            f"{lane_words(lane)} {_difference(self.busy_seconds[lane], planned.busy_seconds[lane])}"
            for lane in LANES
            if lane in self.busy_seconds and planned.busy_seconds.get(lane)
        ]
        whole = f"{show_seconds(self.step_seconds)} each, planned {show_seconds(planned.step_seconds)}"
        return f"steps {self.first}-{self.last}: {whole} ({_difference(self.step_seconds, planned.step_seconds)})" + (
            f"; {', '.join(lanes)}" if lanes else ""
        )


def _difference(found: float, planned: float) -> str:
    return f"{round(100 * (found / planned - 1)):+d} %" if planned else "not planned"


class StepCalibration:
    """Times early steps under one plan. The engine reports every step issued and every time the lanes become idle."""

    def __init__(self, plan: Plan, place: Placement, schedule: Schedule, device: Device, *, sees_calls: bool):
        self.timing: StepTiming | None = None
        self._plan, self._place, self._sees_calls, self._device = plan, place, sees_calls, device
        self._planned = Counter(_planned_actions(place, schedule, sees_calls=sees_calls) * TIMED_STEPS)
        self._num_steps = 0
        self._warm = 0
        """Steps since the lanes were last idle."""
        self._timeline: Timeline | None = None
        """Open while steps are timed, then kept until it is read."""
        self._stop: Callable[[], object] = lambda: None
        """Ends the recording, also when the engine is garbage-collected."""
        self._last = 0

    def step_made(self, number: int) -> None:
        """The engine's `number`-th step was issued. Never waits."""
        self._num_steps += 1
        self._warm += 1
        if self._num_steps == 1 and self._plan.extrapolated_from:
            self._compare_peak()
        if self._timeline is not None and self._timeline.is_open:
            self._mark()
            if self._warm == WARM_UP_STEPS + TIMED_STEPS:
                self._stop()
                self._last = number
        self.poll()
        if self.timing is None and self._timeline is None and self._num_steps < LAST_STEP:
            self._start()

    def _compare_peak(self) -> None:
        """Compare the memory of the first step with an extrapolated plan. Its time is compared with that of the timed
        steps, as for every plan."""
        found, planned = self._device.peak_bytes, self._plan.estimate.gpu_bytes
        level = logging.WARNING if found > planned else logging.INFO
        words = f"first step: GPU peak {show_bytes(found)}, planned {show_bytes(planned)}"
        log.log(level, "%s (%s), %s", words, _difference(found, planned), extrapolation(self._plan))

    def _start(self) -> None:
        if self._warm < WARM_UP_STEPS or (timeline := self._device.start_timeline()) is None:
            return
        self._warm = WARM_UP_STEPS
        stop = weakref.finalize(self, self._device.stop_timeline, timeline)
        stop.atexit = False
        self._timeline, self._stop = timeline, stop
        self._mark()

    def _mark(self) -> None:
        self._device.submit("compute", lambda: None, waits=(), reads=(), writes=(), seconds=0.0, name=_MARK)

    def reset(self) -> None:
        """The lanes became idle, or a forward without a step came between: the current step is not representative."""
        self.poll()
        self._stop()
        self._timeline = None
        self._warm = 0

    def end(self) -> None:
        """The plan ends here, and the lanes are idle."""
        self._stop()
        self.poll()
        self._timeline = None

    def poll(self) -> None:
        """Read the timed steps if the device has finished them. Never waits."""
        if self._timeline is None or self._timeline.is_open or not self._timeline.collect():
            return
        spans, self._timeline = self._timeline.spans, None
        marks = [span.end for span in spans if span.name == _MARK]
        spans = [span for span in spans if span.name != _MARK]
        if len(marks) != TIMED_STEPS + 1 or Counter(span.name for span in spans) != self._planned:
            self._warm = 0
            return
        seconds = marks[-1] - marks[0]
        busy = {
            str(lane): sum(span.end - span.start for span in spans if span.lane == lane) / TIMED_STEPS for lane in LANES
        }
        if not self._sees_calls:
            del busy["compute"]
        self.timing = StepTiming(
            first=self._last - TIMED_STEPS + 1, last=self._last, step_seconds=seconds / TIMED_STEPS, busy_seconds=busy
        )
        log.info("%s", self.timing.compared_with(self._plan))
        if self._device.saves_calibration:
            save_step_rates(self._rates(spans, seconds), self._device.identity, self._device.spec)

    def _rates(self, spans: Iterable[Span], seconds: float) -> dict[str, float]:
        """The rates with which the plan's arithmetic gives the measured busy seconds, for lanes with enough work."""
        spec = self._device.spec
        rates = {}
        for lane, rate in CALIBRATED_RATES.items():
            own = [s for s in spans if s.lane == lane and TYPES[parse_action(s.name).kind].operand == "chunk"]
            # The fixed cost of an action does not depend on the rate.
            took = sum(span.end - span.start - spec.launch_seconds for span in own)
            planned = sum(
                action_seconds(self._place, parse_action(span.name), spec, lane) - spec.launch_seconds for span in own
            )
            if took >= MIN_BUSY_SHARE * seconds:
                rates[rate] = getattr(spec, rate) * planned / took
        return rates


def _planned_actions(place: Placement, schedule: Schedule, *, sees_calls: bool) -> list[str]:
    """The actions of one step that appear on a timeline."""
    segments = schedule.step(place.step_config.accumulate, place.step_config.update == "in_backward")
    actions = [action for segment in segments for action in segment.actions]
    return [str(action) for action in actions if sees_calls or action.kind == Kind.UPDATE]
