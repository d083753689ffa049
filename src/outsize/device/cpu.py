"""Device `cpu`: the host plays the device. Everything completes at once; the numerics are real."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

from outsize.device.device import Device, Event, Meter
from outsize.device.observer import Observer, push_mode, remove_mode
from outsize.hardware.lanes import Lane
from outsize.hardware.spec import HardwareSpec


class CpuDevice(Device):
    kind = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.torch_device = torch.device("cpu")
        memory = psutil.virtual_memory()
        self.spec = HardwareSpec(
            name="cpu", gpu_bytes=memory.total, host_bytes=memory.total, flops=2e11, gpu_bytes_per_second=1e10, h2d_bytes_per_second=1e10,
            d2h_bytes_per_second=1e10, host_bytes_per_second=1e10, host_adam_params_per_second=2e8, gpu_adam_params_per_second=2e8,
            launch_seconds=1e-6, provenance="assumed: copies within host memory",
        )  # fmt: skip

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

    def begin(self, lane: Lane, *, waits: Sequence[Event], reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        pass

    def end(self, lane: Lane, *, reads: Sequence[Tensor], writes: Sequence[Tensor], seconds: float) -> Event:
        return None

    def submit(
        self, lane: Lane, work: Callable[[], None], *, waits: Sequence[Event], reads: Sequence[Tensor], writes: Sequence[Tensor], seconds: float
    ) -> Event:
        work()

    def synchronize(self) -> None:
        pass

    @contextmanager
    def meter(self) -> Iterator[Meter]:
        observer = Observer()
        push_mode(observer)
        try:
            yield observer
        finally:
            remove_mode(observer)

    def seconds(self, wall_seconds: float, flops: float, num_bytes: int) -> float:
        return wall_seconds
