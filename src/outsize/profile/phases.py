"""Phases: turns a meter's readings at the borders of calls into peaks and deltas, and a clock's into seconds."""

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from outsize.device.device import Device, Meter
from outsize.device.observer import Observer

WAITED_SECONDS = 5e-3
"""That a thread which is 20 ms ahead of the device takes longer than one that is not, if it waits for it."""


@dataclass(slots=True)
class Phase:
    peak_bytes: int = 0
    delta_bytes: int = 0
    seconds: float = 0.0
    op_launch_seconds: float = 0.0
    """That the issuing thread took over it, or would."""
    ran_ahead: bool = False
    """It was issued before the device came to it."""
    waits: bool = False
    """The issuing thread waited for the device in it."""


@dataclass(slots=True)
class ForwardPhase(Phase):
    sent_bytes: int = 0
    released_bytes: int = 0
    born_bytes: int = 0
    """Of storages that are followed: not part of its delta."""


Moment = tuple[Literal["F", "R", "B"], int]
"""In the forward of a call, as what it sent is released, in its backward."""


@dataclass(slots=True, eq=False)
class Storage:
    """One whose death no phase counts: see profile/lifetimes.py."""

    num_bytes: int
    born: int
    """The call in whose forward it was made, where that does not count its birth either; -1 where it does."""
    saved_by: int = -1
    """The graph of this call saved it, and nobody else has it: it is followed only if it dies in the forward of a later
    call.
    """
    died: Moment | None = None
    """`F`: the forward of that call began without it, or it was dead before that call's peak."""
    peak: int = 0
    """The meter's, when it died."""
    is_late: bool = False
    """It died in the forward before the one that `died` names, after the peak of that one."""
    is_early: bool = False
    """It died in a backward, before the peak of that one, which is given with its bytes."""
    ref: "weakref.ref[torch.UntypedStorage] | None" = None


def _dies(phases: "weakref.ref[Phases]", storage: Storage, _: object) -> None:
    alive = phases()
    if alive is not None:
        alive.note_death(storage)


class Phases:
    def __init__(self, meter: Meter | None, device: Device, *, ahead: bool):
        """Without a meter only seconds are taken: with the issuing thread `ahead` of the device, as in the midst of a
        run, or each phase from a standstill.
        """
        self._meter, self._device, self._ahead = meter, device, ahead
        self.forward: list[ForwardPhase] = []
        self.backward: dict[int, Phase] = {}
        self.held_bytes = 0
        self._now: Moment = ("F", 0)
        self._dead: list[Storage] = []
        """Since the open phase began, or the last one ended."""
        self._ended: list[Storage] = []
        """In the last forward phase that ended."""
        self._is_over = False
        self._open: Phase | None = None
        self._of_loss: Phase | None = None
        self._level = 0
        self._since: Any = None
        """A mark of the device's."""
        self._issued_since = 0.0
        self._timed: list[tuple[Phase, Any, Any]] = []
        self._counted = (0.0, 0.0)
        """Seconds and operators."""
        self._start = 0
        self._end = 0

    def begin(self) -> None:
        self._start = self._read()

    def finish(self) -> None:
        self.held_bytes = self._read() - self._start
        self._is_over = True
        for phase, start, end in self._timed:
            phase.seconds = self._device.between(start, end)

    def at_best(self, other: "Phases") -> None:
        """The less of what two passes took, this one ahead and the other from standstills: what is more was a hiccup,
        and a layer's stands for many layers; or waiting, of the device for the issuing thread, or of a thread that is
        ahead and asks the device for a number. One that was held up by something else has its lead still."""
        for one, two in (
            *zip(self.forward, other.forward, strict=True),
            *((phase, other.backward[call]) for call, phase in self.backward.items()),
        ):
            one.waits = not one.ran_ahead and one.op_launch_seconds - two.op_launch_seconds > WAITED_SECONDS
            one.seconds, one.op_launch_seconds = (
                min(one.seconds, two.seconds),
                min(one.op_launch_seconds, two.op_launch_seconds),
            )

    def slow_down(self, factor: float) -> None:
        for phase in (*self.forward, *self.backward.values()):
            phase.seconds *= factor

    def open_forward(self) -> None:
        self.forward.append(ForwardPhase())
        self._now = ("F", len(self.forward) - 1)
        self._mark(self.forward[-1])

    def reopen_forward(self) -> None:
        """Weights were brought: the phase begins now."""
        self._mark(self.forward[-1])

    def close_forward(self) -> ForwardPhase:
        phase = self.forward[-1]
        self._take(phase)
        self._now = ("F", len(self.forward))
        if self._meter is not None:
            phase.delta_bytes += sum(storage.num_bytes for storage in self._dead) - phase.born_bytes
            for storage in self._dead:
                self._place_death(phase, storage)
        self._ended, self._dead = self._dead, []
        return phase

    def _place_death(self, phase: ForwardPhase, storage: Storage) -> None:
        """In a call's forward. A storage that was there at the call's peak counts as alive until the next call."""
        assert self._meter is not None
        call = len(self.forward) - 1
        is_early = storage.peak < self._meter.peak() and storage.born != call
        storage.died, storage.is_late = ("F", call if is_early else call + 1), not is_early and storage.born != call
        phase.peak_bytes += storage.num_bytes if is_early else 0

    def call_early(self, storage: Storage) -> None:
        """It died after the peak of a forward. Count it as dead from the beginning of that forward, and its bytes as
        part of the peak.
        """
        assert storage.is_late and storage.died is not None
        call = storage.died[1] - 1
        storage.died, storage.is_late = ("F", call), False
        self.forward[call].peak_bytes += storage.num_bytes

    def returned(self) -> None:
        """The root's caller has its outputs, or its loss: what the call itself held (its arguments) is gone, what the
        loss holds is there.
        """
        phase = self.forward[-1]
        phase.delta_bytes += self._read() - self._end
        if self._meter is not None:
            phase.peak_bytes = self._meter.peak() - self._level
            phase.delta_bytes += sum(storage.num_bytes for storage in self._dead)
            for storage in (*self._ended, *self._dead):
                self._place_death(phase, storage)
        self._dead = []

    def begin_backward(self) -> None:
        """Of a loss that is made outside of the model: its own backward, before a gradient reaches the model's outputs,
        counts as the first call's.
        """
        self._of_loss = Phase()
        self._mark(self._of_loss)

    def open_backward(self, call: int) -> None:
        if self._of_loss is not None:
            self.backward[call], self._of_loss = self._of_loss, None
            self._now = ("B", call)
            for storage in self._dead:
                storage.died = self._now
            return
        self._now = ("B", call)
        self.backward[call] = Phase()
        self._mark(self.backward[call])

    def close_backward(self) -> None:
        if self._open is not None and self._of_loss is None:
            phase = self._open
            self._take(phase)
            peak = self._meter.peak() if self._meter is not None else 0
            for storage in self._dead:
                storage.is_early = storage.peak < peak
                phase.delta_bytes += storage.num_bytes
                phase.peak_bytes += storage.num_bytes if storage.is_early else 0
            self._dead = []

    def follow(self, storage: torch.UntypedStorage, born: int = -1, saved_by: int = -1) -> Storage:
        """Count neither its birth in the forward of `born`, which is under way or over, nor its death. -1: its birth is
        counted.
        """
        found = Storage(storage.nbytes(), born, saved_by)
        found.ref = weakref.ref(storage, partial(_dies, weakref.ref(self), found))
        if born >= 0:
            self._without_birth(found)
        return found

    def _without_birth(self, storage: Storage) -> None:
        phase = self.forward[storage.born]
        phase.born_bytes += storage.num_bytes
        if storage.born < self._now[1]:
            phase.delta_bytes -= storage.num_bytes

    def note_death(self, storage: Storage) -> None:
        if self._is_over or self._meter is None:
            return
        if storage.saved_by >= 0:
            if self._now[0] != "F" or self._now[1] <= storage.saved_by:
                return
            storage.born = storage.saved_by
            self._without_birth(storage)
        storage.died, storage.peak = self._now, self._meter.peak()
        self._dead.append(storage)

    def release(self, call: int, free_device_copy: Callable[[], None]) -> None:
        """Drop what a call sent."""
        before, now, dead = self._read(), self._now, len(self._dead)
        self._now = ("R", call)
        free_device_copy()
        self._now = now
        freed = before - self._read()
        self._end -= freed  # counted here, and not once more by `returned`
        self.forward[call].released_bytes = freed - sum(storage.num_bytes for storage in self._dead[dead:])
        del self._dead[dead:]

    def uncounted(self) -> AbstractContextManager[None]:
        """What runs in it is none of the model's operators."""
        return self._meter.paused() if isinstance(self._meter, Observer) else nullcontext()

    def _read(self) -> int:
        return self._meter.level() if self._meter is not None else 0

    def _mark(self, phase: Phase) -> None:
        self._open = phase
        self._dead = []
        self._level = self._read()
        if isinstance(self._meter, Observer):
            self._counted = self._meter.seconds, self._meter.launches
        if self._meter is not None:
            self._meter.reset_peak()
        else:
            self._device.delay_device() if self._ahead else self._device.synchronize()
            self._since = self._device.mark()
            self._issued_since = time.perf_counter()

    def _take(self, phase: Phase) -> None:
        if isinstance(self._meter, Observer):
            phase.seconds = self._meter.seconds - self._counted[0]
            phase.op_launch_seconds = (self._meter.launches - self._counted[1]) * self._device.op_launch_seconds
        if self._meter is None:
            phase.op_launch_seconds = time.perf_counter() - self._issued_since
            phase.ran_ahead = not self._device.has_reached(self._since)
            self._timed.append((phase, self._since, self._device.mark()))
        else:
            phase.peak_bytes = self._meter.peak() - self._level
            self._end = self._read()
            phase.delta_bytes = self._end - self._level
        self._open = None


def bytes_of_phases(phases: Phases, call: int) -> dict[str, Any]:
    """As fields of a Work."""
    forward, backward = phases.forward[call], phases.backward.get(call) or Phase()
    return {
        "forward_peak_bytes": forward.peak_bytes,
        "forward_delta_bytes": forward.delta_bytes,
        "backward_peak_bytes": backward.peak_bytes,
        "backward_delta_bytes": backward.delta_bytes,
    }
