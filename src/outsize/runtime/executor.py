"""Executor: walks the schedule with tensors.

The model's tracker says which call opens; everything the schedule lists before it is issued first, in order, on the
device's lanes. What to wait for comes from Hazards alone. A forward may leave blocks out (images that a batch has not,
a layer that is dropped), and a backward those that no gradient
reaches: their loads are made, what they would have sent or computed is passed over. A model that runs others, or in
another order, stops here, both named. Forwards without grad follow a segment of their own, but may take any path.

Under a plain plan (Placement.is_plain) nothing must be issued between calls, so nobody tells of them: the model runs as
it would without an engine, and the updates of a declared backward come at its end. A device that finds races wants to
see them all the same.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

from torch import Tensor

from outsize.activation.offloaded_tensors import OffloadedTensors
from outsize.base.errors import EngineMisuse, OrderMismatch
from outsize.base.units import show_bytes
from outsize.device.device import Device, Event
from outsize.runtime.store import Store
from outsize.schedule.actions import TYPES, Action, Effect, Kind, action_seconds, effect
from outsize.schedule.buffers import Buffer
from outsize.schedule.buffers import BufferKind as B
from outsize.schedule.hazards import Hazards, Token
from outsize.schedule.placement import Placement
from outsize.schedule.schedule import Schedule, Segment, backward_name


class Stage(Enum):
    """Where a training pass is."""

    IDLE = "idle"
    FORWARD = "in forward"
    WAITING = "between forward and backward"
    """Activations are kept for a backward to come."""
    BACKWARD = "in backward"


ALL_CALLS = -1
"""In place of a call, in a pass that does not distinguish its calls."""


class Executor:
    def __init__(
        self,
        place: Placement,
        schedule: Schedule,
        store: Store,
        device: Device,
        *,
        update_chunk: Callable[[int, bool], Callable[[], None]],
    ):
        """`update_chunk(chunk, in_backward)` gives the work of one update, with everything it needs already fixed."""
        self.place, self.schedule, self.store, self.device = place, schedule, store, device
        self.hazards = Hazards()
        self.sees_calls = not place.is_plain or device.finds_races
        self.stage = Stage.IDLE
        self.current_call: int | None = None
        """The call whose forward or backward is open; ALL_CALLS where they are not seen."""
        self.issued: list[str] = []
        """What was issued since the last forward began, as text."""
        self._update_chunk = update_chunk
        self._events: dict[Token, Event] = {}
        self._segment = Segment("none", ())
        self._next = 0
        """Where in the segment."""
        self._open: tuple[Effect, float] | None = None
        self._reads_outside_module = frozenset(place.graph.reads_outside_module) - {0}
        self._left_out: set[int] = set()
        """Calls that this forward, or its backward, has passed over."""
        self._without_grad: set[int] = set()
        """Calls that ran without grad in this forward, though the plan has a backward for them."""
        self._offloaded: dict[int, OffloadedTensors] = {}
        self._evaluated = 0
        """Where in the segment `evaluate`."""
        self._position_in_evaluation = {
            action.index: i for i, action in enumerate(schedule["evaluate"]) if action.kind == Kind.FORWARD
        }
        self._known: dict[tuple[Action, bool], tuple[Effect, float]] = {}

    # Training passes, driven by the model's tracker.

    def _start(self, stage: Stage, segment: str) -> None:
        self.stage, self._segment, self._next = stage, self.schedule.segments[segment], 0

    def begin_forward(self) -> None:
        self._start(Stage.FORWARD, "forward")
        self.issued = []
        self._left_out.clear()
        self._without_grad.clear()

    def enter_forward(self, call: int, layer: str | None) -> None:
        """`layer`: the name of the layer that opens, None for a region."""
        graph = self.place.graph
        if self.sees_calls:
            planned = graph.blocks[graph.calls[call]] if call < len(graph.calls) else None
            if planned is None or (planned.name != layer if planned.kind == "layer" else layer is not None):
                raise self._mismatch(
                    Action(Kind.FORWARD, call) if planned is not None else None, f"ran {layer or 'past its last layer'}"
                )
        self._advance_to(Action(Kind.FORWARD, call))

    def end_forward(self) -> None:
        self._finish_segment("forward")
        self._require_completing_calls()
        self.stage = Stage.WAITING

    def _require_completing_calls(self) -> None:
        """Raise OrderMismatch if a gradient would complete in an earlier call than the plan has: it would overwrite
        another gradient in its staging slot.
        """
        graph = self.place.graph
        for call in self._left_out:
            for piece in (
                piece
                for chunk in self.place.grads_completed_by.get(call, ())
                for piece in self.place.chunk(chunk).pieces
            ):
                ran = [user for user in graph.backward_users[piece.name] if user not in self._left_out]
                if ran:
                    raise OrderMismatch(
                        f"{piece.name}: several blocks use it, and the plan completes its gradient in "
                        f"{graph.call_name(call)}, which the model skipped although it ran "
                        f"{graph.call_name(ran[0])}. Prepare the model with a batch that takes this path, or run both "
                        "or neither of the two."
                    )

    def offloaded(self, call: int) -> OffloadedTensors:
        """A new, empty container for the activations that a call offloads."""
        self._offloaded[call] = OffloadedTensors()
        return self._offloaded[call]

    def runs_without_grad(self, call: int) -> None:
        """This time the call saves no activations, and sends none."""
        self._without_grad.add(call)

    def begin_backward(self, *, pending: bool, update: bool) -> None:
        self._start(Stage.BACKWARD, backward_name(pending=pending, update=update))

    def enter_backward(self, call: int) -> None:
        self._advance_to(Action(Kind.BACKWARD, call))

    def end_backward(self) -> None:
        self._finish_segment("backward")
        self._offloaded.clear()
        self.stage = Stage.IDLE

    def update(self) -> None:
        self._close_open()
        self._segment = self.schedule.segments["update"]
        for action in self._segment.actions:
            self._issue(action)

    def roll_back(self) -> None:
        """Forget an abandoned pass. Slots keep what they hold; every load is issued anew by the next forward."""
        self._close_open()
        try:
            # Activations may still be on their way to the host: their memory must not be reused under the copy.
            self.device.synchronize()
        finally:
            self._offloaded.clear()
            self.stage, self.current_call = Stage.IDLE, None

    # Forwards without grad.

    def begin_evaluation(self) -> None:
        self._evaluated = 0

    def enter_evaluation(self, call: int, chunks: tuple[int, ...]) -> None:
        """A forward without grad comes to a call that reads these chunks.

        It follows the segment `evaluate`, so that weights are loaded ahead. It may leave calls out, whose loads are
        then left out too, or go back: what it needs and does not find is loaded here.
        """
        self._close_open()
        position = self._position_in_evaluation.get(call, -1)
        if self.sees_calls and position >= self._evaluated:
            for action in self.schedule["evaluate"][self._evaluated : position]:
                if action.kind == Kind.LOAD and self.place.chunk(action.index).calls[-1] >= call:
                    self.ensure((action.index,))
            self._evaluated = position + 1
        self.ensure(chunks)
        seconds = self.place.work[call].forward_seconds if position >= 0 else 0.0
        self._begin(Effect("compute", tuple(map(self.place.weights_buffer, chunks)), ()), seconds, f"evaluate {call}")

    # Forwards outside the schedule.

    def ensure(self, chunks: tuple[int, ...]) -> None:
        """Have these chunks on the device for what computes next."""
        for chunk in chunks:
            if self.place.streams(chunk) and self.store.slot_contents[self.place.slots.slot_of[chunk]] != chunk:
                self._issue(Action(Kind.LOAD, chunk))

    def enter_unscheduled(self, chunks: tuple[int, ...]) -> None:
        self._close_open()
        self.ensure(chunks)
        self._begin(Effect("compute", tuple(self.place.weights_buffer(c) for c in chunks), ()), 0.0, "eval")

    def leave_unscheduled(self) -> None:
        self._close_open()
        self._forget()

    # Walking.

    def _advance_to(self, action: Action) -> None:
        if not self.sees_calls:
            self.current_call = ALL_CALLS
            return
        self._close_open()
        expected = first = self._walk_to(action.kind)
        if expected != action and action in self._segment.actions[self._next :]:
            while expected is not None and expected != action:
                self._leave_out(expected, f"ran {action} ({self.place.graph.call_name(action.index)})")
                expected = self._walk_to(action.kind)
            if (
                action.kind == Kind.FORWARD
                and action.index in self._reads_outside_module
                and not self._is_layer(action.index)
            ):
                raise self._mismatch(
                    first, f"ran {action} ({self.place.graph.call_name(action.index)}), part of it perhaps earlier"
                )
        if expected != action:
            raise self._mismatch(expected, f"ran {action} ({self.place.graph.call_name(action.index)})")
        self._next += 1
        if action.kind == Kind.BACKWARD:
            # A forward without grad may have passed through the slots since.
            self.ensure(self.place.layout.used_by(action.index))
        self.current_call = action.index
        self.issued.append(str(action))
        self._begin(*self._effect(action), str(action))

    def _walk_to(self, kind: Kind) -> Action | None:
        """Issue what comes before the next action of this kind, without what is left out. None at the end of the
        segment.
        """
        while self._next < len(self._segment.actions):
            action = self._segment.actions[self._next]
            does = TYPES[action.kind]
            is_left_out = (does.operand == "call" and action.index in self._left_out) or (
                does.moves_activations and self._has_no_saved_tensors(action.index)
            )
            if action.kind == kind and not is_left_out:
                return action
            if is_left_out and action.kind == Kind.BACKWARD:
                # Its updates follow all the same, and a forward without grad may have passed through its slots since.
                self.ensure(self.place.layout.used_by(action.index))
            if not is_left_out:
                self._issue(action)
            self._next += 1
        return None

    def _is_layer(self, call: int) -> bool:
        graph = self.place.graph
        return graph.blocks[graph.calls[call]].kind == "layer"

    def _leave_out(self, action: Action, found: str) -> None:
        if action.kind == Kind.FORWARD and action.index in self._reads_outside_module:
            raise self._mismatch(action, found)
        self._left_out.add(action.index)

    def _mismatch(self, expected: Action | None, found: str) -> OrderMismatch:
        what = "forward" if self.stage is Stage.FORWARD else "backward"
        wanted = f"{expected} ({self.place.graph.call_name(expected.index)})" if expected else f"the end of {what}"
        return OrderMismatch(
            f"The model takes another path than in prepare's trial run: the plan's next action in {what} is {wanted}, "
            f"and the model {found}. Prepare it with a batch that takes this path."
        )

    def _finish_segment(self, what: str) -> None:
        self._close_open()
        while (
            self.sees_calls
            and (missing := self._walk_to(Kind.FORWARD if self.stage is Stage.FORWARD else Kind.BACKWARD)) is not None
        ):
            self._leave_out(missing, f"ended its {what} without it")
        if not self.sees_calls and self._segment.updates_in_backward:
            for action in self._segment.actions:
                if action.kind == Kind.UPDATE:
                    self._issue(action)
        self.current_call = None
        self._forget()

    def _forget(self) -> None:
        """Drop events that nobody can wait for any more."""
        wanted = self.hazards.wanted()
        self._events = {token: event for token, event in self._events.items() if token in wanted}

    def drained(self) -> None:
        """The lanes are idle, and whatever failed on them is known: there is nothing to wait for, nor to fail over
        again.
        """
        self.hazards, self._events = Hazards(), {}

    # Issuing.

    def _effect(self, action: Action) -> tuple[Effect, float]:
        """What it touches, and its seconds by the plan's arithmetic."""
        key = (action, self._segment.updates_in_backward)
        if key not in self._known:
            touches = effect(self.place, action, update_in_backward=self._segment.updates_in_backward)
            self._known[key] = touches, action_seconds(self.place, action, self.device.spec, touches.lane)
        return self._known[key]

    def _begin(self, touches: Effect, seconds: float, name: str) -> None:
        waits = [self._events[token] for token in self.hazards.before(touches.lane, touches.reads, touches.writes)]
        self.device.begin(
            touches.lane,
            waits=waits,
            reads=self._tensors(touches.reads),
            writes=self._tensors(touches.writes),
            name=name,
        )
        self._open = (touches, seconds)

    def _close_open(self) -> None:
        if self._open is not None:
            touches, seconds = self._open
            self._open = None
            event = self.device.end(
                touches.lane, reads=self._tensors(touches.reads), writes=self._tensors(touches.writes), seconds=seconds
            )
            self._events[self.hazards.after(touches.lane, touches.reads, touches.writes)] = event

    def _issue(self, action: Action) -> None:
        touches, seconds = self._effect(action)
        waits = [self._events[token] for token in self.hazards.before(touches.lane, touches.reads, touches.writes)]
        work = self._work(action, touches)
        event = self.device.submit(
            touches.lane,
            work,
            waits=waits,
            reads=self._tensors(touches.reads),
            writes=self._tensors(touches.writes),
            seconds=seconds,
            name=str(action),
        )
        self._events[self.hazards.after(touches.lane, touches.reads, touches.writes)] = event
        self.issued.append(str(action))

    def _work(self, action: Action, touches: Effect) -> Callable[[], Any]:
        store, i = self.store, action.index
        does = TYPES[action.kind]
        match does.work:
            case "copy":
                kind, slot = touches.writes[0]
                if kind == B.SLOT:
                    store.slot_contents[slot] = i
                num_bytes = does.num_bytes(self.place, i)
                return _copy(store.buffer(touches.writes[0])[:num_bytes], store.buffer(touches.reads[0])[:num_bytes])
            case "offload":
                offloaded, arena = self._sent(i), store.buffer(touches.writes[0])
                return lambda: offloaded.copy_to(arena)
            case "free":
                return self._sent(i).free_device_copy
            case "restore":
                offloaded = self._offloaded[i]
                arena, buffer = store.buffer(touches.reads[0]), store.buffer(touches.writes[0])[: offloaded.num_bytes]
                offloaded.attach_buffer(buffer)
                return _copy(buffer, arena[: offloaded.num_bytes])
            case "update":
                if self.place.updates_on_host(i):
                    store.invalidate(i)
                return self._update_chunk(i, self._segment.updates_in_backward)
            case "model":
                raise AssertionError(f"{action} is run by the model, not issued")

    def _has_no_saved_tensors(self, call: int) -> bool:
        """A layer that swaps whose input needed no grad this time, since what trains before it was left out; or one
        that ran without grad.
        """
        if call in self._without_grad:
            return True
        offloaded = self._offloaded.get(call)
        return offloaded is not None and not offloaded.num_bytes and bool(self._left_out)

    def _sent(self, call: int) -> OffloadedTensors:
        """The offloaded activations of a call. Raises EngineMisuse if it has none, or more than the plan has."""
        offloaded, planned = self._offloaded.get(call), self.place.work[call].sent_bytes
        size = offloaded.num_bytes if offloaded is not None else 0
        if offloaded is None or not 0 < size <= planned:
            name = self.place.graph.call_name(call)
            raise EngineMisuse(
                f"{name}: it saved {show_bytes(size)} of activations to send to the host, and the plan has more than 0 "
                f"and at most {show_bytes(planned)}. Prepare the model with the batch shape that it trains on "
                "(max_shape=...)."
            )
        return offloaded

    def _tensors(self, buffers: tuple[Buffer, ...]) -> list[Tensor]:
        """The memory behind the names, for the device's race detection."""
        tensors: list[Tensor] = []
        if not self.device.finds_races:
            return tensors
        for buffer in buffers:
            if buffer[0] == B.LIVE:
                tensors += self._made_by(buffer[1])
            else:
                tensors.append(self.store.buffer(buffer))
        return tensors

    def _made_by(self, call: int) -> list[Tensor]:
        """What a call made and sends. What an earlier call sends too was made before, and this one only reads it."""
        earlier = {
            item.data_ptr() for other, offloaded in self._offloaded.items() if other < call for item in offloaded.items
        }
        items = self._offloaded[call].items if call in self._offloaded else []
        return [item for item in items if item.data_ptr() not in earlier]


def _copy(to: Tensor, source: Tensor) -> Callable[[], Any]:
    return lambda: to.copy_(source, non_blocking=True)
