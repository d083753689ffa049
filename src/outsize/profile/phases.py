"""Phases: turns a meter's readings at the borders of visits into peaks and deltas, and a clock's into seconds."""

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outsize.compat import storage_id
from outsize.device.device import Device, Meter
from outsize.device.observer import Observer

WAITED_SECONDS = 5e-3
"""That a thread which is 20 ms ahead of the device takes longer than one that is not, if it waits for it."""


@dataclass(slots=True)
class Phase:
    peak_bytes: int = 0
    delta_bytes: int = 0
    seconds: float = 0.0
    issue_seconds: float = 0.0
    """That the issuing thread took over it, or would."""
    has_lead: bool = False
    """It was issued before the device came to it."""
    waits: bool = False
    """The issuing thread waited for the device in it."""


@dataclass(slots=True)
class ForwardPhase(Phase):
    sent_bytes: int = 0
    released_bytes: int = 0
    late_bytes: int = 0
    late_visit: int = -1


@dataclass(slots=True)
class _Late:
    """A layer's input that is not needed any more, if and while a caller's frame holds it."""

    visit: int
    num_bytes: int
    storage: "weakref.ref[torch.UntypedStorage]"


@dataclass(slots=True)
class SharedTensor:
    """A tensor that layers take beside their input."""

    num_bytes: int
    storage: "weakref.ref[torch.UntypedStorage]"
    visits: list[int]
    maker: int = -1
    """The visit of the layer that left it in an argument, for later layers to take. -1: a region made it, or a layer returned it."""
    readers: set[int] = field(default_factory=set)
    """Visits that compute with it, as far as they ran and a scout looked."""
    requires_grad: bool = False
    died_forward: int = -1
    died_backward: int = -1


class Phases:
    def __init__(self, meter: Meter | None, device: Device, *, ahead: bool):
        """Without a meter only seconds are taken: with the issuing thread `ahead` of the device, as in the midst of a run, or each phase from a standstill."""
        self._meter, self._device, self._ahead = meter, device, ahead
        self.forward: list[ForwardPhase] = []
        self.backward: dict[int, Phase] = {}
        self.held_bytes = 0
        self.shared: list[SharedTensor] = []
        """In the order in which layers first took them."""
        self._shared_by_key: dict[int, SharedTensor] = {}
        self._taken: list[tuple[int, weakref.ref[torch.UntypedStorage]]] = []
        """Visits of layers and the inputs they had."""
        self._late: list[_Late] = []
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
        for phase, start, end in self._timed:
            phase.seconds = self._device.between(start, end)

    def at_best(self, other: "Phases") -> None:
        """The less of what two passes took, this one ahead and the other from standstills: what is more was a hiccup, and a layer's stands for many layers;
        or waiting, of the device for the issuing thread, or of a thread that is ahead and asks the device for a number. One that was held up by something
        else has its lead still."""
        for one, two in (*zip(self.forward, other.forward, strict=True), *((phase, other.backward[visit]) for visit, phase in self.backward.items())):
            one.waits = not one.has_lead and one.issue_seconds - two.issue_seconds > WAITED_SECONDS
            one.seconds, one.issue_seconds = min(one.seconds, two.seconds), min(one.issue_seconds, two.issue_seconds)

    def slow_down(self, factor: float) -> None:
        for phase in (*self.forward, *self.backward.values()):
            phase.seconds *= factor

    def open_forward(self) -> None:
        self.forward.append(ForwardPhase())
        self._mark(self.forward[-1])

    def reopen_forward(self) -> None:
        """Weights were brought: the phase begins now."""
        self._mark(self.forward[-1])

    def close_forward(self) -> ForwardPhase:
        phase = self.forward[-1]
        self._take(phase)
        self._bury(len(self.forward) - 1)
        return phase

    def returned(self) -> None:
        """The root's caller has its outputs, or its loss: what the call itself held (its arguments) is gone, what the loss holds is there."""
        self.forward[-1].delta_bytes += self._read() - self._end
        if self._meter is not None:
            self.forward[-1].peak_bytes = max(self.forward[-1].peak_bytes, self._meter.peak() - self._level)

    def begin_backward(self) -> None:
        """Of a loss that is made outside of the model: its own backward, before a gradient reaches the model's outputs, counts as the first visit's."""
        self._of_loss = Phase()
        self._mark(self._of_loss)

    def open_backward(self, visit: int) -> None:
        if self._of_loss is not None:
            self.backward[visit], self._of_loss = self._of_loss, None
            return
        self.backward[visit] = Phase()
        self._mark(self.backward[visit])

    def close_backward(self) -> None:
        if self._open is not None and self._of_loss is None:
            self._take(self._open)
            self._bury_backward(next(reversed(self.backward)))

    def takes(self, visit: int, hidden: Tensor, others: Iterable[Tensor]) -> None:
        """A layer was called with these."""
        # What one layer takes beside its input may be the input of another, which keeps it too (skip connections).
        storage = hidden.untyped_storage()
        if (known := self.shared_as(storage)) is not None and visit not in known.visits:
            known.visits.append(visit)
        self._taken = [(v, taken) for v, taken in self._taken if taken() is not None]
        self._taken.append((visit, weakref.ref(storage)))
        for tensor in others:
            if storage_id(tensor.untyped_storage()) != storage_id(storage):
                shared = self._share(tensor)
                if visit not in shared.visits:
                    shared.visits.append(visit)

    def leaves(self, visit: int, tensors: Iterable[Tensor]) -> None:
        """A layer has put these into its arguments, for later layers."""
        for tensor in tensors:
            self._share(tensor).maker = visit

    def _share(self, tensor: Tensor) -> SharedTensor:
        storage = tensor.untyped_storage()
        shared = self.shared_as(storage)
        if shared is None:
            shared = SharedTensor(storage.nbytes(), weakref.ref(storage), [visit for visit, taken in self._taken if taken() is storage])
            self.shared.append(shared)
            self._shared_by_key[storage_id(storage)] = shared
        shared.requires_grad |= tensor.requires_grad
        return shared

    def shared_as(self, storage: torch.UntypedStorage) -> SharedTensor | None:
        found = self._shared_by_key.get(storage_id(storage))
        return found if found is not None and found.storage() is storage else None

    def watch(self, visit: int, storage: "weakref.ref[torch.UntypedStorage]") -> None:
        """The forward phase of a layer is over: if its input dies from here on, and still in forward, a frame held it."""
        alive = storage()
        if alive is not None:
            self._late.append(_Late(visit, alive.nbytes(), storage))

    def release(self, visit: int, let_go: Callable[[], None]) -> None:
        """Drop what a visit sent."""
        before = self._read()
        let_go()
        self.forward[visit].released_bytes = before - self._read()
        self._end -= self.forward[visit].released_bytes  # counted here, and not once more by `returned`

    def _bury(self, visit: int) -> None:
        """Deaths that depend on more than the phase they happen in are taken out of its numbers and kept apart."""
        phase = self.forward[visit]
        dead = [late for late in self._late if late.storage() is None]
        self._late = [late for late in self._late if late.storage() is not None]
        for late in dead:
            self.forward[late.visit].late_bytes += late.num_bytes
            self.forward[late.visit].late_visit = visit
            phase.delta_bytes += late.num_bytes
            phase.peak_bytes += late.num_bytes
        for tensor in self.shared:
            if tensor.storage() is None and tensor.died_forward < 0:
                tensor.died_forward = visit
                phase.delta_bytes += tensor.num_bytes
                phase.peak_bytes += tensor.num_bytes

    def _bury_backward(self, visit: int) -> None:
        for tensor in self.shared:
            if tensor.storage() is None and tensor.died_forward < 0 and tensor.died_backward < 0:
                tensor.died_backward = visit
                self.backward[visit].delta_bytes += tensor.num_bytes

    def _read(self) -> int:
        return self._meter.level() if self._meter is not None else 0

    def _mark(self, phase: Phase) -> None:
        self._open = phase
        self._level = self._read()
        if isinstance(self._meter, Observer):
            self._counted = self._meter.seconds, self._meter.issued
        if self._meter is not None:
            self._meter.reset_peak()
        else:
            self._device.fall_behind() if self._ahead else self._device.synchronize()
            self._since = self._device.mark()
            self._issued_since = time.perf_counter()

    def _take(self, phase: Phase) -> None:
        if isinstance(self._meter, Observer):
            phase.seconds = self._meter.seconds - self._counted[0]
            phase.issue_seconds = (self._meter.issued - self._counted[1]) * self._device.issue_seconds
        if self._meter is None:
            phase.issue_seconds = time.perf_counter() - self._issued_since
            phase.has_lead = not self._device.has_reached(self._since)
            self._timed.append((phase, self._since, self._device.mark()))
        else:
            phase.peak_bytes = self._meter.peak() - self._level
            self._end = self._read()
            phase.delta_bytes = self._end - self._level
        self._open = None


def bytes_of_phases(phases: Phases, visit: int) -> dict[str, Any]:
    """As fields of a Work."""
    forward, backward = phases.forward[visit], phases.backward.get(visit) or Phase()
    return {
        "forward_peak_bytes": forward.peak_bytes, "forward_delta_bytes": forward.delta_bytes,
        "backward_peak_bytes": backward.peak_bytes, "backward_delta_bytes": backward.delta_bytes,
    }  # fmt: skip
