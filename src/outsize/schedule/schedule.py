"""Schedule: the actions of a decision as segments, each a list of actions in the order of issue.

One optimizer step runs `forward` and one of the backwards per micro-batch, then `update` unless the last backward
updates. `evaluate` is a forward without grad; `merge` makes the weights from loaded coordinates. The simulator and the
executor process the segments in the same order.
schedule/actions.py defines the actions.

[Note: Which update comes when] After the step, updates run in forward order, so that the next forward can overlap with
them. With updates in backward, the host is slower than the backward: it updates a layer in two or three times the
layer's backward time. If updates were queued as gradients arrive, the first layers, which the next forward needs first,
would be updated last. So the host updates every `host_update_interval`-th chunk as its gradient arrives, and the others
in forward order after the last gradient. The host is then busy from the first gradient to the next forward.
"""

from collections.abc import Callable, Iterable, Iterator
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
        segments["merge"] = [action for chunk in place.in_update_order for action in _merge_alone(place, chunk)]
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
    # In backward, contract needs the first part of the constants; an update, and its merge, all of them.
    contracting = [chunk for chunk in completing if place.streams_constants(chunk)]
    next_constants = _next_in_slot(contracting, place.constants_slots.slot_of)

    def load_constants(chunk: int) -> Kind:
        return Kind.LOAD_CONSTANTS if update and not place.updates_on_host(chunk) else Kind.LOAD_FOR_CONTRACT

    actions += _first_per_slot(contracting, place.constants_slots.slot_of, load_constants)
    after_backward = [c for c in place.in_update_order if c in place.updated_after_backward] if update else []
    merged_last = [c for c in place.in_update_order if place.has_coordinates(c) and place.updates_on_host(c)]
    last_completion = min(
        (call for call, chunks in place.grads_completed_by.items() if any(map(place.updates_on_host, chunks))),
        default=-1,
    )
    for position, call in enumerate(calls):
        actions.append(Action(Kind.BACKWARD, call))
        later: list[Action] = []
        for chunk in place.grads_completed_by.get(call, ()):
            if place.has_coordinates(chunk):
                actions.append(Action(Kind.CONTRACT, chunk))
            elif pending and chunk in place.arrivals:
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
            if (constants := next_constants.get(chunk)) is not None:
                is_urgent = place.grad_complete_at[constants] == call
                (actions if is_urgent else later).append(Action(load_constants(constants), constants))
            if (state := next_streaming.get(chunk)) is not None:
                # State for another call is loaded after the weights of the next calls, which are needed earlier.
                is_urgent = place.grad_complete_at[state] == call
                (actions if is_urgent else later).append(Action(Kind.LOAD_STATE, state))
        if call == last_completion:
            # The host has all its gradients, so the deferred updates start now and not at the end of the backward.
            # The copies to the device wait: they would delay the loads that the rest of the backward needs.
            actions += [Action(Kind.UPDATE, chunk) for chunk in after_backward]
        actions += slots.loads(slots.used(position))
        if call in next_returning:
            actions.append(Action(Kind.RESTORE, next_returning[call]))
        actions += later
    late = {*after_backward, *(merged_last if update else ())}
    actions += _after_host_updates(place, [chunk for chunk in place.in_update_order if chunk in late])
    return actions


def _first_per_slot(items: list[int], slot_of: dict[int, int], kind: Kind | Callable[[int], Kind]) -> list[Action]:
    firsts = {slot_of[item]: item for item in reversed(items)}
    return [
        Action(kind if isinstance(kind, Kind) else kind(item), item) for item in items if firsts[slot_of[item]] == item
    ]


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
    chunks = list(chunks)
    on_host = [chunk for chunk in chunks if place.updates_on_host(chunk)]
    if not any(place.streams_state(chunk) or place.has_coordinates(chunk) for chunk in chunks):
        return [action for chunk in chunks for action in _one_update(place, chunk, loaded=False)]
    # The launching thread waits for the GPU, which waits for streamed state and for coordinates. So updates on the
    # host, which overlap with these, are issued first, and what waits for host updates last.
    actions = [Action(Kind.UPDATE, chunk) for chunk in on_host]
    for chunk in chunks:
        if not place.updates_on_host(chunk):
            actions += _one_update(place, chunk, loaded=False)
    return actions + _after_host_updates(place, on_host)


def _after_host_updates(place: Placement, chunks: list[int]) -> list[Action]:
    """The weights of chunks that the host updates: they are copied to the GPU, or made there from coordinates."""
    merged = [chunk for chunk in chunks if place.has_coordinates(chunk)]
    actions: list[Action] = []
    following: list[tuple[Kind, dict[int, int]]] = []
    for kind, slots in ((Kind.LOAD_CONSTANTS, place.constants_slots), (Kind.LOAD_COORDINATES, place.coordinates_slots)):
        actions += _first_per_slot(merged, slots.slot_of, kind)
        following.append((kind, _next_in_slot(merged, slots.slot_of)))
    actions.sort(key=lambda action: merged.index(action.index))
    for chunk in chunks:
        if place.has_coordinates(chunk):
            actions += _merge(place, chunk)
            actions += [Action(kind, after[chunk]) for kind, after in following if chunk in after]
        elif not place.streams(chunk):
            actions.append(Action(Kind.WRITE_BACK, chunk))
    return actions


def _merge(place: Placement, chunk: int) -> list[Action]:
    return [Action(Kind.MERGE, chunk), *([Action(Kind.WRITE_BACK, chunk)] if place.streams(chunk) else [])]


def _merge_alone(place: Placement, chunk: int) -> list[Action]:
    """The merge of a chunk whose coordinates were loaded from outside."""
    if not place.has_coordinates(chunk):
        return []
    loads = (
        (Kind.LOAD_CONSTANTS, place.streams_constants(chunk)),
        (Kind.LOAD_COORDINATES, place.updates_on_host(chunk)),
        (Kind.LOAD_STATE, place.streams_state(chunk)),
    )
    return [*(Action(kind, chunk) for kind, needed in loads if needed), *_merge(place, chunk)]


def _one_update(place: Placement, chunk: int, *, loaded: bool) -> list[Action]:
    """`loaded`: weights, gradient, state and constants are on the GPU already. Coordinates that the host updates are
    merged later."""
    streamed, on_host, streams_state = place.streams(chunk), place.updates_on_host(chunk), place.streams_state(chunk)
    in_place = not place.has_coordinates(chunk)
    steps = (
        (Kind.LOAD, streamed and not on_host and not loaded and in_place),
        (Kind.LOAD_GRADIENT, place.sends_gradient(chunk) and not on_host and not loaded),
        (Kind.LOAD_STATE, streams_state and not loaded),
        (Kind.LOAD_CONSTANTS, place.streams_constants(chunk) and not on_host and not loaded),
        (Kind.UPDATE, True),
        (Kind.STORE_STATE, streams_state),
        (Kind.WRITE_BACK, streamed != on_host and in_place),
    )
    merge = [] if in_place or on_host else _merge(place, chunk)
    return [*(Action(kind, chunk) for kind, needed in steps if needed), *merge]
