"""One steady-state step of a plan: the actions of each lane, and device memory over time.

It is the third simulated step, as in planner/simulate.py, from the end of the previous step's last backward to the end
of its own, which is `Estimate.step_seconds`. Updates of the previous step may still run at its start, and its own run
under the next forward. `StepSpan.step` distinguishes them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from outsize.base.units import show_bytes
from outsize.hardware.lanes import Lane
from outsize.hardware.spec import HardwareSpec
from outsize.layout.chunks import ChunkLayout
from outsize.model.graph import BlockGraph
from outsize.planner.memory import ledger
from outsize.planner.simulate import STEPS, Walk
from outsize.schedule.actions import TYPES, Kind, effect, parse_action
from outsize.schedule.placement import Placement
from outsize.schedule.plan import Plan
from outsize.schedule.schedule import Schedule, compile_schedule

KINDS = ("weights", "slots", "optimizer", "constants", "gradients", "returned", "other")
"""Groups of memory that is allocated for the whole run. Activations and transients are on top of it."""


class StepSpan(NamedTuple):
    """One action on its lane. Waiting is not part of it."""

    lane: Lane
    name: str
    start: float
    """Seconds since the step began; negative if the action began earlier."""
    end: float
    step: int
    """0: this step; -1: the previous one; 1: the next."""


class Moment(NamedTuple):
    """A time span of the compute lane during which device memory is constant."""

    name: str
    """The action; empty while the lane is idle."""
    start: float
    end: float
    activations: int
    """At the start of the action."""
    transients: int
    """The action's peak above that. Its position within the action is unknown."""


class PassSpan(NamedTuple):
    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Step:
    seconds: float
    spans: tuple[StepSpan, ...]
    """By lane and time: those of this step, and those of its neighbours that run during it."""
    moments: tuple[Moment, ...]
    """Without gaps from 0 to `seconds`."""
    phases: tuple[PassSpan, ...]
    allocated: dict[str, int]
    """Bytes by kind, for the whole run."""

    @cached_property
    def gpu_bytes(self) -> int:
        """The peak over all moments."""
        return sum(self.allocated.values()) + max((0, *(m.activations + m.transients for m in self.moments)))


def placement_of(plan: Plan, graph: BlockGraph, layout: ChunkLayout) -> Placement:
    return Placement(graph, layout, plan.decision, plan.step_config, plan.work, plan.shared)


def step_of(plan: Plan, graph: BlockGraph, layout: ChunkLayout, spec: HardwareSpec) -> Step:
    return walk_step(placement_of(plan, graph, layout), spec, held_bytes=plan.held_bytes)


def walk_step(place: Placement, spec: HardwareSpec, *, held_bytes: int) -> Step:
    schedule = compile_schedule(place, only_steps=True)
    # One step more than shown: its first loads may run before this one's last backward ends.
    issued, ends = _issue(place, schedule, spec, STEPS + 1)
    begin, end = ends[STEPS - 2], ends[STEPS - 1]
    shown = [span for span in issued if span.step == STEPS - 1 or (span.end > begin and span.start < end)]
    spans = sorted(
        (StepSpan(s.lane, s.name, s.start - begin, s.end - begin, s.step - STEPS + 1) for s in shown),
        key=lambda span: (span.lane, span.start, span.end),
    )
    allocated = dict.fromkeys(KINDS, 0)
    for (kind, _), size in place.gpu.items():
        allocated["returned" if kind.group == "activations" else kind.group] += size
    allocated["other"] += place.graph.buffer_bytes
    computed = [span for span in spans if span.lane == "compute"]
    moments = tuple(_moments(place, schedule, computed, end - begin, held_bytes))
    return Step(
        seconds=end - begin,
        spans=tuple(spans),
        moments=moments,
        phases=tuple(phases_of(computed, end - begin)),
        allocated=allocated,
    )


def _issue(
    place: Placement, schedule: Schedule, spec: HardwareSpec, num_steps: int
) -> tuple[list[StepSpan], list[float]]:
    """All actions of `num_steps` steps, and when the last backward of each ends."""
    walk = Walk(place, spec)
    spans, ends = [], []
    for step in range(num_steps):
        last = 0.0
        for action, updates in walk.segments(schedule):
            lane = effect(place, action).lane
            free, worked = walk.clock.free[lane], walk.clock.busy[lane]
            end = walk.run(action, update_in_backward=updates)
            # By rounding, the difference may be before the lane was free.
            spans.append(StepSpan(lane, str(action), max(free, end - (walk.clock.busy[lane] - worked)), end, step))
            if action.kind == Kind.BACKWARD:
                last = end
        ends.append(last)
    return spans, ends


def _moments(
    place: Placement, schedule: Schedule, computed: list[StepSpan], seconds: float, held_bytes: int
) -> Iterator[Moment]:
    # All micro-batches need the same memory.
    entries = {str(entry.action): entry for entry in ledger(schedule, place, held_bytes)}
    level = [*entries.values()][-1].closes if entries else 0
    time = 0.0
    for span in computed:
        start, end = max(span.start, 0.0), min(span.end, seconds)
        if end < start:
            continue
        if start > time:
            yield Moment("", time, start, level, 0)
        entry = entries.get(span.name)
        if entry is not None:
            level = entry.opens
        if end > start or (entry is not None and entry.peak > level):
            yield Moment(span.name, start, end, level, entry.peak - level if entry is not None else 0)
        if entry is not None:
            level = entry.closes
        time = max(time, end)
    if seconds > time:
        yield Moment("", time, seconds, level, 0)


def phases_of(computed: list[StepSpan], seconds: float) -> Iterator[PassSpan]:
    """Forward and backward of each micro-batch, and the updates before the first."""
    own = [span for span in computed if span.step == 0 and span.end <= seconds * (1 + 1e-9)]
    own = [span for span in own if TYPES[parse_action(span.name).kind].operation == "model"]
    found: list[PassSpan] = []
    for span in own:
        name = "forward" if parse_action(span.name).kind == Kind.FORWARD else "backward"
        if found and found[-1].name == name:
            found[-1] = PassSpan(name, found[-1].start, span.end)
        else:
            found.append(PassSpan(name, span.start, span.end))
    if found and found[0].start > seconds * 1e-6:
        yield PassSpan("update", 0.0, found[0].start)
    yield from found


def describe(place: Placement, name: str) -> str:
    """A description of an action: `load the weights of model.layers.3 (chunk 7, 200 MiB)`."""
    action = parse_action(name)
    does, i = TYPES[action.kind], action.index
    size = show_bytes(does.num_bytes(place, i))
    if does.operand == "call":
        return f"{does.label} {place.graph.call_name(i)}" + (f" ({size})" if does.moves_activations else "")
    where = " and ".join(dict.fromkeys(place.graph.call_name(v) for v in place.chunk(i).calls))
    return f"{does.label} {where} (chunk {i}, {size})"
