"""The device seam: memory, lanes and a meter, in about a dozen methods. `cpu`, `sim` and `cuda` implement it.

A lane runs its actions in order, beside the other lanes. An action is `begin` (wait, then start), its work, and `end`
(which gives the event that others wait for); `submit` is the three in one for work that is known at once. Reads and
writes name the tensors that an action touches: only `sim` looks at them, to find accesses that nothing orders
(`finds_races`), elsewhere they may be left out.
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
"""What `end` returns; opaque, of one device."""


class Meter(Protocol):
    """Live device bytes, counted from when the meter was started."""

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
    """What it takes a thread to issue an operator, where that is counted and not measured."""
    observes_by_mode = True
    """Whether memory is seen by a dispatch mode, also in a trial run. Autograd adds up gradients out of place under any
    such mode.
    """

    def __init__(self) -> None:
        self.promised: dict[int, int] = {}
        """Bytes that engines on this device have planned for, by engine."""
        self._timeline: Timeline | None = None
        self.oom_margin_bytes = 0
        """Kept free in every plan on top of `overhead_bytes`, since memory has run out once."""

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
        """Host memory for the whole run, zeroed, as flat uint8. `pinned` where copies to or from the device read or
        write it.
        """

    def map_host(self, buffer: Tensor) -> Tensor:
        """Host memory from `host_empty(pinned=True)` as a tensor of the device, over the same bytes."""
        return buffer

    @abstractmethod
    def put(self, tensor: Tensor) -> Tensor:
        """A batch tensor on the device."""

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to copy a small tensor to the host, after what was issued so far. Calling the result waits for the
        copy, and for no more.
        """
        copy = tensor.detach().clone()
        return lambda: copy

    def keep(self, tensor: Tensor) -> Tensor:
        """A model's buffer on the device for the whole run."""
        return tensor.to(self.torch_device)

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """The most device memory that was in use at one time since the engine was opened."""

    def elapsed(self, wall_seconds: float) -> float:
        """Time as this device keeps it."""
        return wall_seconds

    @property
    @abstractmethod
    def free_bytes(self) -> int:
        """What a new engine may plan with, everything else on the device left alone."""

    @property
    def overhead_bytes(self) -> int:
        """Device memory that belongs to no plan: context, library workspaces, the allocator's loss."""
        return 0

    def process_overhead(self) -> ProcessOverhead:
        """What the trial run that has just ended left behind."""
        return ProcessOverhead()

    def expect(self, process_overhead: ProcessOverhead) -> None:  # noqa: B027 - only some devices have any
        """The model's trial run left this, or will have: a trace may be older than the process."""

    def limit(self, num_bytes: int) -> None:  # noqa: B027 - only some devices enforce it
        """Let the process hold at most this much, until `lift_limit`."""

    def lift_limit(self) -> None:  # noqa: B027
        """Undo `limit`, unless an engine is attached that was planned under it."""

    # Lanes.

    @abstractmethod
    def begin(
        self, lane: Lane, *, waits: Sequence[Event], reads: Sequence[Tensor], writes: Sequence[Tensor], name: str = ""
    ) -> None:
        """`name` is for the timeline alone."""

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
    ) -> Event: ...

    @abstractmethod
    def synchronize(self) -> None:
        """Until all lanes are idle. Raises what a background update raised."""

    # Measuring.

    @contextmanager
    def timeline(self) -> Iterator[Timeline]:
        """Record what the lanes do inside. The spans are there when it has ended, which waits for the lanes. A timeline
        that was open is cut short.
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
        """Record what the lanes are given from now on, without waiting for anything. None while somebody else
        records.
        """
        return self._open_timeline() if self._timeline is None else None

    def stop_timeline(self, timeline: Timeline) -> None:
        """Record no more there. What was given to the lanes is still to be collected."""
        timeline.is_open = False
        if self._timeline is timeline:
            self._timeline = None

    def _open_timeline(self) -> Timeline:
        self._timeline = Timeline()
        self._begin_timeline()
        return self._timeline

    def _begin_timeline(self) -> None:  # noqa: B027
        """Note what time zero is."""

    @abstractmethod
    def meter(self) -> AbstractContextManager[Meter]: ...

    def mark(self) -> Any:
        """Where the compute lane will have come to, without waiting for it."""
        return time.perf_counter()

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another. Waits for the lane to come there."""
        return float(end - start)

    def has_reached(self, mark: Any) -> bool:
        """Whether the compute lane has come there. Never waits."""
        return True

    def delay_device(self) -> None:  # noqa: B027 - only what runs beside the issuing thread can
        """Give the issuing thread a head start if it has none, so that marks tell how long the device computes and not
        how long it waits to be told.
        """

    # Random numbers.

    def rng_state(self) -> Tensor | None:
        """Of the device's generator, where it has one beside the host's."""
        return None

    def set_rng_state(self, state: Tensor | None) -> None:  # noqa: B027
        """Back to a state that `rng_state` gave."""

    # Life.

    def open(self, owner: int, budget_bytes: int) -> None:
        """An engine with this budget starts."""
        self.promised[owner] = budget_bytes

    def close(self, owner: int) -> None:
        """It ends."""
        self.promised.pop(owner, None)
        self.lift_limit()

    def forget(self, owner: int) -> None:
        """An engine was dropped without `close`: its memory is free already."""
        self.promised.pop(owner, None)
        self.lift_limit()

    def watching(self, on: bool) -> None:  # noqa: B027
        """Model code runs from now on (or no more): the observer of `sim` counts what it allocates."""

    def on_host(self) -> AbstractContextManager[None]:
        """What is allocated inside is host memory."""
        return nullcontext()
