"""Simulator: predicts the time of a plan by running its schedule over the lanes of a machine.

`Walk` is the simple form: hazards give the actions that an action waits for, the clock gives its end. The runtime on
the `sim` device does the same with its own hazards and clock, so both give the same seconds.

`step_seconds` is the fast form for the search, which needs thousands of actions in milliseconds. It keeps the time of
the last write and the last use of every buffer and does not derive minimal waits: a wait that follows from other waits
cannot change a start. Both forms give equal floats, which a test checks.

Launch times are measured by the profiling run on a GPU, or estimated for another machine. The launching thread then has
a clock too: see [Note: The launching thread] in hardware/lanes.py. Without launch times, and on `sim`, launching takes
no time.
"""

from collections.abc import Iterable, Iterator

from outsize.hardware.lanes import LANES, LEAD_SECONDS, LaneClock, LaunchClock, slowed
from outsize.hardware.spec import HardwareSpec
from outsize.planner.memory import high_water
from outsize.schedule.actions import Action, Effect, Kind, action_seconds, effect, launch
from outsize.schedule.buffers import Buffer
from outsize.schedule.hazards import Hazards, Token
from outsize.schedule.placement import Placement
from outsize.schedule.plan import Estimate
from outsize.schedule.schedule import Schedule

STEPS = 3
"""The first step has no updates to overlap with, and the second follows such a step. The third is like all later ones.
"""

_Op = tuple[int, tuple[int, ...], tuple[int, ...], float, float, bool]
"""Lane, buffers read, buffers written (all by number), seconds; seconds to launch, and whether the launching thread
waits.
"""
_COMPUTE, _HOST = LANES.index("compute"), LANES.index("host")


class Walk:
    """Simulates actions one by one; `run` returns when each ends."""

    def __init__(self, place: Placement, spec: HardwareSpec):
        self.place, self.spec = place, spec
        self.clock = LaunchClock(spec.launch_slowdown) if place.has_launch_times else LaneClock()
        self.ends: dict[Token, float] = {}
        self._visible_at: dict[Token, float] = {}
        self._hazards = Hazards()
        self._known: dict[tuple[Action, bool], tuple[Effect, float, float, bool]] = {}

    def run(self, action: Action, *, update_in_backward: bool = False) -> float:
        """Issue an action; returns when it ends. `update_in_backward`: it is in a backward segment that updates."""
        key = (action, update_in_backward)
        if key not in self._known:
            touched = effect(self.place, action, update_in_backward=update_in_backward)
            self._known[key] = (
                touched,
                action_seconds(self.place, action, self.spec, touched.lane),
                *launch(self.place, action, self.spec),
            )
        (lane, reads, writes), seconds, launch_seconds, thread_waits = self._known[key]
        after = [(self.ends[token], self._visible_at[token]) for token in self._hazards.before(lane, reads, writes)]
        end = self.clock.issue(lane, seconds, after, launch_seconds, waits=thread_waits)
        token = self._hazards.after(lane, reads, writes)
        self.ends[token], self._visible_at[token] = end, self.clock.visible_at
        return end

    def segments(self, schedule: Schedule) -> Iterator[tuple[Action, bool]]:
        """The actions of one optimizer step, each with whether it belongs to a backward that updates. Run each before
        the next is taken.
        """
        in_backward = self.place.step_config.update == "in_backward"
        for segment in schedule.step(self.place.step_config.accumulate, in_backward):
            if segment.name == "update":
                self.clock.wait()
            for action in segment.actions:
                yield action, segment.updates_in_backward

    def run_step(self, schedule: Schedule) -> float:
        """Issue one optimizer step; returns when its last backward ends. Updates may still run then and overlap with
        the next forward.
        """
        last = 0.0
        for action, updates in self.segments(schedule):
            end = self.run(action, update_in_backward=updates)
            if action.kind == Kind.BACKWARD:
                last = end
        return last


def simulate(place: Placement, schedule: Schedule, spec: HardwareSpec, *, held_bytes: int) -> Estimate:
    """Predicted time, GPU memory peak and host memory of a schedule."""
    seconds, busy, starved = step_seconds(place, schedule, spec)
    peak = high_water(place, schedule, held_bytes)
    gpu_parts = place.parts(place.gpu)
    if place.graph.buffer_bytes:
        gpu_parts["buffers"] = place.graph.buffer_bytes
    return Estimate(
        step_seconds=seconds,
        gpu_bytes=peak.gpu_bytes,
        host_bytes=place.host_bytes,
        gpu_parts=gpu_parts,
        host_parts=place.parts(place.host),
        busy_seconds=busy,
        peak_at=peak.peak_at,
        launch_bound_seconds=starved,
    )


def step_seconds(place: Placement, schedule: Schedule, spec: HardwareSpec) -> tuple[float, dict[str, float], float]:
    """Seconds from the end of one step's last backward to that of the next, the busy seconds of each lane in that time,
    and the launch-bound part of compute."""
    segments, num_buffers = _compile(place, schedule, spec)
    has_thread, launch_slowdown = place.has_launch_times, spec.launch_slowdown
    wrote = [0.0] * num_buffers
    used = [0.0] * num_buffers  # last read or write
    visible_written, visible_used = [0.0] * num_buffers, [0.0] * num_buffers
    free, held = [0.0] * len(LANES), [0.0] * len(LANES)
    issued = visible_at = 0.0
    ends = [0.0]
    for _ in range(STEPS):
        last = starved = 0.0
        busy = [0.0] * len(LANES)
        for ops, last_backward, is_update in segments:
            if has_thread and is_update:
                issued = max(issued, free[_COMPUTE])
            for number, (lane, reads, writes, seconds, launch_seconds, thread_waits) in enumerate(ops):
                start = free[lane]
                for buffer in reads:
                    if wrote[buffer] > start:
                        start = wrote[buffer]
                for buffer in writes:
                    if used[buffer] > start:
                        start = used[buffer]
                if has_thread:
                    visible_at = 0.0
                    if held[_HOST] > issued:  # otherwise all host work ends before the launch
                        for buffer in reads:
                            if visible_written[buffer] > visible_at:
                                visible_at = visible_written[buffer]
                        for buffer in writes:
                            if visible_used[buffer] > visible_at:
                                visible_at = visible_used[buffer]
                        if lane == _COMPUTE and visible_at > issued:
                            issued = visible_at
                    if issued > start:
                        start = issued
                    if thread_waits:
                        issued = start
                    elif lane == _COMPUTE and start - LEAD_SECONDS > issued:
                        issued = start - LEAD_SECONDS
                    issued += (
                        slowed(launch_seconds, seconds if thread_waits else 0.0, free[_HOST] - issued, launch_slowdown)
                        if free[_HOST] > issued
                        else launch_seconds
                    )
                    if issued - start > seconds:
                        if lane == _COMPUTE:
                            starved += issued - start - seconds
                        seconds = issued - start
                    if lane != _COMPUTE:
                        held[lane] = start + seconds if lane == _HOST else max(held[lane], visible_at)
                    visible_at = held[lane]
                end = start + seconds
                free[lane] = end
                busy[lane] += seconds
                for buffer in reads:
                    if end > used[buffer]:
                        used[buffer] = end
                    if visible_at > visible_used[buffer]:
                        visible_used[buffer] = visible_at
                for buffer in writes:
                    wrote[buffer] = used[buffer] = end
                    visible_written[buffer] = visible_used[buffer] = visible_at
                if number == last_backward:
                    last = end
        ends.append(last)
    return ends[-1] - ends[-2], {str(lane): seconds for lane, seconds in zip(LANES, busy, strict=True)}, starved


def _compile(place: Placement, schedule: Schedule, spec: HardwareSpec) -> tuple[list[tuple[list[_Op], int, bool]], int]:
    """By segment of a step: its actions as numbers, which of them is the last backward (-1: none), and whether it is
    the update.
    """
    in_backward = place.step_config.update == "in_backward"
    number: dict[Buffer, int] = {}
    known: dict[bool, dict[Action, _Op]] = {False: {}, True: {}}

    def numbers(buffers: Iterable[Buffer]) -> tuple[int, ...]:
        return tuple([number.setdefault(buffer, len(number)) for buffer in buffers])

    segments = []
    for segment in schedule.step(place.step_config.accumulate, in_backward):
        updates = segment.updates_in_backward
        table = known[updates]
        ops = []
        last_backward = -1
        for i, action in enumerate(segment.actions):
            op = table.get(action)
            if op is None:
                lane, reads, writes = effect(place, action, update_in_backward=updates)
                costs = action_seconds(place, action, spec, lane), *launch(place, action, spec)
                op = table[action] = (LANES.index(lane), numbers(reads), numbers(writes), *costs)
            ops.append(op)
            if action.kind == Kind.BACKWARD:
                last_backward = i
        segments.append((ops, last_backward, segment.name == "update"))
    return segments, len(number)
