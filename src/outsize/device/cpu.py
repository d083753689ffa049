"""Device `cpu`: the host is the device. Actions run at once, in the calling thread."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import psutil
import torch
from torch import Tensor

from outsize.device.device import Device, Event, Meter
from outsize.device.observer import Observer, push_mode, remove_mode
from outsize.device.timeline import Span
from outsize.hardware.lanes import Lane, require_lane
from outsize.hardware.spec import HardwareSpec


class CpuDevice(Device):
    kind = "cpu"
    has_own_memory = False
    is_async = False

    def __init__(self) -> None:
        super().__init__()
        self._open: tuple[str, float] | None = None
        """Name and start of the action that runs."""
        self._zero = 0.0
        self.torch_device = torch.device("cpu")
        memory = psutil.virtual_memory()
        self.spec = HardwareSpec(
            name="cpu",
            gpu_bytes=memory.total,
            host_bytes=memory.total,
            flops=2e11,
            gpu_bytes_per_second=1e10,
            h2d_bytes_per_second=1e10,
            d2h_bytes_per_second=1e10,
            host_bytes_per_second=1e10,
            host_adam_params_per_second=2e8,
            gpu_adam_params_per_second=2e8,
            launch_seconds=1e-6,
            provenance="assumed: copies within host memory",
        )

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def host_empty(self, num_bytes: int, *, pinned: bool) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def put(self, tensor: Tensor) -> Tensor:
        return tensor

    @property
    def peak_bytes(self) -> int:
        return int(psutil.Process().memory_info().rss)

    @property
    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def begin(
        self, lane: Lane, *, waits: Sequence[Event], reads: Sequence[Tensor], writes: Sequence[Tensor], name: str = ""
    ) -> None:
        require_lane(lane)
        self._open = (name, time.perf_counter())

    def end(self, lane: Lane, *, reads: Sequence[Tensor], writes: Sequence[Tensor], seconds: float) -> Event:
        if self._timeline is not None and self._open is not None:
            name, start = self._open
            self._timeline.spans.append(Span(lane, name, start - self._zero, time.perf_counter() - self._zero))
        return None

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
        self.begin(lane, waits=waits, reads=reads, writes=writes, name=name)
        try:
            with self.on_host() if lane == "host" else nullcontext():
                work()
        finally:  # work that fails has ended too
            event = self.end(lane, reads=reads, writes=writes, seconds=seconds)
        return event

    def synchronize(self) -> None:
        pass

    def _begin_timeline(self) -> None:
        self._zero = time.perf_counter()

    @contextmanager
    def meter(self) -> Iterator[Meter]:
        observer = Observer()
        push_mode(observer)
        try:
            yield observer
        finally:
            remove_mode(observer)
