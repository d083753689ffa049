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


class LaneClock:
    """When each lane is free, and how long it has worked."""

    def __init__(self) -> None:
        self.free: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self.busy: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self.issued = 0.0
        """When the thread that issues everything has issued what was put on lanes so far."""

    def run(self, lane: Lane, seconds: float, after: Iterable[float] = (), *, issue: float = 0.0) -> float:
        """Put work on a lane; returns when it ends. What takes `issue` seconds to issue neither starts before its turn nor ends before it is issued."""
        start = max((self.free[lane], *after, self.issued))
        self.issued += issue
        end = start + seconds
        if self.issued > end:
            end, seconds = self.issued, self.issued - start
        self.free[lane] = end
        self.busy[lane] += seconds
        return end

    def wait(self) -> None:
        """The thread that issues waits until all that was to be computed is."""
        self.issued = max(self.issued, self.free["compute"])

    @property
    def now(self) -> float:
        """When everything that was put on any lane has ended."""
        return max(self.free.values())


def copy_seconds(spec: HardwareSpec, lane: Lane, num_bytes: int) -> float:
    rate = spec.h2d_bytes_per_second if lane == "h2d" else spec.d2h_bytes_per_second
    return spec.launch_seconds + num_bytes / rate


def update_seconds(spec: HardwareSpec, lane: Lane, num_params: int) -> float:
    rate = spec.host_adam_params_per_second if lane == "host" else spec.gpu_adam_params_per_second
    return spec.launch_seconds + num_params / rate


def compute_seconds(spec: HardwareSpec, flops: float, num_bytes: int) -> float:
    """Of one operator, by the roofline: the longer of arithmetic and memory traffic. A layer is the sum of its operators, which come one after the other."""
    return max(flops / spec.flops, num_bytes / spec.gpu_bytes_per_second)


def together(lanes: Iterable[Lane]) -> str:
    """The name of what was measured with these lanes at work: `h2d+host`."""
    at_work = set(lanes)
    return "+".join(lane for lane in LANES if lane in at_work)
