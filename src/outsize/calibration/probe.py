"""`probe`: measures the rates of this machine that plans use, into a Machine.

Everything runs through the lanes of a Device, so a copy or an update costs here what it costs in a run. Each
measurement repeats for a window and takes the median (the streaming step: the mean). Without a GPU only the host is
measured, and the GPU's rates are the catalog's. A probe takes less than twenty seconds and up to 2 GiB
of host and GPU memory.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor

from outsize.base.errors import DeviceOutOfMemory, EngineMisuse
from outsize.calibration.rates import ASSUMED
from outsize.device.device import Device, Event
from outsize.hardware.catalog import CATALOG
from outsize.hardware.host import container_limit, free_host_bytes
from outsize.hardware.lanes import REFERENCE_UPDATE_BYTES, Lane
from outsize.hardware.machine import Machine
from outsize.hardware.spec import CONTEXT_BYTES, HardwareSpec
from outsize.optim.names import default_spec
from outsize.optim.rule import Scratch, update
from outsize.progress import counted

MiB = 2**20
RULE = default_spec().rule
NUMBERS = RULE.numbers(default_spec(lr=1e-6).defaults, 1000)
STATE_BYTES = 14
"""Bytes per updated parameter: weight with its lower half, two moments, gradient."""
OPERATOR_SHARE = 0.85
"""Share of a plain copy's bytes per second that operators on activations reach. Fitted to layers of 1B to 8B on the
H200: 3.45 TB/s of 4.1.
"""
LAUNCHED_OPERATORS = 350
"""Operators of a model that take as long to launch as the probe's six hundred: 25 µs each on a machine with 8.7 ms."""
_MAX_CONTEXT_BYTES = 2048 * MiB
"""More than that includes memory of another process on the GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes of the measurements. The defaults exceed every cache."""

    window_seconds: float = 0.25
    """Duration of one measurement."""
    state_numel: int = 2**26
    """Parameters of one update, about a chunk of several layers. Smaller ones are slower, by 6 % at a quarter of it."""
    copy_bytes: int = 256 * MiB
    gemms: tuple[tuple[int, int, int], ...] = ((8192, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 14336))
    """Tokens, input features, output features."""
    layer: tuple[int, int, int, int] = (2, 2048, 3072, 8192)
    """Rows, tokens, hidden, intermediate."""


@dataclass(frozen=True, slots=True)
class _Load:
    """Work that a lane repeats."""

    lane: Lane
    amount: float
    """Bytes, parameters or FLOPs of one repetition."""
    work: Callable[[], object]


def probe(device: Device, sizes: Sizes | None = None) -> Machine:
    """Measure the machine of `device`: `cuda`, or `cpu` for the host alone. No engine may be attached to it."""
    gc.collect()  # frees the device of engines that were dropped without detach()
    if device.budgets:
        raise EngineMisuse("probe: an engine is attached to this device. Call its engine.detach() first.")
    prober = Prober(device, sizes or Sizes())
    began = time.perf_counter()
    try:
        stages = prober.stages(with_gpu=device.is_gpu)
        for stage in counted(stages, "measuring this machine", total=len(stages)):
            stage()
    except torch.OutOfMemoryError as error:
        reason = str(error).split("\n")[0]
        raise DeviceOutOfMemory(
            f"probe: the GPU has less than 2 GiB of free memory ({reason}). End the other processes on it and probe "
            "again."
        ) from None
    finally:
        device.synchronize()  # no copy reads memory that is about to be freed
    measured = {
        "date": date.today().isoformat(),
        "identity": asdict(device.identity),
        "seconds": _rounded(time.perf_counter() - began),
        **prober.found,
    }
    del prober, stages, stage
    gc.collect()  # the buffers of the measurements, a GiB on the host
    return Machine(spec=make_spec(device, measured), measured=measured)


def make_spec(device: Device, measured: dict[str, Any]) -> HardwareSpec:
    """The spec with the measured rates. What was not measured is the assumed GPU's."""
    host: dict[str, Any] = {
        "host_bytes": measured["host_bytes"],
        "host_bytes_per_second": measured["host_bytes_per_second"],
    }
    if "step_per_second" not in measured:
        return replace(
            CATALOG[ASSUMED],
            **host,
            name="host",
            host_adam_params_per_second=measured["host_adam_params_per_second"],
            provenance=f"host probed on {measured['date']}; no GPU here, its rates are assumed equal to {ASSUMED}",
        )
    rates, launches = measured["step_per_second"], measured["op_launch_seconds"]
    return HardwareSpec(
        **host,
        name=device.spec.name,
        gpu_bytes=device.spec.gpu_bytes,
        sustained_clock_ratio=device.spec.sustained_clock_ratio,
        flops=_rounded(statistics.mean(measured["gemm_flops"].values()) / device.spec.sustained_clock_ratio),
        gpu_bytes_per_second=_rounded(measured["gpu_copy_bytes_per_second"] * OPERATOR_SHARE),
        h2d_bytes_per_second=rates["h2d"],
        d2h_bytes_per_second=rates["d2h"],
        host_adam_params_per_second=rates["host"],
        gpu_adam_params_per_second=measured["gpu_adam_params_per_second"],
        launch_seconds=max(measured["launch_seconds"].values()),
        op_launch_seconds=_rounded(launches["alone"] / LAUNCHED_OPERATORS),
        launch_slowdown=max(1.0, _rounded(launches["beside updates"] / launches["alone"])),
        provenance=f"probed on {measured['date']}",
        context_bytes=measured["context_bytes"],
    )


class Prober:
    """The stages of a probe, in the order in which they run. Their results are in `found`."""

    def __init__(self, device: Device, sizes: Sizes):
        self.found: dict[str, Any] = {}
        self._device, self._sizes = device, sizes
        self._generator = torch.Generator(device.torch_device).manual_seed(0)

    def stages(self, *, with_gpu: bool) -> list[Callable[[], None]]:
        host = [self.host_memory, self.host_updates]
        lanes = [self.step, self.op_launches, self.copy_launches]
        gpu = [self.gpu_memory, self.gpu_updates, self.gemms, self.context]
        return host + (lanes + gpu if with_gpu else [])

    # The host.

    def host_memory(self) -> None:
        total, limit = int(psutil.virtual_memory().total), container_limit()
        self.found["host_bytes"] = min(total, limit or total)

    def host_updates(self) -> None:
        # At most a quarter of the free memory: a probe must not push other processes out.
        numel = min(self._sizes.state_numel, 2 ** int(math.log2(max(2**20, free_host_bytes() / 4 / STATE_BYTES))))
        state = _training_state(numel, partial(self._device.host_empty, pinned=False))
        scratch = Scratch(torch.empty(RULE.layout.scratch_bytes(2**18), dtype=torch.uint8))
        self._update = _Load("host", numel, lambda: _update(state, scratch))
        rate = self._rate(self._update)
        self.found["host_adam_params_per_second"] = rate
        self.found["host_bytes_per_second"] = _rounded(rate * REFERENCE_UPDATE_BYTES)

    # The lanes.

    def step(self) -> None:
        """The rates of copies and host updates in a step that streams: the GPU computes, a gradient is copied to the
        host, the host updates its chunk, and twice as many bytes are copied to the GPU for the next forward.

        Lanes share the host's memory, and a lane slows the others only while it works. Here they work about as long as
        in training.
        """
        size = int(min(2 * self._update.amount, self._sizes.copy_bytes))
        h2d, d2h = self._copy("h2d", size), self._copy("d2h", size)
        gemm, seconds = self._gemm(self._sizes.gemms[-1]), self._seconds(self._update, 3)
        gemms = max(1, round(0.8 * seconds / self._seconds(gemm, 3)))
        for load in (h2d, d2h):
            self._submit(load)  # the first time is slower
        loaded: tuple[Event, ...] = ()
        with self._device.timeline() as line:
            for _ in range(max(4, math.ceil(4 * self._sizes.window_seconds / seconds))):
                computed = [self._submit(gemm, loaded) for _ in range(gemms)]
                updated = self._submit(self._update, [self._submit(d2h, computed[-1:])])
                loaded = (self._submit(h2d),)
                self._submit(h2d, [updated])
        rates: dict[Lane, float] = {}
        for load in (h2d, d2h, self._update):
            spans = [span.end - span.start for span in line.spans if span.lane == load.lane]
            rates[load.lane] = _rounded(load.amount * len(spans) / max(sum(spans), 1e-9))
        self.found["step_per_second"] = rates

    def op_launches(self) -> None:
        """CPU time to launch many small operators, forward and backward: alone, and while the host updates."""
        x, grad = self._random(64, 64).requires_grad_(), self._random(64, 64)

        def launch() -> float:
            drained = self._device.mark()
            self._device.between(drained, drained)  # a full queue must not delay the thread
            start = time.perf_counter()
            y = x
            for _ in range(100):
                y = F.silu(y) * x
            torch.autograd.grad(y, x, grad)
            return time.perf_counter() - start

        launch()  # the first time loads kernels
        updates = math.ceil(3 * launch() / self._seconds(self._update, 3))
        alone, beside = [], []
        for _ in range(9):  # in turns: the speed of a shared processor changes by half from one second to the next
            alone.append(launch())
            for _ in range(updates):
                self._submit(self._update)
            beside.append(launch())
            self._device.synchronize()
        self.found["op_launch_seconds"] = {
            "alone": _rounded(statistics.median(alone)),
            "beside updates": _rounded(statistics.median(beside)),
        }
        del self._update  # nothing after this updates on the host

    def copy_launches(self) -> None:
        """The fixed cost of a copy: many small ones, from the first call to the end of the last."""
        times, seconds = 200, {}
        for lane in ("h2d", "d2h"):
            load, taken = self._copy(lane, min(self._sizes.copy_bytes, 4096)), []
            for _ in range(5):
                self._device.synchronize()
                start = time.perf_counter()
                for _ in range(times):
                    self._submit(load)
                self._device.synchronize()
                taken.append((time.perf_counter() - start) / times)
            seconds[lane] = _rounded(statistics.median(taken))
        self.found["launch_seconds"] = seconds

    def _copy(self, lane: Any, num_bytes: int) -> _Load:
        ends = (self._device.host_empty(num_bytes, pinned=True), self._device.empty(num_bytes))
        source, target = ends if lane == "h2d" else ends[::-1]
        return _Load(lane, num_bytes, lambda: target.copy_(source, non_blocking=True))

    # The GPU.

    def gpu_memory(self) -> None:
        source, target = (self._device.empty(self._sizes.copy_bytes) for _ in range(2))
        copy = _Load("compute", 2 * source.nbytes, lambda: target.copy_(source))
        self.found["gpu_copy_bytes_per_second"] = self._rate(copy)

    def gpu_updates(self) -> None:
        numel = self._sizes.state_numel
        state = _training_state(numel, self._device.empty)
        scratch = Scratch(self._device.empty(RULE.layout.scratch_bytes(2**20)))
        load = _Load("compute", numel, lambda: _update(state, scratch))
        self.found["gpu_adam_params_per_second"] = self._rate(load)

    def gemms(self) -> None:
        self.found["gemm_flops"] = {
            "x".join(map(str, shape)): self._rate(self._gemm(shape)) for shape in self._sizes.gemms
        }

    def _gemm(self, shape: tuple[int, int, int]) -> _Load:
        tokens, width_in, width_out = shape
        work = partial(F.linear, self._random(tokens, width_in), self._random(width_out, width_in))
        return _Load("compute", 2 * tokens * width_in * width_out, work)

    def context(self) -> None:
        """GPU memory of the process beside its tensors, once the kernels and workspaces of a decoder layer's forward
        and backward are loaded. Runs last, when the probe's own tensors are freed.
        """
        self._run_layer()
        overhead = self._device.overhead_bytes - int(self._device.spec.gpu_bytes * self._device.spec.allocator_share)
        self.found["context_bytes"] = overhead if 0 < overhead <= _MAX_CONTEXT_BYTES else CONTEXT_BYTES

    def _run_layer(self) -> None:
        rows, tokens, hidden, inner = self._sizes.layer
        heads = max(1, hidden // 128)
        x, grad = self._random(rows, tokens, hidden).requires_grad_(), self._random(rows, tokens, hidden)
        shapes = ((3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
        weights = [self._random(*shape).requires_grad_() for shape in shapes]
        norm = self._random(hidden).requires_grad_()
        qkv = F.linear(F.rms_norm(x, (hidden,), norm), weights[0]).view(rows, tokens, 3 * heads, -1).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        y = x + F.linear(mixed.reshape(rows, tokens, hidden), weights[1])
        gate, up = F.linear(F.rms_norm(y, (hidden,), norm), weights[2]).chunk(2, dim=-1)
        torch.autograd.grad(y + F.linear(F.silu(gate) * up, weights[3]), [x, norm, *weights], grad)
        self._device.synchronize()

    # Measuring.

    def _random(self, *shape: int) -> Tensor:
        draws = torch.randn(shape, dtype=torch.bfloat16, device=self._device.torch_device, generator=self._generator)
        return draws * 0.02

    def _submit(self, load: _Load, waits: Sequence[Event] = ()) -> Event:
        def work() -> None:
            load.work()

        return self._device.submit(load.lane, work, waits=waits, reads=(), writes=(), seconds=0.0)

    def _rate(self, load: _Load) -> float:
        """Amount per second."""
        once = self._seconds(load, 3)
        times = max(3, min(5000, math.ceil(self._sizes.window_seconds / max(once, 1e-9))))
        return _rounded(load.amount / max(self._seconds(load, times), 1e-9))

    def _seconds(self, load: _Load, times: int) -> float:
        """The median time of one repetition."""
        self._submit(load)
        with self._device.timeline() as line:
            for _ in range(times):
                self._submit(load)
        return statistics.median(span.end - span.start for span in line.spans if span.lane == load.lane)


def _update(state: list[Tensor], scratch: Scratch) -> None:
    weight, lo, m, v, grad = state
    update(RULE, weight, lo, (m, v), grad, numbers=NUMBERS, clip=1.0, scratch=scratch)


def _training_state(numel: int, empty: Callable[[int], Tensor]) -> list[Tensor]:
    """weight, lo, m, v, gradient. No denormals: they are slow on a CPU and rare in training."""
    dtypes = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
    weight, lo, m, v, grad = (empty(numel * dtype.itemsize).view(dtype) for dtype in dtypes)
    draws = torch.randn(2**16, generator=torch.Generator().manual_seed(0)).to(weight)
    for part in (weight, grad):
        part.view(-1, draws.numel()).copy_(draws.expand(numel // draws.numel(), -1))
    lo.zero_()
    m.zero_()
    v.fill_(1.0)
    return [weight, lo, m, v, grad]


def _rounded(value: float) -> float:
    """Round to four digits, since rates vary more than that."""
    return float(f"{value:.4g}")
