"""Device `sim`: CPU numerics under a byte budget, on a virtual clock, with race detection.

The Observer counts memory, and an allocation beyond the budget raises DeviceOutOfMemory. LaneClock keeps the time.
Races are found by happens-before, not by time: a lane is ordered after another lane's action only by its own order and
the events it waited for. An access that conflicts with an unordered one raises, even if the clock would hide the race.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from outsize.base.errors import DeviceOutOfMemory, RaceDetected
from outsize.base.units import exact_bytes, show_bytes
from outsize.device.cpu import CpuDevice
from outsize.device.device import Event
from outsize.device.observer import Observer, push_mode, remove_mode
from outsize.device.timeline import Span
from outsize.hardware.lanes import LANES, Lane, LaneClock, require_lane
from outsize.hardware.spec import HardwareSpec

_Known = dict[Lane, int]


@dataclass(frozen=True, slots=True)
class SimEvent:
    ends: float
    known: _Known
    """Per lane, how many of its actions happened before."""


class _Accesses:
    """The last write of a buffer and the reads since, as (lane, count)."""

    def __init__(self) -> None:
        self.write: tuple[Lane, int] | None = None
        self.reads: dict[Lane, int] = {}


class SimDevice(CpuDevice):
    kind = "sim"
    is_simulated = True
    has_own_memory = True
    is_async = True
    finds_races = True

    def __init__(self, spec: HardwareSpec):
        super().__init__()
        self.spec = spec
        self.budget_bytes = spec.gpu_bytes
        self.clock = LaneClock()
        self.observer = Observer(self._check_budget)
        self.observer.active = False
        self._known: dict[Lane, _Known] = {lane: dict.fromkeys(LANES, 0) for lane in LANES}
        self._accesses: dict[int, _Accesses] = {}
        self._names: dict[Lane, str] = {}
        """Name of the action that each lane began last."""

    # Memory.

    def _check_budget(self, num_bytes: int, live_bytes: int) -> None:
        if live_bytes > self.budget_bytes:
            raise DeviceOutOfMemory(
                f"GPU memory is full: an allocation of {show_bytes(num_bytes)} exceeds the budget of "
                f"{show_bytes(self.budget_bytes)} by {show_bytes(live_bytes - self.budget_bytes)}. Raise gpu_memory or "
                "reduce the batch."
            )

    def empty(self, num_bytes: int) -> Tensor:
        with self.observer.paused():
            tensor = super().empty(num_bytes)
        self.observer.adopt(tensor)
        return tensor

    def host_empty(self, num_bytes: int, *, pinned: bool) -> Tensor:
        with self.observer.paused():
            return super().host_empty(num_bytes, pinned=pinned)

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.clone()  # with its autograd history, as a copy to a real device

    def keep(self, tensor: Tensor) -> Tensor:
        with self.observer.paused():
            tensor = tensor.clone()
        self.observer.adopt(tensor)
        return tensor

    @property
    def peak_bytes(self) -> int:
        return self.observer.peak_bytes

    def elapsed(self, wall_seconds: float) -> float:
        return self.clock.now

    @property
    def free_bytes(self) -> int:
        return self.spec.gpu_bytes - sum(self.budgets.values())

    @property
    def overhead_bytes(self) -> int:
        return self.observer.earlier_bytes

    def count_anew(self) -> None:
        if not self.budgets:
            self.observer.begin_anew()

    def on_host(self) -> AbstractContextManager[None]:
        return self.observer.paused()

    def open(self, owner: int, budget_bytes: int, held_bytes: int = 0) -> None:
        super().open(owner, budget_bytes, held_bytes)
        if len(self.budgets) == 1:
            push_mode(self.observer)
            # No action of an earlier engine is in flight, and its buffers' addresses may be reused.
            self.synchronize()
            self._accesses.clear()
            self.observer.reset_peak()
        self._share()

    def _share(self) -> None:
        """Engines on one device share the sum of their budgets."""
        self.budget_bytes = (
            min(self.spec.gpu_bytes, sum(self.budgets.values())) if self.budgets else self.spec.gpu_bytes
        )

    def limit(self, num_bytes: int) -> None:
        """Limit a profiling run to this much, beside the budgets of attached engines, whose models it may also run."""
        self.budget_bytes = min(self.spec.gpu_bytes, num_bytes + sum(self.budgets.values()))

    def lift_limit(self) -> None:
        self._share()

    def close(self, owner: int) -> None:
        super().close(owner)
        if not self.budgets:
            remove_mode(self.observer)

    def watching(self, on: bool) -> None:
        self.observer.active = on

    # Lanes.

    def begin(
        self, lane: Lane, *, waits: Sequence[Event], reads: Sequence[Tensor], writes: Sequence[Tensor], name: str = ""
    ) -> None:
        require_lane(lane)
        for event in waits:
            self.clock.free[lane] = max(self.clock.free[lane], event.ends)
            for other, count in event.known.items():
                self._known[lane][other] = max(self._known[lane][other], count)
        self._touch(lane, reads, writes)
        self._names[lane] = name

    def end(self, lane: Lane, *, reads: Sequence[Tensor], writes: Sequence[Tensor], seconds: float) -> SimEvent:
        self._touch(lane, reads, writes)
        self._known[lane][lane] += 1
        ends = self.clock.run(lane, seconds)
        if self._timeline is not None:
            self._timeline.spans.append(
                Span(lane, self._names.get(lane, ""), ends - seconds - self._zero, ends - self._zero)
            )
        return SimEvent(ends, dict(self._known[lane]))

    def synchronize(self) -> None:
        now = self.clock.now
        done = {lane: self._known[lane][lane] for lane in LANES}
        for lane in LANES:
            self.clock.free[lane] = now
            self._known[lane].update(done)

    def _begin_timeline(self) -> None:
        self._zero = self.clock.now

    def _touch(self, lane: Lane, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Record the accesses of the lane's current action. Raises if one conflicts with an unordered access of another
        lane.
        """
        known = self._known[lane]
        count = known[lane] + 1
        for tensor, writing in [*((t, False) for t in reads), *((t, True) for t in writes)]:
            seen = self._accesses.setdefault(tensor.untyped_storage().data_ptr(), _Accesses())
            earlier = [] if seen.write is None else [("written", *seen.write)]
            if writing:
                earlier += [("read", other, n) for other, n in seen.reads.items()]
            for verb, other, n in earlier:
                if other != lane and n > known[other]:
                    raise RaceDetected(
                        f"{lane} {'writes' if writing else 'reads'} {exact_bytes(tensor.nbytes)} that {other} may not "
                        f"have {verb} yet. This is a bug in outsize: a wait is missing."
                    )
            if writing:
                seen.write, seen.reads = (lane, count), {}
            else:
                seen.reads[lane] = count


class AbsentDevice(SimDevice):
    """A machine that is planned for but not present. Unlike on `sim`, launching operators takes time."""

    def __init__(self, spec: HardwareSpec):
        super().__init__(spec)
        is_real = spec.context_bytes > 0
        self.op_launch_seconds = spec.op_launch_seconds if is_real else 0.0
