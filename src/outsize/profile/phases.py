"""Phases: the peak, the change and the seconds of every block call's forward and backward, read from a meter and a
clock where one call ends and the next begins.

A storage that outlives its call is *tracked* (profile/lifetimes.py): no phase counts when it is freed, and some do not
count its allocation, since both depend on the strategies of other calls.
"""

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

HOST_SYNC_SECONDS = 5e-3
"""A CPU that runs 20 ms ahead of the GPU needs at least this much longer for a phase if it waits for the GPU in it."""


@dataclass(slots=True)
class Phase:
    peak_bytes: int = 0
    delta_bytes: int = 0
    seconds: float = 0.0
    launch_seconds: float = 0.0
    """CPU time to launch its kernels."""
    ran_ahead: bool = False
    """The CPU launched all of it before the GPU began it."""
    syncs_host: bool = False
    """The CPU waited for the GPU in it."""


@dataclass(slots=True)
class ForwardPhase(Phase):
    sent_bytes: int = 0
    released_bytes: int = 0
    tracked_bytes: int = 0
    """Allocations of tracked storages that `delta_bytes` does not include."""


PhaseName = tuple[Literal["forward", "release", "backward"], int]
"""The forward of a call, the release of its offloaded activations, or its backward."""


@dataclass(slots=True, eq=False)
class TrackedStorage:
    num_bytes: int
    allocated_in: int
    """The call whose forward allocated it, if that forward's phase does not count it; -1 if it does."""
    saved_by: int = -1
    """Only the graph of this call holds it. It is tracked only if it is freed in the forward of a later call."""
    freed: PhaseName | None = None
    """`forward`: it was freed before the peak of that call's forward, or before that forward began."""
    peak_when_freed: int = 0
    """The meter's peak at that time."""
    is_freed_after_peak: bool = False
    """It was freed in the forward before the one that `freed` names, after the peak of that forward."""
    is_freed_before_peak: bool = False
    """It was freed in a backward before the peak of that backward. That peak is given as if it were still there."""
    ref: "weakref.ref[torch.UntypedStorage] | None" = None


def _on_free(phases: "weakref.ref[Phases]", storage: TrackedStorage, _: object) -> None:
    if (target := phases()) is not None:
        target.note_free(storage)


class Phases:
    def __init__(self, meter: Meter | None, device: Device, *, ahead: bool):
        """Without a meter, only seconds are measured: with the CPU `ahead` of the GPU, as in the middle of a run, or
        synchronized before each phase.
        """
        self._meter, self._device, self._ahead = meter, device, ahead
        self.forward: list[ForwardPhase] = []
        self.backward: dict[int, Phase] = {}
        self.held_bytes = 0
        self._now: PhaseName = ("forward", 0)
        self._freed: list[TrackedStorage] = []
        """Since the open phase began, or since the last one ended."""
        self._freed_in_last_forward: list[TrackedStorage] = []
        self._is_finished = False
        self._open: Phase | None = None
        self._loss_phase: Phase | None = None
        self._before: Phase | None = None
        """What a loss runs before the model's first call: another model's forward."""
        self._level = 0
        self._start_mark: Any = None
        self._launch_start = 0.0
        self._timed: list[tuple[Phase, Any, Any]] = []
        self._counts_at_start = (0.0, 0.0)
        """Seconds and operators that the observer had counted when the phase began."""
        self._first_level = 0
        self._last_level = 0

    def begin(self) -> None:
        self._first_level = self._read_level()

    def begin_loss(self) -> None:
        """A loss outside of the model begins. What it runs before the model's first call counts as part of that."""
        self._before = Phase()
        self._start(self._before)

    def finish(self) -> None:
        self.held_bytes = self._read_level() - self._first_level
        self._is_finished = True
        for phase, start, end in self._timed:
            phase.seconds = self._device.between(start, end)
        if self._before is not None and self.forward:
            _prepend(self._before, self.forward[0])

    def take_minimum(self, synchronized: "Phases") -> None:
        """Take the minimum of two timing passes: this one with the CPU ahead, the other synchronized before each phase.

        The larger value contains noise, GPU idle time or a host sync, and one layer stands for many. A phase syncs the
        host if the pass with the CPU ahead was slower by more than HOST_SYNC_SECONDS and the CPU had lost its lead.
        """
        for one, two in (
            *zip(self.forward, synchronized.forward, strict=True),
            *((phase, synchronized.backward[call]) for call, phase in self.backward.items()),
        ):
            one.syncs_host = not one.ran_ahead and one.launch_seconds - two.launch_seconds > HOST_SYNC_SECONDS
            one.seconds = min(one.seconds, two.seconds)
            one.launch_seconds = min(one.launch_seconds, two.launch_seconds)

    def scale_seconds(self, factor: float) -> None:
        for phase in (*self.forward, *self.backward.values()):
            phase.seconds *= factor

    def open_forward(self) -> None:
        if self._before is not None and not self.forward:
            self._end(self._before)
        self.forward.append(ForwardPhase())
        self._now = ("forward", len(self.forward) - 1)
        self._start(self.forward[-1])

    def restart_forward(self) -> None:
        """Begin the open phase anew: weights have been copied to the device since."""
        self._start(self.forward[-1])

    def close_forward(self) -> ForwardPhase:
        phase = self.forward[-1]
        self._end(phase)
        self._now = ("forward", len(self.forward))
        if self._meter is not None:
            phase.delta_bytes += sum(storage.num_bytes for storage in self._freed) - phase.tracked_bytes
            for storage in self._freed:
                self._assign_to_forward(phase, storage)
        self._freed_in_last_forward, self._freed = self._freed, []
        return phase

    def _assign_to_forward(self, phase: ForwardPhase, storage: TrackedStorage) -> None:
        """Say in which forward a storage was freed. If it was there at the peak of the last one, that is the next."""
        assert self._meter is not None
        call = len(self.forward) - 1
        is_own = storage.allocated_in == call
        is_before_peak = storage.peak_when_freed < self._meter.peak() and not is_own
        storage.freed = ("forward", call if is_before_peak else call + 1)
        storage.is_freed_after_peak = not is_before_peak and not is_own
        phase.peak_bytes += storage.num_bytes if is_before_peak else 0

    def count_as_freed_before_peak(self, storage: TrackedStorage) -> None:
        """Count a storage that was freed after the peak of a forward as freed when that forward began, and add its
        bytes to the peak.
        """
        assert storage.is_freed_after_peak and storage.freed is not None
        call = storage.freed[1] - 1
        storage.freed, storage.is_freed_after_peak = ("forward", call), False
        self.forward[call].peak_bytes += storage.num_bytes

    def forward_returned(self) -> None:
        """The caller of the model has its outputs, or its loss: the arguments of the call are freed, and what the loss
        holds is allocated.
        """
        phase = self.forward[-1]
        phase.delta_bytes += self._read_level() - self._last_level
        if self._meter is not None:
            phase.peak_bytes = self._meter.peak() - self._level
            phase.delta_bytes += sum(storage.num_bytes for storage in self._freed)
            for storage in (*self._freed_in_last_forward, *self._freed):
                self._assign_to_forward(phase, storage)
        self._freed = []

    def begin_loss_backward(self) -> None:
        """The backward of a loss outside of the model, before a gradient reaches the model's outputs. It counts as part
        of the first call's backward.
        """
        self._loss_phase = Phase()
        self._start(self._loss_phase)

    def open_backward(self, call: int) -> None:
        self._now = ("backward", call)
        if self._loss_phase is not None:
            self.backward[call], self._loss_phase = self._loss_phase, None
            for storage in self._freed:
                storage.freed = self._now
            return
        self.backward[call] = Phase()
        self._start(self.backward[call])

    def close_backward(self) -> None:
        if self._open is None or self._loss_phase is not None:
            return
        phase = self._open
        self._end(phase)
        peak = self._meter.peak() if self._meter is not None else 0
        for storage in self._freed:
            storage.is_freed_before_peak = storage.peak_when_freed < peak
            phase.delta_bytes += storage.num_bytes
            phase.peak_bytes += storage.num_bytes if storage.is_freed_before_peak else 0
        self._freed = []

    def track(self, storage: torch.UntypedStorage, allocated_in: int = -1, saved_by: int = -1) -> TrackedStorage:
        """Do not count its allocation in the forward of `allocated_in` (-1: count it), nor its free."""
        found = TrackedStorage(storage.nbytes(), allocated_in, saved_by)
        found.ref = weakref.ref(storage, partial(_on_free, weakref.ref(self), found))
        if allocated_in >= 0:
            self._exclude_allocation(found)
        return found

    def _exclude_allocation(self, storage: TrackedStorage) -> None:
        phase = self.forward[storage.allocated_in]
        phase.tracked_bytes += storage.num_bytes
        if storage.allocated_in < self._now[1]:  # that phase is closed
            phase.delta_bytes -= storage.num_bytes

    def note_free(self, storage: TrackedStorage) -> None:
        if self._is_finished or self._meter is None:
            return
        if storage.saved_by >= 0:
            if self._now[0] != "forward" or self._now[1] <= storage.saved_by:
                return
            storage.allocated_in = storage.saved_by
            self._exclude_allocation(storage)
        storage.freed, storage.peak_when_freed = self._now, self._meter.peak()
        self._freed.append(storage)

    def release(self, call: int, free_device_copy: Callable[[], None]) -> None:
        """Free the device memory of the activations that a call has sent to the host."""
        before, now, num_freed = self._read_level(), self._now, len(self._freed)
        self._now = ("release", call)
        free_device_copy()
        self._now = now
        num_bytes = before - self._read_level()
        self._last_level -= num_bytes  # counted here, so not again by `forward_returned`
        self.forward[call].released_bytes = num_bytes - sum(storage.num_bytes for storage in self._freed[num_freed:])
        del self._freed[num_freed:]

    def uncounted(self) -> AbstractContextManager[None]:
        """A context for operators that are not the model's: they do not count."""
        return self._meter.paused() if isinstance(self._meter, Observer) else nullcontext()

    def _read_level(self) -> int:
        return self._meter.level() if self._meter is not None else 0

    def _start(self, phase: Phase) -> None:
        self._open = phase
        self._freed = []
        self._level = self._read_level()
        if isinstance(self._meter, Observer):
            self._counts_at_start = self._meter.seconds, self._meter.launches
        if self._meter is not None:
            self._meter.reset_peak()
        else:
            self._device.delay_device() if self._ahead else self._device.synchronize()
            self._start_mark = self._device.mark()
            self._launch_start = time.perf_counter()

    def _end(self, phase: Phase) -> None:
        if isinstance(self._meter, Observer):
            phase.seconds = self._meter.seconds - self._counts_at_start[0]
            phase.launch_seconds = (self._meter.launches - self._counts_at_start[1]) * self._device.op_launch_seconds
        if self._meter is None:
            phase.launch_seconds = time.perf_counter() - self._launch_start
            phase.ran_ahead = not self._device.has_reached(self._start_mark)
            self._timed.append((phase, self._start_mark, self._device.mark()))
        else:
            phase.peak_bytes = self._meter.peak() - self._level
            self._last_level = self._read_level()
            phase.delta_bytes = self._last_level - self._level
        self._open = None


def _prepend(first: Phase, phase: Phase) -> None:
    """Add an earlier phase to a phase."""
    phase.peak_bytes = max(first.peak_bytes, first.delta_bytes + phase.peak_bytes)
    phase.delta_bytes += first.delta_bytes
    phase.seconds += first.seconds
    phase.launch_seconds += first.launch_seconds
    phase.ran_ahead = phase.ran_ahead and first.ran_ahead


def bytes_of_phases(phases: Phases, call: int) -> dict[str, Any]:
    """The bytes of a call, as fields of a Work."""
    forward, backward = phases.forward[call], phases.backward.get(call) or Phase()
    return {
        "forward_peak_bytes": forward.peak_bytes,
        "forward_delta_bytes": forward.delta_bytes,
        "backward_peak_bytes": backward.peak_bytes,
        "backward_delta_bytes": backward.delta_bytes,
    }
