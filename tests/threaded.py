"""A CPU device whose copies and updates run on threads of their own, as they may on CUDA: later than they are issued,
beside one another, and failing later.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from outsize.device.cpu import CpuDevice
from outsize.device.device import Event
from outsize.hardware.lanes import LANES, Lane


class ThreadedCpu(CpuDevice):
    def __init__(self, *, seconds: float = 0.002) -> None:
        """`seconds`: by how much everything comes late. Long enough that whoever does not wait is wrong."""
        super().__init__()
        self._late = seconds
        self._threads = {lane: ThreadPoolExecutor(1) for lane in LANES if lane != "compute"}
        self._tasks: list[Future[None]] = []

    def begin(
        self, lane: Lane, *, waits: Sequence[Event], reads: Sequence[Tensor], writes: Sequence[Tensor], name: str = ""
    ) -> None:
        for event in waits:
            if isinstance(event, Future):
                event.result()
        super().begin(lane, waits=(), reads=reads, writes=writes, name=name)

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
        blocks: bool = False,
    ) -> Event:
        if lane == "compute":
            return super().submit(lane, work, waits=waits, reads=reads, writes=writes, seconds=seconds, name=name)
        before = [event for event in waits if isinstance(event, Future)]

        def after() -> None:
            for event in before:
                event.result()
            time.sleep(self._late)
            work()

        self._tasks.append(self._threads[lane].submit(after))
        return self._tasks[-1]

    def synchronize(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.exception()
        for task in tasks:
            task.result()
