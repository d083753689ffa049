"""Calibration: a few early steps are timed and held against the plan, lane by lane; what they show of the machine is
for later plans.

Nobody asks for it and nothing waits for it: the lanes record their times as they go, and these are read one or more
steps later, when they are there. Only steps that did what the plan counts with say something about it. An evaluation in
between, another number of micro-batches, a second engine on the same device or a save: then the next steps are timed.
Whoever records a timeline of their own goes before.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outsize.base.log import log
from outsize.base.units import show_seconds
from outsize.device.device import Device
from outsize.device.timeline import Span, Timeline
from outsize.hardware.lanes import LANES, Lane
from outsize.plan.actions import TYPES, Kind, action_seconds, parse_action
from outsize.plan.plan import Plan
from outsize.runtime.executor import Executor

WARM_UP = 2
"""Steps from a standstill until one is like all that follow: the first is guarded and has no updates to overlap with,
the second starts after such a step.
"""
WATCHED = 2
GIVE_UP = 20
"""Steps after which a run that never does what its plan says is left alone."""
LEAST_SHARE = 0.05
"""Of a step, that a lane must work for its rate to be learnt."""
LANE_WORDS: dict[Lane, str] = {"compute": "compute", "h2d": "copies in", "d2h": "copies out", "host": "host updates"}
_MARK = "step"
"""An action that does nothing, at the end of a step."""
_RATES: dict[Lane, str] = {
    "h2d": "h2d_bytes_per_second",
    "d2h": "d2h_bytes_per_second",
    "host": "host_adam_params_per_second",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTiming:
    """What a few steps took, in the mean."""

    first: int
    last: int
    """Steps, counted as the engine counts them."""
    step_seconds: float
    busy_seconds: dict[str, float]
    """Per lane and step. Without `compute` under a plan that has nobody tell of calls (Placement.is_plain)."""

    def beside(self, plan: Plan) -> str:
        """One line for the log. Lanes that do nothing are left out."""
        planned = plan.estimate
        lanes = [
            f"{LANE_WORDS[lane]} {_difference(self.busy_seconds[lane], planned.busy_seconds[lane])}"
            for lane in LANES
            if lane in self.busy_seconds and planned.busy_seconds.get(lane)
        ]
        whole = f"{show_seconds(self.step_seconds)} each, planned {show_seconds(planned.step_seconds)}"
        return f"steps {self.first}-{self.last}: {whole} ({_difference(self.step_seconds, planned.step_seconds)})" + (
            f"; {', '.join(lanes)}" if lanes else ""
        )


def _difference(found: float, planned: float) -> str:
    return f"{round(100 * (found / planned - 1)):+d} %" if planned else "not planned"


class Calibration:
    """Of one plan. The engine tells it of every step that was issued, and of every time the lanes ran empty."""

    def __init__(self, plan: Plan, executor: Executor, device: Device):
        self.timing: StepTiming | None = None
        # Not the executor itself: its tensors must go when the engine lets go of them.
        self._plan, self._place, self._sees_calls, self._device = plan, executor.place, executor.sees_calls, device
        self._planned = Counter(_planned_actions(executor) * WATCHED)
        self._num_steps = 0
        self._warm = 0
        """Steps since the lanes were last empty."""
        self._timeline: Timeline | None = None
        """Open while steps are timed; after that until it is read."""
        self._stop: Callable[[], object] = lambda: None
        """Ends the recording, also when the engine is dropped without a word."""
        self._last = 0

    def step_made(self, number: int) -> None:
        """A step was issued, the engine's `number`-th. Never waits."""
        self._num_steps += 1
        self._warm += 1
        if self._timeline is not None and self._timeline.is_open:
            self._mark()
            if self._warm == WARM_UP + WATCHED:
                self._stop()
                self._last = number
        self.poll()
        if self.timing is None and self._timeline is None and self._num_steps < GIVE_UP:
            self._start()

    def _start(self) -> None:
        if self._warm < WARM_UP or (timeline := self._device.start_timeline()) is None:
            return
        self._warm = WARM_UP
        stop = weakref.finalize(self, self._device.stop_timeline, timeline)
        stop.atexit = False
        self._timeline, self._stop = timeline, stop
        self._mark()

    def _mark(self) -> None:
        self._device.submit("compute", lambda: None, waits=(), reads=(), writes=(), seconds=0.0, name=_MARK)

    def reset(self) -> None:
        """The lanes ran empty, or a forward without a step came between: a step that this happened in is not like
        others.
        """
        self.poll()
        self._stop()
        self._timeline = None
        self._warm = 0

    def end(self) -> None:
        """Nothing more will come under this plan, and the lanes are empty."""
        self._stop()
        self.poll()
        self._timeline = None

    def poll(self) -> None:
        """Read what was timing, if the device is done with it. Never waits."""
        if self._timeline is None or self._timeline.is_open or not self._timeline.collect():
            return
        spans, self._timeline = self._timeline.spans, None
        marks = [span.end for span in spans if span.name == _MARK]
        spans = [span for span in spans if span.name != _MARK]
        if len(marks) != WATCHED + 1 or Counter(span.name for span in spans) != self._planned:
            self._warm = 0
            return
        seconds = marks[-1] - marks[0]
        busy = {
            str(lane): sum(span.end - span.start for span in spans if span.lane == lane) / WATCHED for lane in LANES
        }
        if not self._sees_calls:
            del busy["compute"]
        self.timing = StepTiming(
            first=self._last - WATCHED + 1, last=self._last, step_seconds=seconds / WATCHED, busy_seconds=busy
        )
        log.info("%s", self.timing.beside(self._plan))
        self._device.save_rates(self._rates(spans, seconds))

    def _rates(self, spans: Iterable[Span], seconds: float) -> dict[str, float]:
        """The rates with which the plan's arithmetic gives the seconds that lanes really worked, of lanes that worked
        enough to say.
        """
        spec = self._device.spec
        rates = {}
        for lane, rate in _RATES.items():
            # Activations are as large as the batch, which may be smaller than planned.
            own = [s for s in spans if s.lane == lane and TYPES[parse_action(s.name).kind].operand == "chunk"]
            # Beyond the fixed cost of each, which is no matter of the rate.
            took = sum(span.end - span.start - spec.launch_seconds for span in own)
            planned = sum(
                action_seconds(self._place, parse_action(span.name), spec, lane) - spec.launch_seconds for span in own
            )
            if took >= LEAST_SHARE * seconds:
                rates[rate] = getattr(spec, rate) * planned / took
        return rates


def _planned_actions(executor: Executor) -> list[str]:
    """What one step issues, as far as the device sees it."""
    step_config = executor.place.step_config
    segments = executor.schedule.step(step_config.accumulate, step_config.update == "in_backward")
    actions = [action for segment in segments for action in segment.actions]
    return [str(action) for action in actions if executor.sees_calls or action.kind == Kind.UPDATE]
