"""Device `cuda`: one NVIDIA GPU. Lanes are streams (compute: whatever stream the model runs on; copies: two of our own)
and a thread for updates on the host. An event is a CUDA event, or the future of what a thread does. A stream cannot
wait for a future: a copy that must is issued by a thread of its lane, and only the compute lane makes the issuing
thread wait.

Memory: homes, slots and arenas are allocated once; after that only the model's own operators use the allocator, on the
compute stream. A tensor that a copy stream reads stays referenced until the compute stream has waited for that copy, so
its memory cannot be reused too early.
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
from outsize.device.timeline import Span
from outsize.hardware.lanes import COPY_LANES, Lane
from outsize.hardware.spec import ProcessOverhead

_SLACK_BYTES = 64 * 2**20
"""Kept free beside the allocator's share: small plans lose more than in proportion."""
_MOST_OVERHEAD_BYTES = 2**30
"""Of kernels, and of workspaces. A decoder's are 240 and 64 MiB."""
_HEAD_START_CYCLES = 40_000_000
"""Some 20 ms: longer than it takes to issue a few layers."""


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
        _use_expandable_segments(self.torch_device)
        self._streams = {lane: torch.cuda.Stream(self.torch_device) for lane in COPY_LANES}
        self._threads: dict[Lane, ThreadPoolExecutor] = {}
        """One thread per lane, from its first task until the last engine closes."""
        self._tasks: list[Future[tuple[Any, Any]]] = []
        self._last: dict[Lane, Future[tuple[Any, Any]]] = {}
        """Of what was handed to a lane's thread, the latest."""
        self._began: dict[Lane, tuple[str, torch.cuda.Event]] = {}
        self._zero: tuple[float, torch.cuda.Event] = (0.0, torch.cuda.Event())
        self.spec = machine_spec(self.identity, gpu_bytes=self._total, host_bytes=psutil.virtual_memory().total)
        self._limit = self._total
        self._given_fraction = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        """The limit that the user's process had before ours."""
        self._at_start = (self._outside, torch.cuda.memory_allocated(self.torch_device))
        """What was taken outside of the allocator, and inside it by the user."""
        self._workspaces = 0
        self._expected = ProcessOverhead()
        self._has_opened = False
        self.trial_peak_bytes = 0
        """Most that was allocated before the engine opened: in the trial run."""

    @property
    def _total(self) -> int:
        return torch.cuda.get_device_properties(self.torch_device).total_memory

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
        """Used on the card by others and by this process's context."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        return total - free - torch.cuda.memory_reserved(self.torch_device)

    @property
    def free_bytes(self) -> int:
        return self._total - sum(self.promised.values())

    @property
    def _loaded(self) -> int:
        """Kernels, as far as is known: nobody tells what others have taken on the card meanwhile."""
        return max(0, self._outside - self._at_start[0])

    @property
    def _outside_soon(self) -> int:
        return self._outside + max(0, self._expected.code_bytes - self._loaded)

    @property
    def _allocated_by_libraries(self) -> int:
        """With another engine at work, what is allocated is its own; the libraries' part was measured before it
        opened.
        """
        return self._workspaces if self.promised else torch.cuda.memory_allocated(self.torch_device)

    def process_overhead(self) -> ProcessOverhead:
        if self._has_opened:  # what is there now may be of an engine, or of its loop
            return self._expected
        gc.collect()
        torch.cuda.empty_cache()
        # Others may have come to the card meanwhile, and users may keep tensors there: neither is for later processes
        # to expect.
        workspaces = torch.cuda.memory_allocated(self.torch_device) - self._at_start[1]
        return ProcessOverhead(
            code_bytes=min(self._loaded, _MOST_OVERHEAD_BYTES),
            workspace_bytes=min(max(0, workspaces), _MOST_OVERHEAD_BYTES),
            host_bytes=psutil.Process().memory_info().rss,
        )

    def expect(self, process_overhead: ProcessOverhead) -> None:
        self._expected = process_overhead

    @property
    def overhead_bytes(self) -> int:
        """Context, kernels, library workspaces, and the allocator's loss."""
        torch.cuda.empty_cache()
        workspaces = max(self._allocated_by_libraries, self._at_start[1] + self._expected.workspace_bytes)
        return self._outside_soon + workspaces + _SLACK_BYTES + int(self._limit * self.spec.allocator_share)

    def limit(self, num_bytes: int) -> None:
        """`num_bytes` is the total with the context; the allocator gets the rest, beside what other engines were
        promised.
        """
        self._limit = min(num_bytes + sum(self.promised.values()), self._total)
        torch.cuda.set_per_process_memory_fraction(
            max(0.0, (self._limit - self._outside_soon) / self._total), self.torch_device
        )

    def lift_limit(self) -> None:
        if not self.promised:
            self._limit = self._total
            torch.cuda.set_per_process_memory_fraction(self._given_fraction, self.torch_device)

    def open(self, owner: int, budget_bytes: int) -> None:
        super().open(owner, budget_bytes)
        torch.cuda.empty_cache()
        self.trial_peak_bytes = torch.cuda.max_memory_allocated(self.torch_device)
        if len(self.promised) == 1:
            self._workspaces = max(
                torch.cuda.memory_allocated(self.torch_device), self._at_start[1] + self._expected.workspace_bytes
            )
        self._has_opened = True
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def close(self, owner: int) -> None:
        super().close(owner)
        self.synchronize()
        torch.cuda.empty_cache()
        if not self.promised:
            for thread in self._threads.values():
                thread.shutdown()
            self._threads, self._last = {}, {}

    @property
    def peak_bytes(self) -> int:
        """Without what libraries had allocated before: that is part of `overhead_bytes`, not of any plan."""
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
        """The lane's stream waits for what the device does; this thread, for what another has yet to do or to issue."""
        for event in _on_the_device(waits):
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
    ) -> Event:
        if lane == "host":
            task = self._hand_over(lane, partial(self._update, tuple(waits), work))
            if self._timeline is not None:
                self._timeline.add_later(partial(_host_span, name, task, zero=self._zero[0]))
            return task
        issue = partial(self._issue, lane, tuple(waits), work, timed=self._timeline is not None)
        if self._is_held_up(lane, waits):
            task = self._hand_over(lane, issue)
            if self._timeline is not None:
                self._timeline.add_later(partial(_issued_span, lane, name, task, zero=self._zero[1]))
            return task
        start, end = issue()
        if self._timeline is not None and start is not None:
            self._timeline.add_later(partial(_span, lane, name, start, end, zero=self._zero[1]))
        return end

    def _is_held_up(self, lane: Lane, waits: Sequence[Event]) -> bool:
        """Whether a copy would keep the issuing thread waiting for an update on the host. The lane's own thread waits
        for it then, and for the copies after it too, since a lane keeps its order: without this, a resident weight that
        the host updates held up all forwards until the last update."""
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
        """Returns when the device begins it, if that is to be timed, and when it ends it."""
        self._wait(lane, waits)
        start = self._mark(lane, timed=True) if timed else None
        with torch.cuda.stream(self._stream(lane)):
            work()
        return start, self._mark(lane, timed=timed)

    def _update(self, waits: tuple[Event, ...], work: Callable[[], None]) -> tuple[float, float]:
        """Runs on the host lane's thread; returns when the work began and ended."""
        for event in _on_the_device(waits):
            event.synchronize()
        start = time.perf_counter()
        work()
        return start, time.perf_counter()

    def synchronize(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.exception()  # all of them end before the first failure is raised
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
    """Segments that grow lose less memory to fragmentation near the limit. A setting of the user's own stays."""
    if any(
        "expandable_segments" in os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    ):
        return
    if held := torch.cuda.memory_reserved(device):
        log.warning(
            "PyTorch's CUDA allocator is switched to expandable segments, but %s were allocated on %s before and stay "
            "fragmented. "
            "Call outsize.prepare before other code uses the GPU, or set PYTORCH_ALLOC_CONF=expandable_segments:True.",
            show_bytes(held),
            device,
        )
    compat.cuda().set_allocator_settings("expandable_segments:True")


class _MappedHost:
    """Page-locked host memory, which the GPU addresses under the same pointer (measured on the H200: 50 to 55 GB/s, the
    rate of copies).
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


def _on_the_device(waits: Sequence[Event]) -> Iterator[torch.cuda.Event]:
    """Waits for what threads do; what they have issued, and all else, is for the device to be waited for."""
    for event in waits:
        done = event.result()[1] if isinstance(event, Future) else event
        if isinstance(done, torch.cuda.Event):
            yield done


def _span(
    lane: Lane, name: str, start: torch.cuda.Event, end: torch.cuda.Event, *, zero: torch.cuda.Event
) -> Span | None:
    if not (zero.query() and end.query()):
        return None
    began = zero.elapsed_time(start) / 1e3  # negative where a copy ran before the compute stream came to `zero`
    return Span(lane, name, began, began + start.elapsed_time(end) / 1e3)


def _issued_span(lane: Lane, name: str, task: "Future[tuple[Any, Any]]", *, zero: torch.cuda.Event) -> Span | None:
    return _span(lane, name, *task.result(), zero=zero) if task.done() and task.exception() is None else None


def _host_span(name: str, task: "Future[tuple[Any, Any]]", *, zero: float) -> Span | None:
    if not task.done() or task.exception() is not None:  # a failure is for `synchronize` to raise
        return None
    start, end = task.result()
    return Span("host", name, start - zero, end - zero)


class _AllocatorMeter:
    """Reads the caching allocator: rounding and kernel workspaces are included."""

    def __init__(self, device: torch.device):
        self._device = device
        self._base = torch.cuda.memory_allocated(device)

    def level(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._base

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._base

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
