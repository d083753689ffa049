"""The time of a plan: its schedule walked over the lanes of a machine, with numbers in place of tensors.

`Walk` is the plain form: hazards say what an action waits for, the clock says when it ends. The runtime on the `sim` device does the
same with its own hazards and clock, so both give the same seconds. `step_seconds` is the same walk for the search, which needs
thousands of actions in milliseconds: a wait that follows from other waits cannot move a start, so it keeps the time of the
last write and the last use of every buffer and derives no minimal waits. Both give equal floats; a test holds them to it.

[Note: The thread that issues]
Lanes work on what they have been told. One thread tells all of them: it runs the model's Python, and where a layer is small that takes longer than its
computing. So it has a clock too, which each action moves by what issuing it takes (longer while the host updates: the cores are shared), and no action starts
before its turn. It runs ahead of the device as far as it can, until a visit has it wait: most transformers' decoders look at their position ids. What issuing
takes is measured by the trial run on a GPU; without one it counts as nothing, on `sim` too.
"""

from collections.abc import Iterable

from outsize.hardware.lanes import LANES, LaneClock
from outsize.hardware.spec import HardwareSpec
from outsize.plan.hazards import Hazards, Token
from outsize.plan.placement import Buffer, Placement
from outsize.plan.plan import Estimate
from outsize.plan.schedule import Action, Effect, Schedule, action_seconds, effect, issuing
from outsize.planner.memory import high_water

STEPS = 3
"""The first step has no updates to overlap with, the second starts after such a step; the third is like all that follow."""

_Op = tuple[int, tuple[int, ...], tuple[int, ...], float, float, bool]
"""Lane, buffers read, buffers written (all by number), seconds; seconds to issue, and whether the issuing thread waits."""
_COMPUTE, _HOST = LANES.index("compute"), LANES.index("host")


class Walk:
    """Actions one by one: `run` says when each ends."""

    def __init__(self, place: Placement, spec: HardwareSpec):
        self.place, self.spec = place, spec
        self.clock = LaneClock()
        self.ends: dict[Token, float] = {}
        self._hazards = Hazards()
        self._known: dict[tuple[Action, bool], tuple[Effect, float, float, bool]] = {}

    def run(self, action: Action, *, update_in_backward: bool = False) -> float:
        """Issue an action; returns when it ends. `update_in_backward`: it stands in a backward segment that updates."""
        key = (action, update_in_backward)
        if key not in self._known:
            touched = effect(self.place, action, update_in_backward=update_in_backward)
            self._known[key] = touched, action_seconds(self.place, action, self.spec, touched.lane), *issuing(self.place, action, self.spec)
        (lane, reads, writes), seconds, issue, thread_waits = self._known[key]
        if thread_waits:
            self.clock.wait()
        if self.clock.issued < self.clock.free["host"]:
            issue *= self.spec.busy_issue
        waits = self._hazards.before(lane, reads, writes)
        end = self.clock.run(lane, seconds, [self.ends[token] for token in waits], issue=issue)
        self.ends[self._hazards.after(lane, reads, writes)] = end
        return end

    def run_step(self, schedule: Schedule) -> float:
        """Issue one optimizer step; returns when its last backward ends. Updates may still run then, under the next forward."""
        in_backward = self.place.terms.update == "in_backward"
        last = 0.0
        for name, actions in schedule.step(self.place.terms.accumulate, in_backward):
            for action in actions:
                end = self.run(action, update_in_backward=in_backward and name == "backward")
                if action.kind == "B":
                    last = end
        return last


def simulate(place: Placement, schedule: Schedule, spec: HardwareSpec, *, held_bytes: int) -> Estimate:
    """Time and both high-waters of a schedule."""
    seconds, busy = step_seconds(place, schedule, spec)
    peak = high_water(place, schedule, held_bytes)
    gpu_parts = place.parts(place.gpu)
    if place.graph.buffer_bytes:
        gpu_parts["buffers"] = place.graph.buffer_bytes
    return Estimate(
        step_seconds=seconds, gpu_bytes=peak.gpu_bytes, host_bytes=place.host_bytes, gpu_parts=gpu_parts, host_parts=place.parts(place.host),
        busy_seconds=busy, peak_at=peak.peak_at,
    )  # fmt: skip


def step_seconds(place: Placement, schedule: Schedule, spec: HardwareSpec) -> tuple[float, dict[str, float]]:
    """Seconds from the end of one step's last backward to that of the next, and how long each lane works in that time."""
    segments, num_buffers = _compile(place, schedule, spec)
    wrote = [0.0] * num_buffers
    used = [0.0] * num_buffers  # last read or write
    free = [0.0] * len(LANES)
    issued, busy_issue = 0.0, spec.busy_issue
    ends = [0.0]
    for _ in range(STEPS):
        last = 0.0
        busy = [0.0] * len(LANES)
        for ops, last_backward in segments:
            for number, (lane, reads, writes, seconds, issue, thread_waits) in enumerate(ops):
                if thread_waits and free[_COMPUTE] > issued:
                    issued = free[_COMPUTE]
                end = free[lane]
                if issued > end:
                    end = issued
                for buffer in reads:
                    if wrote[buffer] > end:
                        end = wrote[buffer]
                for buffer in writes:
                    if used[buffer] > end:
                        end = used[buffer]
                issued += issue * busy_issue if issued < free[_HOST] else issue
                if issued > end + seconds:
                    busy[lane] += issued - end
                    end = issued
                else:
                    busy[lane] += seconds
                    end += seconds
                free[lane] = end
                for buffer in reads:
                    if end > used[buffer]:
                        used[buffer] = end
                for buffer in writes:
                    wrote[buffer] = used[buffer] = end
                if number == last_backward:
                    last = end
        ends.append(last)
    return ends[-1] - ends[-2], {str(lane): seconds for lane, seconds in zip(LANES, busy, strict=True)}


def _compile(place: Placement, schedule: Schedule, spec: HardwareSpec) -> tuple[list[tuple[list[_Op], int]], int]:
    """Per segment of a step: its actions as numbers, and which of them is the last backward (-1: none)."""
    in_backward = place.terms.update == "in_backward"
    number: dict[Buffer, int] = {}
    known: dict[bool, dict[Action, _Op]] = {False: {}, True: {}}

    def numbers(buffers: Iterable[Buffer]) -> tuple[int, ...]:
        return tuple([number.setdefault(buffer, len(number)) for buffer in buffers])

    segments = []
    for name, actions in schedule.step(place.terms.accumulate, in_backward):
        updates = in_backward and name == "backward"
        table = known[updates]
        ops = []
        last_backward = -1
        for i, action in enumerate(actions):
            op = table.get(action)
            if op is None:
                lane, reads, writes = effect(place, action, update_in_backward=updates)
                costs = action_seconds(place, action, spec, lane), *issuing(place, action, spec)
                op = table[action] = (LANES.index(lane), numbers(reads), numbers(writes), *costs)
            ops.append(op)
            if action.kind == "B":
                last_backward = i
        segments.append((ops, last_backward))
    return segments, len(number)
