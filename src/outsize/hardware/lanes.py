"""The lanes of a machine, and the arithmetic of time on them.

A lane does one thing after another. An action starts when its lane is free and everything it waits for has ended. The
planner's simulator and the `sim` device use the same clock and functions, so a prediction and a simulated run can only
differ if their actions do.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from outsize.hardware.spec import HardwareSpec

Lane = Literal["compute", "h2d", "d2h", "host"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneFacts:
    words: str
    """The lane in plan texts, log lines, reports and on the report page."""
    copy_rate: str = ""
    """Field of HardwareSpec with the bytes per second of copies. Empty: the lane makes none."""
    update_rate: str = ""
    """Field of HardwareSpec with the parameters per second of updates. Empty: the lane makes none."""


LANE_FACTS: dict[Lane, LaneFacts] = {
    "compute": LaneFacts(words="GPU compute", update_rate="gpu_adam_params_per_second"),
    "h2d": LaneFacts(words="copies to the GPU", copy_rate="h2d_bytes_per_second"),
    "d2h": LaneFacts(words="copies to the host", copy_rate="d2h_bytes_per_second"),
    "host": LaneFacts(words="CPU updates", update_rate="host_adam_params_per_second"),
}
"""All lanes. Any other name raises."""
LANES: tuple[Lane, ...] = tuple(LANE_FACTS)
COPY_LANES: tuple[Lane, ...] = tuple(lane for lane, facts in LANE_FACTS.items() if facts.copy_rate)
_COPY_RATES = {str(lane): attrgetter(facts.copy_rate) for lane, facts in LANE_FACTS.items() if facts.copy_rate}
_UPDATE_RATES = {str(lane): attrgetter(facts.update_rate) for lane, facts in LANE_FACTS.items() if facts.update_rate}
REFERENCE_UPDATE_BYTES = 26
"""Bytes that the update of one parameter reads and writes under the optimizer whose rates are calibrated. Other
optimizers' updates take time in proportion to theirs."""
LEAD_SECONDS = 0.1
"""Run-ahead: how far the launching thread gets ahead of the device, which queues about a thousand launches (40 ms of a
1B decoder, 120 ms of an 8B one)."""


def require_lane(lane: str) -> Lane:
    """`lane`, which must be in the table of lanes."""
    if lane not in LANE_FACTS:
        raise ValueError(f"lane {lane!r} is unknown. The lanes are {', '.join(LANES)}.")
    return lane


def lane_words(lane: str) -> str:
    return LANE_FACTS[require_lane(lane)].words


class LaneClock:
    """Records when each lane is free, and how long it was busy. Launching takes no time."""

    def __init__(self) -> None:
        self.free: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self.busy: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self.visible_at = 0.0
        """When the device had received the action issued last. Until then, only a thread can wait for it."""

    def run(self, lane: Lane, seconds: float, after: Iterable[float] = ()) -> float:
        """Put work on a lane; returns when it ends."""
        return self._put(lane, max((self.free[lane], *after)), seconds)

    def issue(
        self, lane: Lane, seconds: float, after: Iterable[tuple[float, float]], launch_seconds: float, *, waits: bool
    ) -> float:
        """Put work on a lane; returns when it ends. `launch_seconds`: CPU time to launch it. `after`: of each action it
        waits for, when it ends and when the device has received it. `waits`: the work contains a host sync.
        """
        return self.run(lane, seconds, (end for end, _ in after))

    def wait(self) -> None:
        """The launching thread waits until the compute lane is idle."""

    def _put(self, lane: Lane, start: float, seconds: float) -> float:
        self.free[lane] = start + seconds
        self.busy[lane] += seconds
        return start + seconds

    @property
    def now(self) -> float:
        """When everything that was put on any lane has ended."""
        return max(self.free.values())


class LaunchClock(LaneClock):
    """A LaneClock with the launching thread: no action starts before that thread reaches it, nor ends before it is
    launched.

    [Note: The launching thread] One thread launches the work of all lanes. It runs the model's Python, and for a
    small layer that takes longer than the GPU's compute. It takes longer still while the host updates, because the
    cores are shared. It runs ahead of the device, by at most LEAD_SECONDS, until it must wait: at a host sync (most
    transformers' decoders look at their position ids), at the end of a step that reads its norm, and at compute that
    needs what the host has not updated yet, since a stream cannot wait for a thread. Copies that need such an update
    are handed to a thread of their lane, and so are the copies after them.
    """

    def __init__(self, launch_slowdown: float) -> None:
        super().__init__()
        self.issued = 0.0
        """When the thread has launched everything so far."""
        self._launch_slowdown = launch_slowdown
        self._held: dict[Lane, float] = dict.fromkeys(LANES, 0.0)

    def issue(
        self, lane: Lane, seconds: float, after: Iterable[tuple[float, float]], launch_seconds: float, *, waits: bool
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
        self.issued += slowed(
            launch_seconds, seconds if waits else 0.0, self.free["host"] - self.issued, self._launch_slowdown
        )
        end = self._put(lane, start, max(seconds, self.issued - start))
        if lane != "compute":
            self._held[lane] = end if lane == "host" else max(self._held[lane], visible_at)
        self.visible_at = self._held[lane]
        return end

    def wait(self) -> None:
        self.issued = max(self.issued, self.free["compute"])


def slowed(launch_seconds: float, computing: float, busy: float, launch_slowdown: float) -> float:
    """Launch seconds while the host updates for another `busy` seconds. Only the part that does not wait for the
    device (`computing`) is slowed down.
    """
    python = max(0.0, launch_seconds - computing)
    extra = (launch_slowdown - 1.0) * python
    if busy < python + extra:
        extra = max(0.0, busy) * (1.0 - 1.0 / launch_slowdown)
    return launch_seconds + extra


def copy_seconds(spec: HardwareSpec, lane: Lane, num_bytes: int) -> float:
    if lane not in _COPY_RATES:
        raise ValueError(f"lane {lane!r} makes no copies. Use one of {', '.join(_COPY_RATES)}.")
    return spec.launch_seconds + num_bytes / float(_COPY_RATES[lane](spec))


def update_seconds(spec: HardwareSpec, lane: Lane, traffic_bytes: float) -> float:
    """`traffic_bytes`: bytes that the update reads and writes."""
    if lane not in _UPDATE_RATES:
        raise ValueError(f"lane {lane!r} makes no updates. Use one of {', '.join(_UPDATE_RATES)}.")
    return spec.launch_seconds + traffic_bytes / REFERENCE_UPDATE_BYTES / float(_UPDATE_RATES[lane](spec))


def compute_seconds(spec: HardwareSpec, flops: float, num_bytes: int) -> float:
    """Seconds of one operator by the roofline model: the longer of arithmetic and memory traffic. A layer is the sum of
    its operators, which run one after another.
    """
    return max(flops / spec.flops, num_bytes / spec.gpu_bytes_per_second)
