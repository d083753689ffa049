"""Executor: runs the schedule of a plan with tensors.

Before a block call runs, the executor issues everything that the schedule lists before it, in order, on the device's
lanes. Waits come from Hazards alone. A forward may skip blocks (a batch without images, LayerDrop), and a backward
skips those that no gradient reaches. Their loads, gradient copies and updates are still issued; their forward, backward
and offload are not. A call that is not ahead in the segment raises OrderMismatch. Forwards without grad follow a
segment of their own, but may take any path.

Under a plain plan (Placement.is_plain) nothing is issued between calls, so the model has no hooks on its layers and
runs as without an engine; updates in backward are issued at its end. A device that finds races keeps the hooks.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from outsize.base.errors import EngineMisuse
from outsize.base.units import show_bytes
from outsize.device.device import Device
from outsize.runtime.call_path import order_mismatch
from outsize.runtime.store import Store
from outsize.schedule.actions import TYPES, Action, Effect, Kind, action_seconds, effect
from outsize.schedule.buffers import Buffer
from outsize.schedule.buffers import BufferKind as B
from outsize.schedule.placement import Placement
from outsize.schedule.schedule import Schedule, Segment, backward_name
from outsize.transfer.lane_queue import LaneQueue
from outsize.transfer.offloaded_tensors import OffloadedTensors, own_items

ALL_CALLS = -1
"""Stands for the open call in a pass whose block calls are not seen (`Executor.sees_calls` is False)."""


class Executor:
    def __init__(
        self,
        place: Placement,
        schedule: Schedule,
        store: Store,
        device: Device,
        *,
        update_work: Callable[[int, bool], Callable[[], None]],
        add_work: Callable[[int], Callable[[], None]],
        merge_work: Callable[[int], Callable[[], None]],
    ):
        """`update_work(chunk, in_backward)` returns the work of one update, with its hyperparameters fixed;
        `add_work(chunk)` that of one addition to a gradient sum, and `merge_work(chunk)` that of one merge.
        """
        self.place, self.schedule, self.store, self.device = place, schedule, store, device
        self.sees_calls = not place.is_plain or device.finds_races
        self.current_call: int | None = None
        """The call whose forward or backward is open; ALL_CALLS if calls are not seen."""
        self.issued: list[str] = []
        """The actions issued since the last forward began, as text."""
        self._update_work, self._add_work, self._merge_work = update_work, add_work, merge_work
        self._kind = Kind.FORWARD
        """The kind of action that runs a block call in the current pass: FORWARD or BACKWARD."""
        self._segment = Segment("none", ())
        self._next = 0
        """Position of the next action in the segment."""
        self._skipped: set[int] = set()
        """Calls that this forward, or its backward, has skipped."""
        self._without_grad: set[int] = set()
        """Calls that ran without grad in this forward, though the plan has a backward for them."""
        self._offloaded: dict[int, OffloadedTensors] = {}
        # Without a reference to `self`: the executor's memory is freed with it, not by the garbage collector.
        self.lanes = LaneQueue(device, partial(_tensors_of, store, self._offloaded))
        self._evaluated = 0
        """Position of the next action in the segment `evaluate`."""
        self._position_in_evaluation = {
            action.index: i for i, action in enumerate(schedule["evaluate"]) if action.kind == Kind.FORWARD
        }
        self._known: dict[tuple[Action, bool], tuple[Effect, float]] = {}

    # Training passes.

    def _start(self, kind: Kind, segment: str) -> None:
        self._kind, self._segment, self._next = kind, self.schedule.segments[segment], 0

    def begin_forward(self) -> None:
        self._start(Kind.FORWARD, "forward")
        self.issued = []
        self._skipped.clear()
        self._without_grad.clear()

    def begin_backward(self, *, pending: bool, update: bool) -> None:
        self._start(Kind.BACKWARD, backward_name(pending=pending, update=update))

    def enter(self, call: int) -> None:
        """Issue everything that the segment lists before this call, and begin it. Calls in between are skipped."""
        if not self.sees_calls:
            self.current_call = ALL_CALLS
            return
        self.lanes.end()
        action = Action(self._kind, call)
        while (expected := self._walk_to_call()) != action:
            if expected is None or action not in self._segment.actions[self._next :]:
                graph, what = self.place.graph, "forward" if self._kind == Kind.FORWARD else "backward"
                raise order_mismatch(graph, what, expected, f"ran {action} ({graph.call_name(call)})")
            self._skipped.add(expected.index)
        self._next += 1
        if self._kind == Kind.BACKWARD:
            # A forward without grad may have loaded other chunks into the slots since.
            self.ensure(self.place.layout.used_by(call))
        self.current_call = call
        self.issued.append(str(action))
        touches, seconds = self._effect(action)
        self.lanes.begin(*touches, seconds=seconds, name=str(action))

    def end_forward(self) -> None:
        self._finish_segment()

    def end_backward(self) -> None:
        self._finish_segment()
        self._offloaded.clear()

    def _finish_segment(self) -> None:
        self.lanes.end()
        while self.sees_calls and (missing := self._walk_to_call()) is not None:
            self._skipped.add(missing.index)
        if not self.sees_calls and self._segment.updates_in_backward:
            for action in self._segment.actions:
                if action.kind == Kind.UPDATE:
                    self._issue(action)
        self.current_call = None
        self.lanes.drop_old_events()

    def _walk_to_call(self) -> Action | None:
        """Issue the actions before the next call of this pass, except those of skipped calls. Returns that call's
        action, or None at the end of the segment.
        """
        while self._next < len(self._segment.actions):
            action = self._segment.actions[self._next]
            does = TYPES[action.kind]
            is_skipped = (does.operand == "call" and action.index in self._skipped) or (
                does.moves_activations and self._has_no_saved_tensors(action.index)
            )
            if action.kind == self._kind and not is_skipped:
                return action
            if is_skipped and action.kind == Kind.BACKWARD:
                # Its updates follow, and a forward without grad may have loaded other chunks into its slots since.
                self.ensure(self.place.layout.used_by(action.index))
            if not is_skipped:
                self._issue(action)
            self._next += 1
        return None

    def call_text(self) -> str:
        """The open call, for errors."""
        if self.current_call is None:
            return "its first block"
        return "the model" if self.current_call == ALL_CALLS else self.place.graph.call_name(self.current_call)

    def offloaded(self, call: int) -> OffloadedTensors:
        """A new, empty container for the activations that a call offloads."""
        self._offloaded[call] = OffloadedTensors()
        return self._offloaded[call]

    def runs_without_grad(self, call: int) -> None:
        """Record that the call runs without grad in this forward: it saves and offloads no activations."""
        self._without_grad.add(call)

    def update(self) -> None:
        self._run("update")

    def merge(self) -> None:
        """Make weights from coordinates that were loaded from outside."""
        self._run("merge")

    def _run(self, segment: str) -> None:
        self.lanes.end()
        self._segment = self.schedule.segments[segment]
        for action in self._segment.actions:
            self._issue(action)

    def roll_back(self) -> None:
        """Drop a pass that failed or was abandoned. Slots keep what they hold; the next forward loads anew."""
        self.lanes.end()
        try:
            # Activations may still be on their way to the host: their memory must not be reused under the copy.
            self.device.synchronize()
        finally:
            self._offloaded.clear()
            self.current_call = None

    # Forwards without grad.

    def begin_evaluation(self) -> None:
        self._evaluated = 0

    def enter_evaluation(self, call: int, chunks: tuple[int, ...]) -> None:
        """Begin a call of a forward without grad, which reads these chunks.

        Loads follow the segment `evaluate`, so that weights are prefetched. The forward may skip calls, whose loads are
        then skipped too, or go back: chunks that are not in their slots are loaded now.
        """
        self.lanes.end()
        position = self._position_in_evaluation.get(call, -1)
        if self.sees_calls and position >= self._evaluated:
            for action in self.schedule["evaluate"][self._evaluated : position]:
                if action.kind == Kind.LOAD and self.place.chunk(action.index).calls[-1] >= call:
                    self.ensure((action.index,))
            self._evaluated = position + 1
        self.ensure(chunks)
        seconds = self.place.work[call].forward_seconds if position >= 0 else 0.0
        self._begin_reading(chunks, seconds, f"evaluate {call}")

    # Forwards outside the schedule.

    def ensure(self, chunks: tuple[int, ...]) -> None:
        """Load those of these chunks that are not in their slots."""
        for chunk in chunks:
            if self.place.streams(chunk) and self.store.slot_contents[self.place.slots.slot_of[chunk]] != chunk:
                self._issue(Action(Kind.LOAD, chunk))

    def enter_unscheduled(self, chunks: tuple[int, ...]) -> None:
        self.lanes.end()
        self.ensure(chunks)
        self._begin_reading(chunks, 0.0, "eval")

    def _begin_reading(self, chunks: tuple[int, ...], seconds: float, name: str) -> None:
        """Begin compute that only reads weights."""
        reads = tuple(self.place.weights_buffer(chunk) for chunk in chunks)
        self.lanes.begin("compute", reads, (), seconds=seconds, name=name)

    def leave_unscheduled(self) -> None:
        self.lanes.end()
        self.lanes.drop_old_events()

    # Issuing.

    def _effect(self, action: Action) -> tuple[Effect, float]:
        """The lane and buffers of an action, and its seconds by the plan's arithmetic."""
        key = (action, self._segment.updates_in_backward)
        if key not in self._known:
            touches = effect(self.place, action, update_in_backward=self._segment.updates_in_backward)
            self._known[key] = touches, action_seconds(self.place, action, self.device.spec, touches.lane)
        return self._known[key]

    def _issue(self, action: Action) -> None:
        touches, seconds = self._effect(action)
        self.lanes.issue(*touches, self._work(action, touches), seconds=seconds, name=str(action))
        self.issued.append(str(action))

    def _work(self, action: Action, touches: Effect) -> Callable[[], Any]:
        store, i = self.store, action.index
        does = TYPES[action.kind]
        match does.operation:
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
            case "add":
                return self._add_work(i)
            case "update":
                if self.place.updates_on_host(i) and not self.place.has_coordinates(i):
                    store.invalidate(i)
                return self._update_work(i, self._segment.updates_in_backward)
            case "merge":
                kind, slot = touches.writes[0]
                if kind == B.SLOT:
                    store.slot_contents[slot] = i
                return self._merge_work(i)
            case "model":
                raise AssertionError(f"{action} is run by the model, not issued")

    def _has_no_saved_tensors(self, call: int) -> bool:
        """Whether a call that offloads has saved no activations: it ran without grad, its input needed none because the
        trained blocks before it were skipped, or it returned its input.
        """
        if call in self._without_grad:
            return True
        offloaded = self._offloaded.get(call)
        return offloaded is not None and not offloaded.num_bytes

    def _sent(self, call: int) -> OffloadedTensors:
        """The offloaded activations of a call. Raises EngineMisuse if it has none, or more than the plan has."""
        offloaded, planned = self._offloaded.get(call), self.place.work[call].sent_bytes
        size = offloaded.num_bytes if offloaded is not None else 0
        if offloaded is None or size > planned:
            name = self.place.graph.call_name(call)
            raise EngineMisuse(
                f"{name}: it saved {show_bytes(size)} of activations to offload, and the plan has at most "
                f"{show_bytes(planned)}. Prepare the model with the batch shape that it trains on (max_shape=...)."
            )
        return offloaded


def _tensors_of(store: Store, offloaded: dict[int, OffloadedTensors], buffer: Buffer) -> list[Tensor]:
    """The memory behind a buffer's name, for the device's race detection."""
    return own_items(offloaded, buffer[1]) if buffer[0] == B.LIVE else [store.buffer(buffer)]


def _copy(to: Tensor, source: Tensor) -> Callable[[], Any]:
    return lambda: to.copy_(source, non_blocking=True)
