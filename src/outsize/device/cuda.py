"""Device `cuda`: one NVIDIA GPU. Lanes are streams (compute: the model's current stream; copies: two of our own) and a
thread for CPU updates. An event is a CUDA event, or the future of a thread's task. A stream cannot wait for a future: a
copy that depends on one is issued by a thread of its lane. Only the compute lane makes the launching thread wait.

Memory: homes, slots and arenas are allocated once. After that only the model's own operators use the allocator, on the
compute stream. A tensor that a copy stream reads stays referenced until the compute stream has waited for that copy, so
its memory is not reused too early.
"""

import gc
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from outsize import compat
from outsize.base.log import log
from outsize.base.units import show_bytes
from outsize.calibration.rates import Identity, machine_spec
from outsize.device.arena import arena, pinned_arena
from outsize.device.device import Device, Event, Meter
from outsize.device.nvml import bytes_of_other_processes
from outsize.device.timeline import Span
from outsize.hardware.lanes import COPY_LANES, Lane
from outsize.hardware.spec import ProcessOverhead

_SLACK_BYTES = 64 * 2**20
"""Kept free beside the allocator's share: small plans lose a larger share to fragmentation."""
_MOST_OVERHEAD_BYTES = 2**30
"""Upper bound of kernels and of workspaces. A decoder's take 240 and 64 MiB."""
_READINGS = 5
"""Attempts to read the GPU's memory while other processes do not allocate."""
_HEAD_START_CYCLES = 40_000_000
"""About 20 ms: longer than launching a few layers takes."""


class CudaDevice(Device):
    kind = "cuda"
    is_gpu = True
    keeps_guard = False  # it takes time at every operator
    observes_by_mode = False
    saves_calibration = True

    def __init__(self, index: int):
        super().__init__()
        self.torch_device = torch.device("cuda", index)
        torch.cuda.init()
        self._is_prepared = False
        self._streams = {lane: torch.cuda.Stream(self.torch_device) for lane in COPY_LANES}
        self._threads: dict[Lane, ThreadPoolExecutor] = {}
        """One thread per lane, from its first task until the last engine closes."""
        self._tasks: list[Future[tuple[Any, Any]]] = []
        self._last: dict[Lane, Future[tuple[Any, Any]]] = {}
        """The last task of each lane's thread."""
        self._began: dict[Lane, tuple[str, torch.cuda.Event]] = {}
        self._zero: tuple[float, torch.cuda.Event] = (0.0, torch.cuda.Event())
        self.spec = machine_spec(self.identity, gpu_bytes=self._total, host_bytes=psutil.virtual_memory().total)
        self._limit = self._total
        self._given_fraction = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        """The limit that the process had before."""
        self._at_start = (self._outside, torch.cuda.memory_allocated(self.torch_device))
        """GPU memory in use at the start: outside of the allocator, and inside it."""
        self._workspaces = 0
        self._expected = ProcessOverhead()
        self._has_opened = False
        self.trial_peak_bytes = 0
        """Peak of the profiling run, before the engine opened."""

    @property
    def _total(self) -> int:
        return torch.cuda.get_device_properties(self.torch_device).total_memory

    @property
    def has_flash_attention(self) -> bool:  # type: ignore[override]
        return torch.cuda.get_device_capability(self.torch_device) >= (8, 0)

    @property
    def identity(self) -> Identity:
        file = Path("/proc/driver/nvidia/version")
        driver = re.search(r"\d+\.\d[\d.]*", file.read_text()) if file.exists() else None
        name = torch.cuda.get_device_properties(self.torch_device).name
        return replace(super().identity, gpu=name, driver=driver[0] if driver else "unknown")

    # Memory.

    def empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def host_empty(self, num_bytes: int, *, pinned: bool) -> Tensor:
        return pinned_arena(num_bytes) if pinned else arena(num_bytes)

    def map_host(self, buffer: Tensor) -> Tensor:
        if not buffer.numel():
            return torch.empty_like(buffer, device=self.torch_device)
        with torch.cuda.device(self.torch_device):
            return torch.as_tensor(_MappedHost(buffer), device=self.torch_device)

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch_device, non_blocking=True)

    def fetch(self, tensor: Tensor) -> Callable[[], Tensor]:
        copy = tensor.detach().to("cpu", non_blocking=True)
        event = self._mark("compute", timed=False)

        def wait() -> Tensor:
            event.synchronize()
            return copy

        return wait

    @property
    def _outside(self) -> int:
        """GPU memory of this process outside of the allocator: its context, with kernels and libraries. That of other
        processes is included where NVML does not tell it.
        """
        for _ in range(_READINGS):
            others = self._of_others
            free, total = torch.cuda.mem_get_info(self.torch_device)
            if others == self._of_others:  # none of them allocated between the two readings
                break
        return max(0, total - free - torch.cuda.memory_reserved(self.torch_device) - others)

    @property
    def _of_others(self) -> int:
        return bytes_of_other_processes(str(torch.cuda.get_device_properties(self.torch_device).uuid))

    @property
    def free_bytes(self) -> int:
        return self._total - self._of_others - sum(self.budgets.values())

    @property
    def _loaded(self) -> int:
        """GPU memory of kernels loaded since the start."""
        return max(0, self._outside - self._at_start[0])

    @property
    def _outside_soon(self) -> int:
        return self._outside + max(0, self._expected.code_bytes - self._loaded)

    @property
    def _allocated_by_libraries(self) -> int:
        """With an engine attached, allocated memory is its own; the libraries' part was measured before."""
        return self._workspaces if self.budgets else torch.cuda.memory_allocated(self.torch_device)

    def process_overhead(self) -> ProcessOverhead:
        if self._has_opened:  # memory in use may belong to an engine or a training loop
            return self._expected
        gc.collect()
        torch.cuda.empty_cache()
        # Tensors of the user are no overhead of later processes.
        workspaces = torch.cuda.memory_allocated(self.torch_device) - self._at_start[1]
        return ProcessOverhead(
            code_bytes=min(self._loaded, _MOST_OVERHEAD_BYTES),
            workspace_bytes=min(max(0, workspaces), _MOST_OVERHEAD_BYTES),
            host_bytes=psutil.Process().memory_info().rss,
        )

    def expect(self, process_overhead: ProcessOverhead) -> None:
        self._expected = process_overhead

    def prepare_for_plans(self) -> None:
        if not self._is_prepared:
            self._is_prepared = True
            _use_expandable_segments(self.torch_device)
            self._at_start = (self._outside, torch.cuda.memory_allocated(self.torch_device))

    @property
    def overhead_bytes(self) -> int:
        """CUDA context, kernels, library workspaces and allocator fragmentation."""
        torch.cuda.empty_cache()
        workspaces = max(self._allocated_by_libraries, self._at_start[1] + self._expected.workspace_bytes)
        return self._outside_soon + workspaces + _SLACK_BYTES + int(self._limit * self.spec.allocator_share)

    def limit(self, num_bytes: int) -> None:
        """`num_bytes` is the total with the CUDA context. The allocator gets the rest, and other engines' budgets."""
        self._limit = min(num_bytes + sum(self.budgets.values()), self._total - self._of_others)
        torch.cuda.set_per_process_memory_fraction(
            max(0.0, (self._limit - self._outside_soon) / self._total), self.torch_device
        )

    def lift_limit(self) -> None:
        if not self.budgets:
            self._limit = self._total
            torch.cuda.set_per_process_memory_fraction(self._given_fraction, self.torch_device)

    def open(self, owner: int, budget_bytes: int, held_bytes: int = 0) -> None:
        super().open(owner, budget_bytes, held_bytes)
        torch.cuda.empty_cache()
        self.trial_peak_bytes = torch.cuda.max_memory_allocated(self.torch_device)
        if len(self.budgets) == 1:
            self._workspaces = max(
                torch.cuda.memory_allocated(self.torch_device) - held_bytes,
                self._at_start[1] + self._expected.workspace_bytes,
            )
        self._has_opened = True
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def close(self, owner: int) -> None:
        super().close(owner)
        self.synchronize()
        torch.cuda.empty_cache()
        if not self.budgets:
            for thread in self._threads.values():
                thread.shutdown()
            self._threads, self._last = {}, {}

    @property
    def peak_bytes(self) -> int:
        """Without library workspaces: they are part of `overhead_bytes`, not of a plan."""
        return torch.cuda.max_memory_allocated(self.torch_device) - self._workspaces

    # Lanes.

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        if lane == "compute":
            return torch.cuda.current_stream(self.torch_device)
        if lane not in self._streams:
            raise ValueError(
                f"lane {lane!r} has no CUDA stream. Lanes with one are compute, {', '.join(self._streams)}."
            )
        return self._streams[lane]

    def begin(
        self, lane: Lane, *, waits: Sequence[Event], reads: Sequence[Tensor], writes: Sequence[Tensor], name: str = ""
    ) -> None:
        self._wait(lane, waits)
        if self._timeline is not None:
            self._began[lane] = (name, self._mark(lane, timed=True))

    def end(self, lane: Lane, *, reads: Sequence[Tensor], writes: Sequence[Tensor], seconds: float) -> Event:
        event = self._mark(lane, timed=self._timeline is not None)
        if self._timeline is not None and lane in self._began:
            self._timeline.add_later(partial(_span, lane, *self._began.pop(lane), event, zero=self._zero[1]))
        return event

    def _wait(self, lane: Lane, waits: Sequence[Event]) -> None:
        """Make the lane's stream wait for events, and this thread for futures."""
        for event in _device_events(waits):
            self._stream(lane).wait_event(event)

    def _mark(self, lane: Lane, *, timed: bool) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)
        with torch.cuda.device(self.torch_device):
            event.record(self._stream(lane))
        return event

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
        if lane == "host":
            task = self._hand_over(lane, partial(self._update, tuple(waits), work))
            if self._timeline is not None:
                self._timeline.add_later(partial(_host_span, name, task, zero=self._zero[0]))
            return task
        issue = partial(self._issue, lane, tuple(waits), work, timed=self._timeline is not None)
        if blocks or self._is_held_up(lane, waits):
            task = self._hand_over(lane, issue)
            if self._timeline is not None:
                self._timeline.add_later(partial(_issued_span, lane, name, task, zero=self._zero[1]))
            return task
        start, end = issue()
        if self._timeline is not None and start is not None:
            self._timeline.add_later(partial(_span, lane, name, start, end, zero=self._zero[1]))
        return end

    def _is_held_up(self, lane: Lane, waits: Sequence[Event]) -> bool:
        """Whether a copy would make the launching thread wait for a CPU update. The lane's own thread waits then, and
        issues the copies after it too, since a lane keeps its order. Without this, a resident weight that the host
        updates delayed all forwards until the last update."""
        last = self._last.get(lane)
        if lane not in self._streams:
            return False
        return (last is not None and not last.done()) or any(
            isinstance(event, Future) and not event.done() for event in waits
        )

    def _hand_over(self, lane: Lane, work: Callable[[], tuple[Any, Any]]) -> "Future[tuple[Any, Any]]":
        self._tasks = [task for task in self._tasks if not task.done() or task.exception() is not None]
        if lane not in self._threads:
            self._threads[lane] = ThreadPoolExecutor(1, thread_name_prefix=f"outsize-{lane}")
        task = self._last[lane] = self._threads[lane].submit(work)
        self._tasks.append(task)
        return task

    def _issue(
        self, lane: Lane, waits: tuple[Event, ...], work: Callable[[], None], *, timed: bool
    ) -> tuple[torch.cuda.Event | None, torch.cuda.Event]:
        """Issue work on the lane's stream. Returns its start event, if timed, and its end event."""
        self._wait(lane, waits)
        start = self._mark(lane, timed=True) if timed else None
        with torch.cuda.stream(self._stream(lane)):
            work()
        return start, self._mark(lane, timed=timed)

    def _update(self, waits: tuple[Event, ...], work: Callable[[], None]) -> tuple[float, float]:
        """Runs on the host lane's thread; returns the start and end times of the work."""
        for event in _device_events(waits):
            event.synchronize()
        start = time.perf_counter()
        work()
        return start, time.perf_counter()

    def synchronize(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.exception()  # waits for all before the first failure is raised
        for task in tasks:
            task.result()
        torch.cuda.synchronize(self.torch_device)

    # Measuring.

    def _begin_timeline(self) -> None:
        self._began = {}
        self._zero = (time.perf_counter(), self._mark("compute", timed=True))

    @contextmanager
    def meter(self) -> Iterator[Meter]:
        torch.cuda.synchronize(self.torch_device)
        yield _AllocatorMeter(self.torch_device)

    def mark(self) -> torch.cuda.Event:
        return self._mark("compute", timed=True)

    def wait_for(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def has_reached(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def delay_device(self) -> None:
        if torch.cuda.current_stream(self.torch_device).query():
            compat.cuda().sleep(_HEAD_START_CYCLES)

    # Random numbers.

    def rng_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: Tensor | None) -> None:
        if state is not None:
            torch.cuda.set_rng_state(state, self.torch_device)


def _use_expandable_segments(device: torch.device) -> None:
    """Expandable segments lose less memory to fragmentation near the limit. A setting of the user is kept."""
    if any(
        "expandable_segments" in os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    ):
        return
    if held := torch.cuda.memory_reserved(device):
        log.warning(
            "PyTorch's CUDA allocator is switched to expandable segments, but %s were allocated on %s before and stay "
            "fragmented. Call outsize.prepare before other code uses the GPU, or set "
            "PYTORCH_ALLOC_CONF=expandable_segments:True.",
            show_bytes(held),
            device,
        )
    compat.cuda().set_allocator_settings("expandable_segments:True")


class _MappedHost:
    """Page-locked host memory that the GPU addresses by the same pointer. Measured on the H200: 50 to 55 GB/s, the rate
    of copies.
    """

    def __init__(self, buffer: Tensor):
        self._buffer = buffer
        self.__cuda_array_interface__ = {
            "shape": tuple(buffer.shape),
            "typestr": "|u1",
            "data": (buffer.data_ptr(), False),
            "version": 3,
            "strides": None,
        }


def _device_events(waits: Sequence[Event]) -> Iterator[torch.cuda.Event]:
    """The CUDA events to wait for. Resolves futures to events, blocking until the worker thread has issued its copy."""
    for event in waits:
        done = event.result()[1] if isinstance(event, Future) else event
        if isinstance(done, torch.cuda.Event):
            yield done


def _span(
    lane: Lane, name: str, start: torch.cuda.Event, end: torch.cuda.Event, *, zero: torch.cuda.Event
) -> Span | None:
    if not (zero.query() and end.query()):
        return None
    began = zero.elapsed_time(start) / 1e3  # negative if a copy ran before the compute stream reached `zero`
    return Span(lane, name, began, began + start.elapsed_time(end) / 1e3)


def _issued_span(lane: Lane, name: str, task: "Future[tuple[Any, Any]]", *, zero: torch.cuda.Event) -> Span | None:
    return _span(lane, name, *task.result(), zero=zero) if task.done() and task.exception() is None else None


def _host_span(name: str, task: "Future[tuple[Any, Any]]", *, zero: float) -> Span | None:
    if not task.done() or task.exception() is not None:  # `synchronize` raises the failure
        return None
    start, end = task.result()
    return Span("host", name, start - zero, end - zero)


class _AllocatorMeter:
    """Meter of the caching allocator: includes rounding and kernel workspaces."""

    def __init__(self, device: torch.device):
        self._device = device
        self._base = torch.cuda.memory_allocated(device)

    def level(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._base

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._base

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
