"""Device: memory, lanes and measuring, the interface that `cpu`, `sim` and `cuda` implement.

A lane runs its actions in order, beside the other lanes. An action is `begin` (wait, then start), its work, and `end`,
which returns the event that other actions wait for. `submit` does all three for work that is known at once. Reads and
writes are the tensors that an action touches. Only `sim` uses them, to find accesses without an order (`finds_races`);
for other devices they may be empty.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from outsize.calibration.rates import Identity
from outsize.device.timeline import Timeline
from outsize.hardware.host import num_cores
from outsize.hardware.lanes import Lane
from outsize.hardware.spec import HardwareSpec, ProcessOverhead

Event = Any
"""What `end` returns: opaque, valid on its own device."""


class Meter(Protocol):
    """Live device bytes since the meter was started."""

    def level(self) -> int: ...
    def peak(self) -> int: ...
    def reset_peak(self) -> None: ...


class Device(ABC):
    kind: str
    """`cuda`, `cpu` or `sim`: for names and cache keys. Code outside of `device/` branches on the attributes below."""
    torch_device: torch.device
    spec: HardwareSpec
    is_gpu = False
    """A real GPU."""
    is_simulated = False
    """Seconds are computed from the spec, not measured."""
    has_own_memory = True
    """Device memory is not the host's."""
    is_async = True
    """Kernels run beside the thread that launches them, or are simulated to."""
    keeps_guard = True
    """The guard against reading a slot that holds another chunk stays on after the first step."""
    finds_races = False
    saves_calibration = False
    """Whether rates that training steps measure are saved for later plans."""
    op_launch_seconds = 0.0
    """CPU time to launch an operator, if computed from the spec. 0: it is measured."""
    observes_by_mode = True
    """Memory is counted by a dispatch mode, in profiling runs too. Autograd accumulates gradients out of place under
    any such mode.
    """
    has_flash_attention = True

    def __init__(self) -> None:
        self.budgets: dict[int, int] = {}
        """GPU budget in bytes of each engine on this device, by engine id."""
        self._timeline: Timeline | None = None
        self.oom_margin_bytes = 0
        """Kept free in every plan on top of `overhead_bytes`; grows when memory has run out."""

    @property
    def identity(self) -> Identity:
        """What measured rates of this machine are valid for."""
        return Identity(
            gpu="none", driver="none", torch=str(torch.__version__), cores=min(torch.get_num_threads(), num_cores())
        )

    # Memory.

    @abstractmethod
    def empty(self, num_bytes: int) -> Tensor:
        """Device memory for the whole run, as flat uint8."""

    @abstractmethod
    def host_empty(self, num_bytes: int, *, pinned: bool) -> Tensor:
        """Host memory for the whole run, zeroed, as flat uint8. `pinned`: for copies to or from the device."""

    def map_host(self, buffer: Tensor) -> Tensor:
        """A device tensor over the bytes of host memory from `host_empty(pinned=True)`."""
        return buffer

    @abstractmethod
    def put(self, tensor: Tensor) -> Tensor:
        """A batch tensor, copied to the device."""

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start copying a small tensor to the host. Calling the result waits for this copy alone."""
        copy = tensor.detach().clone()
        return lambda: copy

    def keep(self, tensor: Tensor) -> Tensor:
        """A model's buffer, copied to the device for the whole run."""
        return tensor.to(self.torch_device)

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """Peak device memory since the engine was opened."""

    def elapsed(self, wall_seconds: float) -> float:
        """Seconds on this device's clock: wall-clock, or simulated."""
        return wall_seconds

    @property
    @abstractmethod
    def free_bytes(self) -> int:
        """Device memory that a new engine may use."""

    @property
    def overhead_bytes(self) -> int:
        """Device memory outside of plans: CUDA context, library workspaces, allocator fragmentation."""
        return 0

    def prepare_for_plans(self) -> None:  # noqa: B027 - only `cuda` has settings
        """Set the allocator of the process as plans need it, and note what is in use before them."""

    def count_anew(self) -> None:  # noqa: B027 - `cuda` measures it when the first engine opens
        """Count memory from zero. Tensors of earlier engines that are still alive (a loss, outputs, values that a model
        keeps on itself) count as overhead of the next engine.
        """

    def process_overhead(self) -> ProcessOverhead:
        """Process overhead that the last profiling run left in use."""
        return ProcessOverhead()

    def expect(self, process_overhead: ProcessOverhead) -> None:  # noqa: B027 - only some devices have any
        """Expect this process overhead, even if this process has not caused it yet: the profile may be a cached one."""

    def limit(self, num_bytes: int) -> None:  # noqa: B027 - only some devices enforce it
        """Limit the device memory of this process until `lift_limit`."""

    def lift_limit(self) -> None:  # noqa: B027
        """Undo `limit`, unless an engine with a budget is attached."""

    # Lanes.

    @abstractmethod
    def begin(
        self, lane: Lane, *, waits: Sequence[Event], reads: Sequence[Tensor], writes: Sequence[Tensor], name: str = ""
    ) -> None:
        """`name` is only for the timeline."""

    @abstractmethod
    def end(self, lane: Lane, *, reads: Sequence[Tensor], writes: Sequence[Tensor], seconds: float) -> Event: ...

    @abstractmethod
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
        """`blocks`: the work waits for the device or for a file, so an asynchronous device runs it on a thread."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all lanes are idle. Raises the exception of a failed background update."""

    # Measuring.

    @contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Record the lanes' actions within the block. Waits for the lanes at its end, then the spans are complete. A
        timeline that was open is ended.
        """
        self.synchronize()
        if self._timeline is not None:
            self.stop_timeline(self._timeline)
        timeline = self._open_timeline()
        try:
            yield timeline
            self.synchronize()
            timeline.collect()
        finally:
            self.stop_timeline(timeline)

    def start_timeline(self) -> Timeline | None:
        """Record actions from now on, without waiting. None while another timeline is open."""
        return self._open_timeline() if self._timeline is None else None

    def stop_timeline(self, timeline: Timeline) -> None:
        """End a recording. The spans of actions in flight are still to be collected."""
        timeline.is_open = False
        if self._timeline is timeline:
            self._timeline = None

    def _open_timeline(self) -> Timeline:
        self._timeline = Timeline()
        self._begin_timeline()
        return self._timeline

    def _begin_timeline(self) -> None:  # noqa: B027
        """Set the timeline's time zero."""

    @abstractmethod
    def meter(self) -> AbstractContextManager[Meter]: ...

    def mark(self) -> Any:
        """The current end of the compute lane's queue; within work of another lane, of that lane's. Does not wait."""
        return time.perf_counter()

    def wait_for(self, mark: Any) -> None:  # noqa: B027 - work runs at once, or a thread of the device runs it
        """Wait until the device has reached a mark."""

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another. Waits until the lane has reached the second."""
        return float(end - start)

    def has_reached(self, mark: Any) -> bool:
        """Whether the compute lane has reached a mark. Does not wait."""
        return True

    def delay_device(self) -> None:  # noqa: B027 - only an asynchronous device can
        """Keep an idle device busy for a moment, so that launches get ahead of it and the time between marks is compute
        time, not launch time.
        """

    # Random numbers.

    def rng_state(self) -> Tensor | None:
        """State of the device's random generator; None if it uses the host's."""
        return None

    def set_rng_state(self, state: Tensor | None) -> None:  # noqa: B027
        """Restore a state from `rng_state`."""

    # Engines.

    def open(self, owner: int, budget_bytes: int, held_bytes: int = 0) -> None:
        """Register an engine with its GPU budget. `held_bytes`: device memory that it has already."""
        self.budgets[owner] = budget_bytes

    def close(self, owner: int) -> None:
        """Unregister an engine."""
        self.budgets.pop(owner, None)
        self.lift_limit()

    def forget(self, owner: int) -> None:
        """Unregister an engine that was garbage-collected; its memory is already free."""
        self.budgets.pop(owner, None)
        self.lift_limit()

    def watching(self, on: bool) -> None:  # noqa: B027
        """Model code begins or ends to run. `sim` counts its allocations."""

    def on_host(self) -> AbstractContextManager[None]:
        """Allocations within the block are host memory."""
        return nullcontext()
