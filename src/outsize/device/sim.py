"""Device `sim`: CPU numerics under a byte budget, on a virtual clock, with race detection.

Memory is what the Observer sees, and a birth beyond the budget raises DeviceOutOfMemory. Time is LaneClock's. Races are
found by happens-before, not by time: a lane knows of another lane's action only through its own order and the events it
waited for, and an access that conflicts with one it does not know of raises, whether or not the clock would have hidden
it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from torch import Tensor

from outsize.base.errors import DeviceOutOfMemory, RaceDetected, tell
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
    """Per lane, how many of its actions surely happened before."""


class _Accesses:
    """Who wrote a buffer last and who has read it since, as (lane, count)."""

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
        self.observer = Observer(self._birth)
        self.observer.active = False
        self._known: dict[Lane, _Known] = {lane: dict.fromkeys(LANES, 0) for lane in LANES}
        self._accesses: dict[int, _Accesses] = {}
        self._names: dict[Lane, str] = {}
        """Of what each lane began last."""

    # Memory.

    def _birth(self, num_bytes: int, live_bytes: int) -> None:
        if live_bytes > self.budget_bytes:
            raise DeviceOutOfMemory(
                tell(
                    f"device memory stays within {show_bytes(self.budget_bytes)} ({exact_bytes(self.budget_bytes)})",
                    f"{exact_bytes(num_bytes)} more would make it {exact_bytes(live_bytes)}",
                    "Give the plan a smaller batch or a larger gpu_memory",
                )
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
        return tensor.clone()  # gradients reach it, as they do through a copy to a real device

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
        return self.spec.gpu_bytes - sum(self.promised.values())

    def on_host(self) -> AbstractContextManager[None]:
        return self.observer.paused()

    def open(self, owner: int, budget_bytes: int) -> None:
        super().open(owner, budget_bytes)
        if len(self.promised) == 1:
            push_mode(self.observer)
            # Nothing of an earlier engine is under way, and its buffers' addresses may come back as others'.
            self.synchronize()
            self._accesses.clear()
            self.observer.reset_peak()
        self._share()

    def _share(self) -> None:
        """Engines on one device may use what they have planned for, together."""
        self.budget_bytes = (
            min(self.spec.gpu_bytes, sum(self.promised.values())) if self.promised else self.spec.gpu_bytes
        )

    def limit(self, num_bytes: int) -> None:
        """Bound a trial run that runs another engine's model too: by this much beside what engines were promised."""
        self.budget_bytes = min(self.spec.gpu_bytes, num_bytes + sum(self.promised.values()))

    def lift_limit(self) -> None:
        self._share()

    def close(self, owner: int) -> None:
        super().close(owner)
        if not self.promised:
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

    def submit(
        self,
        lane: Lane,
        work: Callable[[], None],
        *,
        waits: Sequence[Event],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        seconds: float,
        name: str = "",
    ) -> SimEvent:
        self.begin(lane, waits=waits, reads=reads, writes=writes, name=name)
        with self.observer.paused() if lane == "host" else _as_is():
            work()
        return self.end(lane, reads=reads, writes=writes, seconds=seconds)

    def synchronize(self) -> None:
        now = self.clock.now
        done = {lane: self._known[lane][lane] for lane in LANES}
        for lane in LANES:
            self.clock.free[lane] = now
            self._known[lane].update(done)

    def _begin_timeline(self) -> None:
        self._zero = self.clock.now

    def _touch(self, lane: Lane, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Record accesses of the lane's action now being issued; raise if one of another lane conflicts and is not
        known to be over.
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
                    action = "writes" if writing else "reads"
                    found = f"{lane} {action} {exact_bytes(tensor.nbytes)} that {other} may not have {verb} yet"
                    raise RaceDetected(
                        tell(
                            "every access is ordered after those it conflicts with",
                            found,
                            "This is a bug of outsize: a wait is missing",
                        )
                    )
            if writing:
                seen.write, seen.reads = (lane, count), {}
            else:
                seen.reads[lane] = count


class AbsentDevice(SimDevice):
    """A machine that is not here, to be traced for. `sim` issues its operators in no time; a real machine's Python does
    not.
    """

    def __init__(self, spec: HardwareSpec):
        super().__init__(spec)
        is_real = spec.context_bytes > 0
        self.op_launch_seconds = spec.op_launch_seconds if is_real else 0.0


@contextmanager
def _as_is() -> Iterator[None]:
    yield
