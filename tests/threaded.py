"""A CPU device whose updates on the host run on a thread of their own, as on CUDA: later than they are issued, and failing later."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from outsize.device.cpu import CpuDevice
from outsize.device.device import Event
from outsize.hardware.lanes import Lane


class ThreadedCpu(CpuDevice):
    def __init__(self) -> None:
        super().__init__()
        self._worker = ThreadPoolExecutor(1)
        self._tasks: list[Future[None]] = []

    def begin(self, lane: Lane, *, waits: Sequence[Event], reads: Sequence[Tensor], writes: Sequence[Tensor], name: str = "") -> None:
        for event in waits:
            if isinstance(event, Future):
                event.result()
        super().begin(lane, waits=(), reads=reads, writes=writes, name=name)

    def submit(
        self, lane: Lane, work: Callable[[], None], *, waits: Sequence[Event], reads: Sequence[Tensor], writes: Sequence[Tensor], seconds: float,
        name: str = "",
    ) -> Event:  # fmt: skip
        if lane != "host":
            return super().submit(lane, work, waits=waits, reads=reads, writes=writes, seconds=seconds, name=name)

        def after() -> None:
            time.sleep(0.002)  # late enough that whoever does not wait is wrong
            work()

        self._tasks.append(self._worker.submit(after))
        return self._tasks[-1]

    def synchronize(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.exception()
        for task in tasks:
            task.result()
