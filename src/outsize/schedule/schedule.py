"""Schedule: the actions of a decision as segments, each a list of actions in the order of issue.

One optimizer step runs `forward` and one of the backwards per micro-batch, then `update` unless the last backward
updates. `evaluate` is a forward without grad. The simulator and the executor process the segments in the same order.
schedule/actions.py defines the actions.

[Note: Which update comes when] After the step, updates run in forward order, so that the next forward can overlap with
them. With updates in backward, the host is slower than the backward: it updates a layer in two or three times the
layer's backward time. If updates were queued as gradients arrive, the first layers, which the next forward needs first,
would be updated last. So the host updates every `host_update_interval`-th chunk as its gradient arrives, and the others
in forward order after the last gradient. The host is then busy from the first gradient to the next forward.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from outsize.schedule.actions import Action, Kind, parse_action
from outsize.schedule.placement import Placement


@dataclass(frozen=True)
class Segment:
    name: str
    actions: tuple[Action, ...]
    updates_in_backward: bool = False
    """Whether its updates belong to a backward. They do not wait for the norm, since gradients are not clipped."""

    def __str__(self) -> str:
        return f"{self.name}: {' '.join(map(str, self.actions))}".rstrip()


@dataclass(frozen=True)
class Schedule:
    segments: dict[str, Segment]

    def __str__(self) -> str:
        return "\n".join(map(str, self.segments.values()))

    @staticmethod
    def parse(text: str) -> "Schedule":
        lines = [line.partition(":") for line in text.splitlines()]
        return make_schedule({name.strip(): map(parse_action, rest.split()) for name, _, rest in lines})

    def __getitem__(self, name: str) -> tuple[Action, ...]:
        return self.segments[name].actions

    @property
    def backwards(self) -> list[Segment]:
        """The backward segments. All have the same calls in the same order."""
        return [segment for name, segment in self.segments.items() if name.startswith("backward")]

    def step(self, accumulate: int, in_backward: bool) -> Iterator[Segment]:
        """The segments of one optimizer step, in order."""
        for i in range(accumulate):
            yield self.segments["forward"]
            yield self.segments[backward_name(pending=i > 0, update=in_backward and i == accumulate - 1)]
        if not in_backward:
            yield self.segments["update"]


def backward_name(*, pending: bool, update: bool) -> str:
    """`pending`: gradients of earlier micro-batches exist. `update`: the backward updates weights."""
    return f"backward {'again' if pending else 'first'}{'+update' if update else ''}"


def make_schedule(segments: dict[str, Iterable[Action]]) -> Schedule:
    return Schedule(
        {name: Segment(name, tuple(actions), name.endswith("+update")) for name, actions in segments.items()}
    )


def compile_schedule(place: Placement, *, only_steps: bool = False) -> Schedule:
    """`only_steps`: compile only the segments that a step of this plan runs. The search needs no others."""
    in_backward = place.step_config.update == "in_backward"
    last = place.step_config.accumulate - 1
    kinds = sorted({(i > 0, in_backward and i == last) for i in range(last + 1)})
    if not only_steps:
        kinds = [(pending, update) for pending in (False, True) for update in (False, True)]
    segments: dict[str, Iterable[Action]] = {"forward": _forward(place)}
    for pending, update in kinds:
        name = backward_name(pending=pending, update=update)
        segments[name] = _backward(place, pending=pending, update=update)
    segments["update"] = _updates(place, place.in_update_order)
    if not only_steps:
        segments["evaluate"] = _forward(place, offloads=False)
    return make_schedule(segments)


class _Slots:
    """Lists each load as soon as the slot's previous user is listed, in the order of first use."""

    def __init__(self, place: Placement, uses: list[int], holding: dict[int, int]):
        """`uses`: calls in the order they run. `holding`: the chunk that each slot holds at the start."""
        self._queue: dict[int, list[tuple[int, int]]] = {}  # slot -> (position, chunk) of its future uses
        for position, call in enumerate(uses):
            for chunk in place.layout.used_by(call):
                if place.streams(chunk):
                    self._queue.setdefault(place.slots.slot_of[chunk], []).append((position, chunk))
        self._holding = holding

    def loads(self, slots: Iterable[int]) -> list[Action]:
        """The loads that may be issued once `slots` are free."""
        ready = []
        for slot in slots:
            queue = self._queue.get(slot)
            if queue and self._holding.get(slot) != queue[0][1]:
                ready.append(queue[0])
                self._holding[slot] = queue[0][1]
        return [Action(Kind.LOAD, chunk) for _, chunk in sorted(ready)]

    def used(self, position: int) -> list[int]:
        """The calls up to `position` are listed. Returns the slots that this frees."""
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


def _forward(place: Placement, *, offloads: bool = True) -> list[Action]:
    calls = list(range(len(place.graph.calls)))
    slots = _Slots(place, calls, {})
    actions = slots.loads(slots.all)
    sending = set(place.sending_calls) if offloads else set()
    for position, call in enumerate(calls):
        actions.append(Action(Kind.FORWARD, call))
        if call in sending:
            actions.append(Action(Kind.OFFLOAD, call))
        # The copy can overlap with the whole next call before the device waits for it.
        if call - 1 in sending:
            actions.append(Action(Kind.FREE, call - 1))
        actions += slots.loads(slots.used(position))
    if calls and calls[-1] in sending:
        actions.append(Action(Kind.FREE, calls[-1]))
    return actions


def _backward(place: Placement, *, pending: bool, update: bool) -> list[Action]:
    calls = [v for v in reversed(range(len(place.graph.calls))) if place.graph.has_backward[v]]
    slots = _Slots(place, calls, held_after_forward(place))
    returning = [v for v in calls if v in place.return_slot]
    completing = [chunk for call in calls for chunk in place.grads_completed_by.get(call, ())]
    # Sums of earlier micro-batches that wait on the host are loaded into the stages of their chunks.
    summed = [chunk for chunk in completing if place.sends_gradient(chunk)] if pending else []
    streaming = [chunk for chunk in completing if place.streams_state(chunk)] if update else []
    next_returning, next_summed, next_streaming = (
        _next_in_slot(returning, place.return_slot),
        _next_in_slot(summed, place.stages.slot_of),
        _next_in_slot(streaming, place.state_slots.slot_of),
    )
    actions = slots.loads(slots.all)
    actions += _first_per_slot(returning, place.return_slot, Kind.RESTORE)
    actions += _first_per_slot(summed, place.stages.slot_of, Kind.LOAD_GRADIENT)
    actions += _first_per_slot(streaming, place.state_slots.slot_of, Kind.LOAD_STATE)
    deferred = (
        _updates(place, [c for c in place.in_update_order if c in place.updated_after_backward]) if update else []
    )
    last_completion = min(
        (call for call, chunks in place.grads_completed_by.items() if any(map(place.updates_on_host, chunks))),
        default=-1,
    )
    for position, call in enumerate(calls):
        actions.append(Action(Kind.BACKWARD, call))
        later: list[Action] = []
        for chunk in place.grads_completed_by.get(call, ()):
            if pending and chunk in place.arrivals:
                actions.append(Action(Kind.ADD, chunk))
            follows = [Action(Kind.LOAD_GRADIENT, next_summed[chunk])] if chunk in next_summed else []
            updates = []
            if update and chunk not in place.updated_after_backward:
                updates = _one_update(place, chunk, loaded=True)
            if place.updates_on_host(chunk):
                actions += [Action(Kind.STORE_GRADIENT, chunk), *follows, *updates]
            elif place.sends_gradient(chunk) and not update:
                actions += [Action(Kind.STORE_GRADIENT, chunk), *follows]
            else:
                actions += [*updates, *follows]
            if (state := next_streaming.get(chunk)) is not None:
                # State for another call is loaded after the weights of the next calls, which are needed earlier.
                is_urgent = place.grad_complete_at[state] == call
                (actions if is_urgent else later).append(Action(Kind.LOAD_STATE, state))
        if call == last_completion:
            # The host has all its gradients, so the deferred updates start now and not at the end of the backward.
            # The copies to the device wait: they would delay the loads that the rest of the backward needs.
            actions += [action for action in deferred if action.kind == Kind.UPDATE]
        actions += slots.loads(slots.used(position))
        if call in next_returning:
            actions.append(Action(Kind.RESTORE, next_returning[call]))
        actions += later
    actions += [action for action in deferred if action.kind == Kind.WRITE_BACK]
    return actions


def _first_per_slot(items: list[int], slot_of: dict[int, int], kind: Kind) -> list[Action]:
    firsts = {slot_of[item]: item for item in reversed(items)}
    return [Action(kind, item) for item in items if firsts[slot_of[item]] == item]


def _next_in_slot(items: list[int], slot_of: dict[int, int]) -> dict[int, int]:
    """Each item to the next one in its slot."""
    following: dict[int, int] = {}
    latest: dict[int, int] = {}
    for item in items:
        slot = slot_of[item]
        if slot in latest:
            following[latest[slot]] = item
        latest[slot] = item
    return following


def _updates(place: Placement, chunks: Iterable[int]) -> list[Action]:
    actions = [action for chunk in chunks for action in _one_update(place, chunk, loaded=False)]
    if not any(action.kind == Kind.LOAD_STATE for action in actions):
        return actions
    # The launching thread waits for the GPU, which waits for streamed state. So updates on the host, which overlap with
    # these, are issued first, and the copies that wait for host updates last.
    on_host = [action for action in actions if place.updates_on_host(action.index)]
    first = [action for action in on_host if action.kind == Kind.UPDATE]
    last = [action for action in on_host if action.kind != Kind.UPDATE]
    return [*first, *(action for action in actions if not place.updates_on_host(action.index)), *last]


def _one_update(place: Placement, chunk: int, *, loaded: bool) -> list[Action]:
    """`loaded`: weights, gradient and state are on the GPU already."""
    streamed, on_host, streams_state = place.streams(chunk), place.updates_on_host(chunk), place.streams_state(chunk)
    steps = (
        (Kind.LOAD, streamed and not on_host and not loaded),
        (Kind.LOAD_GRADIENT, place.sends_gradient(chunk) and not on_host and not loaded),
        (Kind.LOAD_STATE, streams_state and not loaded),
        (Kind.UPDATE, True),
        (Kind.STORE_STATE, streams_state),
        (Kind.WRITE_BACK, streamed != on_host),
    )
    return [Action(kind, chunk) for kind, needed in steps if needed]
