"""LaneQueue: issues work on a device's lanes, ordered by the named buffers that the work reads and writes.

Callers name buffers; they place no waits. `Hazards` derives the waits from the names, and each becomes an event of the
device. A LaneQueue needs no plan: `Executor` issues the actions of a schedule through one, `TransferQueue` its copies.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from outsize.device.device import Device, Event
from outsize.hardware.lanes import Lane
from outsize.schedule.buffers import Buffer
from outsize.schedule.hazards import Hazards, Token

Buffers = tuple[Buffer, ...]


class LaneQueue:
    def __init__(self, device: Device, tensors_of: Callable[[Buffer], Sequence[Tensor]]):
        """`tensors_of(buffer)` gives the memory behind a name, for devices that find races."""
        self.hazards = Hazards()
        self._device, self._tensors_of = device, tensors_of
        self._events: dict[Token, Event] = {}
        self._open: tuple[Lane, Buffers, Buffers, float] | None = None

    @property
    def num_events(self) -> int:
        return len(self._events)

    def issue(
        self,
        lane: Lane,
        reads: Buffers,
        writes: Buffers,
        work: Callable[[], Any],
        *,
        seconds: float,
        name: str,
        blocks: bool = False,
    ) -> None:
        """Put work on a lane. `seconds` counts on a simulated device, `name` is for the timeline. `blocks`: see
        `Device.submit`.
        """
        event = self._device.submit(
            lane,
            work,
            waits=self._waits(lane, reads, writes),
            reads=self._tensors(reads),
            writes=self._tensors(writes),
            seconds=seconds,
            name=name,
            blocks=blocks,
        )
        self._events[self.hazards.after(lane, reads, writes)] = event

    def begin(self, lane: Lane, reads: Buffers, writes: Buffers, *, seconds: float, name: str) -> None:
        """Begin work that the caller runs itself, until `end`."""
        self._device.begin(
            lane,
            waits=self._waits(lane, reads, writes),
            reads=self._tensors(reads),
            writes=self._tensors(writes),
            name=name,
        )
        self._open = (lane, reads, writes, seconds)

    def end(self) -> None:
        """End the work that was begun last, if it has not ended yet."""
        if self._open is not None:
            (lane, reads, writes, seconds), self._open = self._open, None
            event = self._device.end(lane, reads=self._tensors(reads), writes=self._tensors(writes), seconds=seconds)
            self._events[self.hazards.after(lane, reads, writes)] = event

    def drop_old_events(self) -> None:
        """Drop the events that no later work can wait for."""
        wanted = self.hazards.wanted()
        self._events = {token: event for token, event in self._events.items() if token in wanted}

    def reset(self) -> None:
        """Forget all work. Call it when the lanes are idle and their failures were raised."""
        self.hazards, self._events = Hazards(), {}

    def _waits(self, lane: Lane, reads: Buffers, writes: Buffers) -> list[Event]:
        return [self._events[token] for token in self.hazards.before(lane, reads, writes)]

    def _tensors(self, buffers: Buffers) -> list[Tensor]:
        if not self._device.finds_races:
            return []
        return [tensor for buffer in buffers for tensor in self._tensors_of(buffer)]
