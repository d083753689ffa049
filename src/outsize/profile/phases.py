"""Phases: turns a meter's readings at the borders of visits into peaks and deltas, and a clock's into seconds."""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from outsize.device.device import Device, Meter
from outsize.device.observer import Observer


@dataclass(slots=True)
class Phase:
    peak_bytes: int = 0
    delta_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class ForwardPhase(Phase):
    sent_bytes: int = 0
    released_bytes: int = 0
    late_bytes: int = 0
    late_visit: int = -1


@dataclass(slots=True)
class _Late:
    """A sent storage that something else still holds."""

    sent_by: int
    num_bytes: int
    storage: "weakref.ref[torch.UntypedStorage]"


class Phases:
    def __init__(self, meter: Meter | None, device: Device):
        """Without a meter only seconds are taken."""
        self._meter, self._device = meter, device
        self.forward: list[ForwardPhase] = []
        self.backward: dict[int, Phase] = {}
        self.held_bytes = 0
        self._late: list[_Late] = []
        self._open: Phase | None = None
        self._level = 0
        self._since = 0.0
        self._cost = (0.0, 0)
        self._start = 0

    def begin(self) -> None:
        self._start = self._read()

    def finish(self) -> None:
        self.held_bytes = self._read() - self._start

    def open_forward(self) -> None:
        self.forward.append(ForwardPhase())
        self._mark(self.forward[-1])

    def close_forward(self) -> ForwardPhase:
        phase = self.forward[-1]
        self._take(phase)
        self._bury(len(self.forward) - 1)
        return phase

    def open_backward(self, visit: int) -> None:
        self.backward[visit] = Phase()
        self._mark(self.backward[visit])

    def close_backward(self) -> None:
        if self._open is not None:
            self._take(self._open)

    def release(self, visit: int, storages: list[torch.UntypedStorage], let_go: Callable[[], None]) -> None:
        """Drop what a visit sent; what lives on is watched until it dies."""
        watched = [_Late(visit, s.nbytes(), weakref.ref(s)) for s in storages]
        before = self._read()
        storages.clear()
        let_go()
        self.forward[visit].released_bytes = before - self._read()
        self._late += [late for late in watched if late.storage() is not None]

    def _bury(self, visit: int) -> None:
        """Late deaths belong to who sent the storage: the plan counts them apart from the phase in which they happen."""
        dead = [late for late in self._late if late.storage() is None]
        self._late = [late for late in self._late if late.storage() is not None]
        for late in dead:
            sender = self.forward[late.sent_by]
            sender.late_bytes += late.num_bytes
            sender.late_visit = visit
            self.forward[visit].delta_bytes += late.num_bytes
            self.forward[visit].peak_bytes += late.num_bytes

    def _read(self) -> int:
        return self._meter.level() if self._meter is not None else 0

    def _mark(self, phase: Phase) -> None:
        self._open = phase
        self._level = self._read()
        if isinstance(self._meter, Observer):
            self._cost = (self._meter.flops, self._meter.moved_bytes)
        if self._meter is not None:
            self._meter.reset_peak()
        else:
            self._device.synchronize()
        self._since = time.perf_counter()

    def _take(self, phase: Phase) -> None:
        if self._meter is None:
            self._device.synchronize()
        wall = time.perf_counter() - self._since
        flops, moved = 0.0, 0
        if isinstance(self._meter, Observer):
            flops, moved = self._meter.flops - self._cost[0], self._meter.moved_bytes - self._cost[1]
        phase.seconds = self._device.seconds(wall, flops, moved)
        if self._meter is not None:
            phase.peak_bytes = self._meter.peak() - self._level
            phase.delta_bytes = self._read() - self._level
        self._open = None
