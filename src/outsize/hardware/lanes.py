"""The lanes of a machine and the arithmetic of time on them.

A lane does one thing after another. An action starts when its lane is free and everything it waits for has
ended. The planner's simulator and the `sim` device both keep time with this class and the functions beside
it, so an estimate and a simulated run can only differ if their actions do.
"""

from collections.abc import Iterable
from typing import Literal

from outsize.hardware.spec import HardwareSpec

Lane = Literal["compute", "h2d", "d2h", "host"]
LANES: tuple[Lane, ...] = ("compute", "h2d", "d2h", "host")
LEAD_SECONDS = 0.1
"""So far the thread that issues gets ahead of the device, which queues about a thousand launches: 40 ms of a 1B
decoder, 120 of an 8B one.
"""


class LaneClock:
    """When each lane is free, and how long it has worked. Whoever puts the work there takes no time over it."""

    def __init__(self) -> None:
        self.free: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self.busy: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self.visible_at = 0.0
        """When the device knew of what was issued last: until then nothing can wait for that but a thread."""

    def run(self, lane: Lane, seconds: float, after: Iterable[float] = ()) -> float:
        """Put work on a lane; returns when it ends."""
        return self._put(lane, max((self.free[lane], *after)), seconds)

    def issue(
        self, lane: Lane, seconds: float, after: Iterable[tuple[float, float]], issue: float, *, waits: bool
    ) -> float:
        """Put work on a lane that takes a thread `issue` seconds to put there; returns when it ends. `after`: when what
        it needs ends, and when the device was visible_at of that. `waits`: the thread waits in it until the device has
        come so far."""
        return self.run(lane, seconds, (end for end, _ in after))

    def wait(self) -> None:
        """The thread that issues waits until all that was to be computed is."""

    def _put(self, lane: Lane, start: float, seconds: float) -> float:
        self.free[lane] = start + seconds
        self.busy[lane] += seconds
        return start + seconds

    @property
    def now(self) -> float:
        """When everything that was put on any lane has ended."""
        return max(self.free.values())


class IssuedClock(LaneClock):
    """The same with the thread that puts the work there: no action starts before that thread comes to it, nor ends
    before it is issued.

    [Note: The thread that issues] Lanes work on what they have been visible_at. One thread tells all of them: it runs
    the model's Python, and where a layer is small that takes longer than its computing. It takes longer still while the
    host updates: the cores are shared. It runs ahead of the device, no further than LEAD_SECONDS, until it is held up:
    by a call that asks the device for something (most transformers' decoders look at their position ids), by the end of
    a step that reads its norm, and by work to compute that needs what the host has not updated yet, since a stream
    cannot wait for a thread. Copies in such need are handed to a thread of their lane, and the next ones with them.
    """

    def __init__(self, launch_slowdown: float) -> None:
        super().__init__()
        self.issued = 0.0
        """When the thread has issued what was put on lanes so far."""
        self._busy_issue = launch_slowdown
        self._held: dict[Lane, float] = dict.fromkeys(LANES, 0.0)

    def issue(
        self, lane: Lane, seconds: float, after: Iterable[tuple[float, float]], issue: float, *, waits: bool
    ) -> float:
        after = tuple(after)
        visible_at = max((visible_at for _, visible_at in after), default=0.0)
        if lane == "compute" and visible_at > self.issued:
            self.issued = visible_at
        start = max((self.free[lane], self.issued, *(end for end, _ in after)))
        if waits:
            self.issued = start
        elif lane == "compute" and start - LEAD_SECONDS > self.issued:
            self.issued = start - LEAD_SECONDS
        self.issued += slowed(issue, seconds if waits else 0.0, self.free["host"] - self.issued, self._busy_issue)
        end = self._put(lane, start, max(seconds, self.issued - start))
        if lane != "compute":
            self._held[lane] = end if lane == "host" else max(self._held[lane], visible_at)
        self.visible_at = self._held[lane]
        return end

    def wait(self) -> None:
        self.issued = max(self.issued, self.free["compute"])


def slowed(issue: float, computing: float, busy: float, launch_slowdown: float) -> float:
    """What issuing takes with the host at work for another `busy` seconds: but for what of it is waiting for the
    device, so much longer meanwhile.
    """
    python = max(0.0, issue - computing)
    extra = (launch_slowdown - 1.0) * python
    if busy < python + extra:
        extra = max(0.0, busy) * (1.0 - 1.0 / launch_slowdown)
    return issue + extra


def copy_seconds(spec: HardwareSpec, lane: Lane, num_bytes: int) -> float:
    rate = spec.h2d_bytes_per_second if lane == "h2d" else spec.d2h_bytes_per_second
    return spec.launch_seconds + num_bytes / rate


def update_seconds(spec: HardwareSpec, lane: Lane, num_params: int, traffic: float = 1.0) -> float:
    """`traffic`: memory traffic of the optimizer's update, relative to AdamW's, whose rates the spec has."""
    rate = spec.host_adam_params_per_second if lane == "host" else spec.gpu_adam_params_per_second
    return spec.launch_seconds + num_params * traffic / rate


def compute_seconds(spec: HardwareSpec, flops: float, num_bytes: int) -> float:
    """Of one operator, by the roofline: the longer of arithmetic and memory traffic. A layer is the sum of its
    operators, which come one after the other.
    """
    return max(flops / spec.flops, num_bytes / spec.gpu_bytes_per_second)


def together(lanes: Iterable[Lane]) -> str:
    """The name of what was measured with these lanes at work: `h2d+host`."""
    at_work = set(lanes)
    return "+".join(lane for lane in LANES if lane in at_work)
