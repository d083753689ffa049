"""Schedule: a decision written out as lists of actions, and what each action touches.

One optimizer step is a forward and a backward per micro-batch and an update. The lists are walked by
planner/simulate.py with numbers and by runtime/executor.py with tensors, in the same order. Actions print as `F12` or
`L3` and parse back.

    L c   load chunk c into its slot                        h2d F v   forward of call v
    compute S v   send the activations of v to the host             d2h R v   let go of their device memory
    compute (waits for S v) P v   bring the activations of v back                   h2d Q c   load the partial gradient
    sum of chunk c          h2d B v   backward of call v                               compute G c   gradient of chunk c
    leaves for the host           d2h U c   update chunk c                                    host or compute W c
    write updated weights to where they are wanted    h2d (resident, updated on the host) or d2h (streamed, updated on
    the device)

[Note: Which update comes when] After the step, updates come in forward order: the next forward begins under them. With
updates in backward, the host is slower than the backward (a layer's update takes two or three times its backward), so
what completes cannot all be updated as it completes. Were it queued, the last layers' updates would come first and the
first layers', which the next forward waits for, last. So the host takes every `host_update_interval`-th chunk that
completes, as many as it can do until the last has accumulated, and then the others in forward order: it works from the
first gradient to the last layer's forward.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

from outsize.base.errors import PlanInvalid, tell
from outsize.hardware.lanes import Lane, copy_seconds, update_seconds
from outsize.hardware.spec import HardwareSpec
from outsize.plan.placement import Buffer, Placement

Kind = Literal["L", "F", "S", "R", "P", "Q", "B", "G", "U", "W"]
_ACTION = re.compile(r"([LFSRPQBGUW])(\d+)")


class Action(NamedTuple):
    kind: Kind
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody wants of an action
    """A call (F, B, S, R, P) or a chunk (L, Q, G, U, W)."""

    def __str__(self) -> str:
        return f"{self.kind}{self.index}"


class Effect(NamedTuple):
    lane: Lane
    reads: tuple[Buffer, ...]
    writes: tuple[Buffer, ...]


@dataclass(frozen=True)
class Schedule:
    forward: tuple[Action, ...]
    backward: dict[str, tuple[Action, ...]]
    """By `first` or `again` (gradients are pending), `+update` when the caller declared the last backward."""
    update: tuple[Action, ...]

    def __str__(self) -> str:
        segments = {
            "forward": self.forward,
            **{f"backward {k}": v for k, v in self.backward.items()},
            "update": self.update,
        }
        return "\n".join(f"{name}: {' '.join(map(str, actions))}".rstrip() for name, actions in segments.items())

    @staticmethod
    def parse(text: str) -> "Schedule":
        segments: dict[str, tuple[Action, ...]] = {}
        for line in text.splitlines():
            name, _, rest = line.partition(":")
            segments[name.strip()] = tuple(parse_action(word) for word in rest.split())
        return Schedule(
            forward=segments["forward"],
            backward={
                name.removeprefix("backward "): actions
                for name, actions in segments.items()
                if name.startswith("backward ")
            },
            update=segments["update"],
        )

    def step(self, accumulate: int, in_backward: bool) -> Iterable[tuple[str, tuple[Action, ...]]]:
        """The segments of one optimizer step, in order."""
        for i in range(accumulate):
            yield "forward", self.forward
            last = i == accumulate - 1
            yield "backward", self.backward[backward_key(pending=i > 0, update=in_backward and last)]
        if not in_backward:
            yield "update", self.update


def backward_key(*, pending: bool, update: bool) -> str:
    return ("again" if pending else "first") + ("+update" if update else "")


def parse_action(word: str) -> Action:
    match = _ACTION.fullmatch(word)
    if not match:
        raise PlanInvalid(
            tell("an action such as F12 or L3", f"found {word!r}", "Write the schedule again with `str(schedule)`")
        )
    return Action(cast(Kind, match[1]), int(match[2]))


def compile_schedule(place: Placement, *, only_steps: bool = False) -> Schedule:
    """`only_steps`: leave out the kinds of backward that `Schedule.step` never yields under the placement's
    step_config; a search has no use for them.
    """
    in_backward = place.step_config.update == "in_backward"
    steps = {
        (i > 0, in_backward and i == place.step_config.accumulate - 1) for i in range(place.step_config.accumulate)
    }
    kinds = (
        sorted(steps) if only_steps else [(pending, update) for pending in (False, True) for update in (False, True)]
    )
    backward = {
        backward_key(pending=pending, update=update): _backward(place, pending=pending, update=update)
        for pending, update in kinds
    }
    return Schedule(forward=_forward(place), backward=backward, update=tuple(_updates(place, place.grad_complete_at)))


class _Slots:
    """Issues each load as soon as the slot's previous user has been issued, ordered by who needs it first."""

    def __init__(self, place: Placement, uses: list[int], holding: dict[int, int]):
        """`uses`: calls in the order they run. `holding`: what each slot holds at the start."""
        self._queue: dict[int, list[tuple[int, int]]] = {}  # slot -> (position, chunk) of the uses to come
        for position, call in enumerate(uses):
            for chunk in place.layout.used_by(call):
                if place.streams(chunk):
                    self._queue.setdefault(place.slots.slot_of[chunk], []).append((position, chunk))
        self._holding = holding

    def loads(self, slots: Iterable[int]) -> list[Action]:
        """The loads that may be issued now that nobody uses `slots`."""
        ready = []
        for slot in slots:
            queue = self._queue.get(slot)
            if queue and self._holding.get(slot) != queue[0][1]:
                ready.append(queue[0])
                self._holding[slot] = queue[0][1]
        return [Action("L", chunk) for _, chunk in sorted(ready)]

    def used(self, position: int) -> list[int]:
        """Drop the uses at `position`; returns their slots."""
        done = []
        for slot, queue in self._queue.items():
            if queue and queue[0][0] == position:
                queue.pop(0)
                done.append(slot)
        return done

    @property
    def all(self) -> list[int]:
        return list(self._queue)


def held_after_forward(place: Placement) -> dict[int, int]:
    """Slot to the chunk that the forward pass leaves in it."""
    holding = {}
    for call in range(len(place.graph.calls)):
        holding.update({place.slots.slot_of[c]: c for c in place.layout.used_by(call) if place.streams(c)})
    return holding


def _forward(place: Placement) -> tuple[Action, ...]:
    calls = list(range(len(place.graph.calls)))
    slots = _Slots(place, calls, {})
    actions = slots.loads(slots.all)
    sending = set(place.sending)
    for position, call in enumerate(calls):
        actions.append(Action("F", call))
        if call in sending:
            actions.append(Action("S", call))
        # A copy has the whole of the next call to finish before the device waits for it.
        if call - 1 in sending:
            actions.append(Action("R", call - 1))
        actions += slots.loads(slots.used(position))
    if calls and calls[-1] in sending:
        actions.append(Action("R", calls[-1]))
    return tuple(actions)


def _backward(place: Placement, *, pending: bool, update: bool) -> tuple[Action, ...]:
    calls = [v for v in reversed(range(len(place.graph.calls))) if place.graph.has_backward[v]]
    slots = _Slots(place, calls, held_after_forward(place))
    returning = [v for v in calls if v in place.return_slot]
    # Partial sums come back through the staging slots of chunks that are updated on the host.
    summed = (
        [
            c
            for v in calls
            for c in place.grads_completed_by.get(v, ())
            if place.is_staged(c) and place.updates_on_host(c)
        ]
        if pending
        else []
    )
    next_returning, next_summed = (
        _next_in_slot(returning, place.return_slot),
        _next_in_slot(summed, place.stages.slot_of),
    )
    actions = slots.loads(slots.all)
    actions += _first_per_slot(returning, place.return_slot, "P")
    actions += _first_per_slot(summed, place.stages.slot_of, "Q")
    deferred = _updates(place, place.updated_after_backward) if update else []
    last_completion = min(
        (call for call, chunks in place.grads_completed_by.items() if any(map(place.updates_on_host, chunks))),
        default=-1,
    )
    for position, call in enumerate(calls):
        actions.append(Action("B", call))
        for chunk in place.grads_completed_by.get(call, ()):
            if place.is_staged(chunk) and place.updates_on_host(chunk):
                actions.append(Action("G", chunk))
                if chunk in next_summed:
                    actions.append(Action("Q", next_summed[chunk]))
            if update and chunk not in place.updated_after_backward:
                actions += _update_chunk(place, chunk, loaded=True)
        if call == last_completion:
            # The host has all it will get: it shall go on at once, not when the thread that issues has come to the end.
            # The copies into the device would hold up those that the rest of the backward needs.
            actions += [action for action in deferred if action.kind == "U"]
        actions += slots.loads(slots.used(position))
        if call in next_returning:
            actions.append(Action("P", next_returning[call]))
    actions += [action for action in deferred if action.kind == "W"]
    return tuple(actions)


def _first_per_slot(items: list[int], slot_of: dict[int, int], kind: Kind) -> list[Action]:
    firsts = {slot_of[item]: item for item in reversed(items)}
    return [Action(kind, item) for item in items if firsts[slot_of[item]] == item]


def _next_in_slot(items: list[int], slot_of: dict[int, int]) -> dict[int, int]:
    """Each item to the one that passes through its slot after it."""
    following: dict[int, int] = {}
    latest: dict[int, int] = {}
    for item in items:
        slot = slot_of[item]
        if slot in latest:
            following[latest[slot]] = item
        latest[slot] = item
    return following


def _updates(place: Placement, chunks: Iterable[int]) -> list[Action]:
    """In forward order, so that the next forward finds its first chunks done first."""
    actions: list[Action] = []
    for chunk in sorted(chunks, key=lambda c: (place.chunk(c).calls[0], c)):
        actions += _update_chunk(place, chunk, loaded=False)
    return actions


def _update_chunk(place: Placement, chunk: int, *, loaded: bool) -> list[Action]:
    streamed, on_host = place.streams(chunk), place.updates_on_host(chunk)
    actions = [Action("L", chunk)] if streamed and not on_host and not loaded else []
    actions.append(Action("U", chunk))
    if streamed != on_host:
        actions.append(Action("W", chunk))
    return actions


def effect(place: Placement, action: Action, *, update_in_backward: bool = False) -> Effect:
    """The lane of an action and the buffers it reads and writes."""
    kind, i = action
    match kind:
        case "L":
            return Effect("h2d", (("home", i),), (place.weights_buffer(i),))
        case "F":
            return Effect(
                "compute",
                tuple(place.weights_buffer(c) for c in place.layout.used_by(i)),
                (("live", i),) if i in place.return_slot else (),
            )
        case "S":
            return Effect("d2h", (("live", i),), (("arena", i),))
        case "R":
            return Effect("compute", (), (("live", i),))
        case "P":
            return Effect("h2d", (("arena", i),), (("return", place.return_slot[i]),))
        case "Q":
            return Effect("h2d", (place.host_gradient_buffer(i),), (place.gradient_buffer(i),))
        case "B":
            reads = tuple(place.weights_buffer(c) for c in place.layout.used_by(i))
            if i in place.return_slot:
                reads += (("return", place.return_slot[i]),)
            accumulated = place.grads_completed_by.get(i, ())
            writes: tuple[Buffer, ...] = tuple(place.gradient_buffer(c) for c in accumulated)
            return Effect("compute", reads, (*writes, ("norms", 0)) if accumulated else writes)
        case "G":
            return Effect("d2h", (place.gradient_buffer(i),), (place.host_gradient_buffer(i),))
        case "U":
            # After the step, the clipping factor comes from all norms; in backward there is no clipping.
            norms: tuple[Buffer, ...] = () if update_in_backward else (("norms", 0),)
            if place.updates_on_host(i):
                return Effect("host", (place.host_gradient_buffer(i), *norms), (("home", i),))
            return Effect("compute", (place.gradient_buffer(i), *norms), (place.weights_buffer(i),))
        case "W":
            if place.updates_on_host(i):
                return Effect("h2d", (("home", i),), (place.weights_buffer(i),))
            return Effect("d2h", (place.weights_buffer(i),), (("home", i),))


def issuing(place: Placement, action: Action, spec: HardwareSpec) -> tuple[float, bool]:
    """Seconds of the thread that issues it, and whether that thread waits for the device in it. Nothing where nobody
    knows what issuing takes.
    """
    kind, i = action
    if not place.knows_issuing or kind == "R":
        return 0.0, False
    if kind == "F":
        return place.work[i].forward_launch_seconds, place.work[i].forward_syncs_host
    if kind == "B":
        return place.work[i].backward_launch_seconds, place.work[i].backward_syncs_host
    return spec.launch_seconds, False


def action_seconds(place: Placement, action: Action, spec: HardwareSpec, lane: Lane) -> float:
    kind, i = action
    match kind:
        case "F":
            return place.work[i].forward_seconds
        case "B":
            return place.work[i].backward_seconds
        case "R":
            return 0.0
        case "S" | "P":
            return copy_seconds(spec, lane, place.work[i].sent_bytes)
        case "L" | "W":
            return copy_seconds(spec, lane, place.chunk(i).nbytes)
        case "Q" | "G":
            return copy_seconds(spec, lane, place.chunk(i).grad_bytes(place.step_config.fp32_grads))
        case "U":
            return update_seconds(spec, lane, place.chunk(i).numel)
