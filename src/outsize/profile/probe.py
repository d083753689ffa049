"""`probe`: the rates of this machine, measured on the lanes that training uses, into a Machine: a HardwareSpec with the
figures behind it.

Everything goes through the device seam, so a copy or an update costs here what it costs in a run. Whatever is timed
repeats for a window and counts with its median (a step's lanes: with their mean). Without a GPU only the host is
measured, and the card is assumed. Takes about twenty seconds, 2 GiB of the host and less of the card, for the while.
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

from outsize.base.errors import DeviceOutOfMemory, EngineMisuse, tell
from outsize.device.device import Device, Event
from outsize.hardware.catalog import CATALOG
from outsize.hardware.host import container_limit, free_host_bytes
from outsize.hardware.lanes import Lane, together
from outsize.hardware.machine import Machine
from outsize.hardware.probed import ASSUMED
from outsize.hardware.spec import CONTEXT_BYTES, HardwareSpec
from outsize.layout.optimizer import ADAMW
from outsize.optim.adamw import RULE
from outsize.optim.rule import Scratch, update
from outsize.progress import counted

MiB = 2**20
HYPER = RULE.numbers(dict(lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1), 1000)
STATE_BYTES = 14
"""Of a parameter that is updated: weight and remainder, two moments, gradient. All but the gradient are written too: 26
bytes of traffic.
"""
TRAFFIC_BYTES = 26
OPERATOR_SHARE = 0.85
"""Of a plain copy's bytes per second, what operators on activations reach. Fitted to layers of 1B to 8B on the H200:
3.45 TB/s of 4.1.
"""
ISSUED_OPERATORS = 350
"""So many operators of a model take the thread that issues them as long as the probe's six hundred bare ones: 25 µs
each where those took 8.7 ms.
"""
_MOST_CONTEXT_BYTES = 2048 * MiB
"""More than that on the card is somebody else's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """How much is measured with. The defaults are larger than any cache."""

    window_seconds: float = 0.25
    """For each figure."""
    state_numel: int = 2**26
    """Of one update: a chunk of some layers' size. Smaller ones are slower, by 6 % at a quarter of it."""
    copy_bytes: tuple[int, ...] = (64 * 2**10, MiB, 16 * MiB, 256 * MiB)
    """The last one is that of chunks."""
    gemms: tuple[tuple[int, int, int], ...] = ((8192, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 14336))
    """Tokens, in, out."""
    attention_tokens: tuple[int, ...] = (2048, 8192)
    heads: int = 24
    layer: tuple[int, int, int, int] = (2, 2048, 3072, 8192)
    """Rows, tokens, hidden, intermediate."""


@dataclass(frozen=True, slots=True)
class _Load:
    """Something that a lane does over and over."""

    lane: Lane
    amount: float
    """Bytes, parameters or FLOPs of one time."""
    work: Callable[[], object]


def probe(device: Device, sizes: Sizes | None = None) -> Machine:
    """Measure the machine that `device` is of: `cuda`, or `cpu` for the host alone. No engine may be at work on it."""
    gc.collect()  # an engine that nobody holds any more is at work on nothing
    if device.promised:
        raise EngineMisuse(
            tell(
                "nothing else runs on a machine that is measured",
                "an engine is at work on it",
                "Call its engine.detach() first",
            )
        )
    with_card = device.kind == "cuda"
    prober = Prober(device, sizes or Sizes())
    began = time.perf_counter()
    try:
        for stage in counted(stages := prober.stages(with_card), "measuring this machine", total=len(stages)):
            stage()
    except torch.OutOfMemoryError as error:
        first = str(error).split("\n")[0]
        raise DeviceOutOfMemory(
            tell("2 GiB of the card are free to measure it", first, "End what else runs on it, and probe again")
        ) from None
    finally:
        device.synchronize()  # no copy reads memory that is about to be freed
    measured = {
        "date": date.today().isoformat(),
        "identity": asdict(device.identity),
        "seconds": _rounded(time.perf_counter() - began),
        **prober.found,
    }
    return Machine(spec=make_spec(device, measured), measured=measured)


def make_spec(device: Device, measured: dict[str, Any]) -> HardwareSpec:
    """One rate for each lane out of what was measured; what was not is the assumed card's."""
    host: dict[str, Any] = {
        "host_bytes": measured["host_memory"]["bytes"],
        "host_bytes_per_second": max(measured["host_copy_bytes_per_second"], measured["host_adam_bytes_per_second"]),
    }
    rates = measured.get("step_per_second", {})
    if "gpu_adam_params_per_second" not in measured:
        words = f"host probed on {measured['date']}; the card is assumed as of {ASSUMED}: there is none here"
        return replace(
            CATALOG[ASSUMED],
            **host,
            name="host",
            host_adam_params_per_second=measured["lanes_per_second"]["host"]["host"],
            provenance=words,
        )
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
        op_launch_seconds=_rounded(measured["op_launch_seconds"]["alone"] / ISSUED_OPERATORS),
        launch_slowdown=max(
            1.0, _rounded(measured["op_launch_seconds"]["beside updates"] / measured["op_launch_seconds"]["alone"])
        ),
        provenance=f"probed on {measured['date']}",
        context_bytes=measured["allocator"]["context_bytes"],
    )


class Prober:
    """The stages, in an order in which each finds what it needs of those before. What they find is in `found`."""

    def __init__(self, device: Device, sizes: Sizes):
        self.found: dict[str, Any] = {}
        self._device, self._sizes = device, sizes
        self._draws = torch.Generator(device.torch_device).manual_seed(0)

    def stages(self, with_card: bool) -> list[Callable[[], None]]:
        host = [self.host_memory, self.host_lanes]
        lanes = [self.copies, self.contention, self.step, self.issuing, self.launches]
        card = [self.gpu_memory, self.gpu_adam, self.matrices, self.attention, self.layer, self.allocator]
        return host + (lanes + card if with_card else [])

    # The host.

    def host_memory(self) -> None:
        total, limit = int(psutil.virtual_memory().total), container_limit()
        self.found["host_memory"] = {
            "bytes": min(total, limit or total),
            "free_bytes": free_host_bytes(),
            "container_limit_bytes": limit or 0,
        }

    def host_lanes(self) -> None:
        self._host = self._host_load()
        rate = self._rates([self._host])["host"]
        self.found["lanes_per_second"] = {"host": {"host": rate}}
        self.found["host_adam_bytes_per_second"] = _rounded(rate * TRAFFIC_BYTES)
        source, target = self._state[2], self._state[3]
        copy = _Load("host", 2 * source.nbytes, lambda: target.copy_(source))
        self.found["host_copy_bytes_per_second"] = self._rates([copy])["host"]
        target.fill_(1.0)

    def _host_load(self) -> _Load:
        # A quarter of what is free at most: a probe shall not push anything out.
        numel = min(self._sizes.state_numel, 2 ** int(math.log2(max(2**20, free_host_bytes() / 4 / STATE_BYTES))))
        self._state = state = _adam_state(numel, partial(self._device.host_empty, pinned=False))
        scratch = Scratch(torch.empty(ADAMW.scratch_bytes(2**18), dtype=torch.uint8))
        return _Load("host", numel, lambda: _update(state, scratch))

    # Copies, and what they do to each other and to updates on the host.

    def copies(self) -> None:
        most = max(self._sizes.copy_bytes)
        self._pinned = {way: self._device.host_empty(most, pinned=True) for way in ("h2d", "d2h")}
        self._card = {way: self._device.empty(most) for way in ("h2d", "d2h")}
        self._copies = {way: self._copy_load(way, most) for way in ("h2d", "d2h")}
        by_size = {
            way: {_size(n): self._rates([self._copy_load(way, n)])[way] for n in self._sizes.copy_bytes}
            for way in ("h2d", "d2h")
        }
        self.found["copy_bytes_per_second"] = by_size

    def _copy_load(self, way: Any, num_bytes: int) -> _Load:
        ends = (self._pinned[way][:num_bytes], self._card[way][:num_bytes])
        source, target = ends if way == "h2d" else ends[::-1]
        return _Load(way, num_bytes, lambda: target.copy_(source, non_blocking=True))

    def contention(self) -> None:
        into, out, host = self._copies["h2d"], self._copies["d2h"], self._host
        for loads in ([into], [out], [into, out], [into, host], [out, host], [into, out, host]):
            self.found["lanes_per_second"][together(load.lane for load in loads)] = self._rates(loads)

    def step(self) -> None:
        """The lanes as a step has them that streams: what the card has computed comes out, the host updates it, and
        twice as much goes in for the next one.

        A lane slows the others only while it works, and here they work about as long as in training: these are the
        rates that plans take.
        """
        chunk, multiply = self._host.amount * 2, self._product(self._sizes.gemms[-1])
        loads = {way: self._copy_load(way, int(min(chunk, max(self._sizes.copy_bytes)))) for way in ("h2d", "d2h")}
        seconds = self._seconds([self._host], {"host": 3})["host"]
        products = max(1, round(0.8 * seconds / self._seconds([multiply], {"compute": 3})["compute"]))
        loaded: tuple[Event, ...] = ()
        with self._device.timeline() as line:
            for _ in range(max(4, math.ceil(4 * self._sizes.window_seconds / seconds))):
                computed = [self._submit(multiply, loaded) for _ in range(products)]
                updated = self._submit(self._host, [self._submit(loads["d2h"], computed[-1:])])
                loaded = (self._submit(loads["h2d"]),)
                self._submit(loads["h2d"], [updated])
        amounts: dict[Lane, float] = {"h2d": loads["h2d"].amount, "d2h": loads["d2h"].amount, "host": self._host.amount}
        spans = {lane: [span.end - span.start for span in line.spans if span.lane == lane] for lane in amounts}
        self.found["step_per_second"] = {
            lane: _rounded(amounts[lane] * len(found) / max(sum(found), 1e-9)) for lane, found in spans.items()
        }

    def issuing(self) -> None:
        """What the thread that issues takes over many small operators, forward and backward: alone, and while the host
        updates.
        """
        x, grad = self._random(64, 64).requires_grad_(), self._random(64, 64)

        def issue() -> float:
            drained = self._device.mark()
            self._device.between(drained, drained)  # the card's queue is not what holds the thread up
            start = time.perf_counter()
            y = x
            for _ in range(100):
                y = F.silu(y) * x
            torch.autograd.grad(y, x, grad)
            return time.perf_counter() - start

        issue()  # the first time loads kernels
        updates = math.ceil(3 * issue() / self._seconds([self._host], {"host": 3})["host"])
        alone, beside = [], []
        for _ in range(9):  # in turns: a processor that others share is half as fast again from one second to the next
            alone.append(issue())
            for _ in range(updates):
                self._submit(self._host)
            beside.append(issue())
            self._device.synchronize()
        self.found["op_launch_seconds"] = {
            "alone": _rounded(statistics.median(alone)),
            "beside updates": _rounded(statistics.median(beside)),
        }

    def launches(self) -> None:
        """What a copy costs beyond its bytes: many small ones, from the first call to the last one's end."""
        times = 200
        seconds = {}
        for way in ("h2d", "d2h"):
            load = self._copy_load(way, min(self._sizes.copy_bytes[0], 4096))
            taken = []
            for _ in range(5):
                self._device.synchronize()
                start = time.perf_counter()
                for _ in range(times):
                    self._submit(load)
                self._device.synchronize()
                taken.append((time.perf_counter() - start) / times)
            seconds[way] = _rounded(statistics.median(taken))
        self.found["launch_seconds"] = seconds
        # Nothing after this copies or updates on the host.
        del self._pinned, self._card, self._copies, self._host, self._state

    # The card.

    def gpu_memory(self) -> None:
        source, target = (self._device.empty(max(self._sizes.copy_bytes)) for _ in range(2))
        self.found["gpu_copy_bytes_per_second"] = self._rates(
            [_Load("compute", 2 * source.nbytes, lambda: target.copy_(source))]
        )["compute"]

    def gpu_adam(self) -> None:
        numel = self._sizes.state_numel
        state = _adam_state(numel, self._device.empty)
        scratch = Scratch(self._device.empty(ADAMW.scratch_bytes(2**20)))
        load = _Load("compute", numel, lambda: _update(state, scratch))
        rate = self._rates([load])["compute"]
        self.found |= {"gpu_adam_params_per_second": rate, "gpu_adam_bytes_per_second": _rounded(rate * TRAFFIC_BYTES)}

    def matrices(self) -> None:
        products = {
            f"{tokens}x{width_in}x{width_out}": self._product((tokens, width_in, width_out))
            for tokens, width_in, width_out in self._sizes.gemms
        }
        self.found["gemm_flops"] = {shape: self._flops(product) for shape, product in products.items()}

    def _product(self, shape: tuple[int, int, int]) -> _Load:
        tokens, width_in, width_out = shape
        return _Load(
            "compute",
            2 * tokens * width_in * width_out,
            partial(F.linear, self._random(tokens, width_in), self._random(width_out, width_in)),
        )

    def attention(self) -> None:
        """Forward and backward, causal."""
        found = {}
        for tokens in self._sizes.attention_tokens:
            q, k, v, grad = (self._random(1, self._sizes.heads, tokens, 128).requires_grad_() for _ in range(4))

            def work(q: Tensor = q, k: Tensor = k, v: Tensor = v, grad: Tensor = grad) -> None:
                torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v], grad)

            found[f"{tokens} tokens"] = self._flops(
                _Load("compute", attention_flops(self._sizes.heads * 128, tokens), work)
            )
        self.found["attention_flops"] = found

    def layer(self) -> None:
        """A decoder layer, forward and backward, with all that is in it beside matrices: what training reaches."""
        rows, tokens, hidden, inner = self._sizes.layer
        heads = max(1, hidden // 128)
        x, grad = self._random(rows, tokens, hidden).requires_grad_(), self._random(rows, tokens, hidden)
        shapes = ((3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
        weights = [self._random(*shape).requires_grad_() for shape in shapes]
        norm = self._random(hidden).requires_grad_()

        def work() -> None:
            qkv = F.linear(F.rms_norm(x, (hidden,), norm), weights[0]).view(rows, tokens, 3 * heads, -1).transpose(1, 2)
            q, k, v = qkv.chunk(3, dim=1)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
            y = x + F.linear(mixed.reshape(rows, tokens, hidden), weights[1])
            gate, up = F.linear(F.rms_norm(y, (hidden,), norm), weights[2]).chunk(2, dim=-1)
            torch.autograd.grad(y + F.linear(F.silu(gate) * up, weights[3]), [x, norm, *weights], grad)

        if self._device.kind == "cuda":
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats(self._device.torch_device)
        products = 6 * rows * tokens * sum(weight.numel() for weight in weights)
        self.found["layer_flops"] = self._flops(
            _Load("compute", products + rows * attention_flops(hidden, tokens), work)
        )
        if self._device.kind == "cuda":
            most = [
                peak(self._device.torch_device)
                for peak in (torch.accelerator.max_memory_allocated, torch.accelerator.max_memory_reserved)
            ]
            self.found["allocator"] = {"lost_share_of_a_layer": _rounded(1 - most[0] / most[1])}

    def allocator(self) -> None:
        """What it takes in time and memory. Last, since what the libraries keep for themselves must be there and
        nothing of ours.
        """
        size = 64 * MiB if self._device.kind == "cuda" else MiB
        started = time.perf_counter()
        for _ in range(200):
            self._device.empty(size)
        seconds = (time.perf_counter() - started) / 200
        found = self.found.setdefault("allocator", {})
        found["cached_allocation_seconds"] = _rounded(seconds)
        context = self._device.overhead_bytes - int(self._device.spec.gpu_bytes * self._device.spec.allocator_share)
        found["taken_on_the_card_bytes"] = max(0, context)
        found["context_bytes"] = context if 0 < context <= _MOST_CONTEXT_BYTES else CONTEXT_BYTES

    # Measuring.

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self._device.torch_device, generator=self._draws) * 0.02

    def _flops(self, load: _Load) -> float:
        return self._rates([load])[load.lane]

    def _submit(self, load: _Load, waits: Sequence[Event] = ()) -> Event:
        def work() -> None:
            load.work()

        return self._device.submit(load.lane, work, waits=waits, reads=(), writes=(), seconds=0.0)

    def _rates(self, loads: Sequence[_Load]) -> dict[str, float]:
        """Amount per second of each load while all of them run."""
        window = self._sizes.window_seconds
        once = {load.lane: self._seconds([load], {load.lane: 3})[load.lane] for load in loads}
        times = {lane: max(3, min(5000, math.ceil(window / max(seconds, 1e-9)))) for lane, seconds in once.items()}
        seconds = self._seconds(loads, times)
        return {load.lane: _rounded(load.amount / max(seconds[load.lane], 1e-9)) for load in loads}

    def _seconds(self, loads: Sequence[_Load], times: dict[Lane, int]) -> dict[Lane, float]:
        """The median of one time of each load, of those that ran while every lane had work."""
        for load in loads:
            self._submit(load)
        with self._device.timeline() as line:
            for i in range(max(times.values())):
                for load in loads:
                    if i < times[load.lane]:
                        self._submit(load)
        spans = {
            load.lane: sorted((span.start, span.end) for span in line.spans if span.lane == load.lane) for load in loads
        }
        start, end = max(found[0][0] for found in spans.values()), min(found[-1][1] for found in spans.values())
        common = {
            lane: [span for span in found if start <= span[0] and span[1] <= end] or found
            for lane, found in spans.items()
        }
        return {lane: statistics.median(b - a for a, b in found) for lane, found in common.items()}


def attention_flops(width: int, tokens: int) -> float:
    """Two products forward and five backward, each without the half that a causal mask hides: as a plan's roofline
    counts (device/observer.py).
    """
    return 7 * 2 * tokens**2 * width / 2


def _update(state: list[Tensor], scratch: Scratch) -> None:
    weight, lo, m, v, grad = state
    update(RULE, weight, lo, (m, v), grad, numbers=HYPER, clip=1.0, scratch=scratch)


def _adam_state(numel: int, empty: Callable[[int], Tensor]) -> list[Tensor]:
    """weight, lo, m, v, gradient, of tame values: denormals are slow on a CPU and rare in training."""
    dtypes = (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
    weight, lo, m, v, grad = (empty(numel * dtype.itemsize).view(dtype) for dtype in dtypes)
    draw = torch.randn(2**16, generator=torch.Generator().manual_seed(0)).to(weight)
    for part in (weight, grad):
        part.view(-1, draw.numel()).copy_(draw.expand(numel // draw.numel(), -1))
    lo.zero_()
    m.zero_()
    v.fill_(1.0)
    return [weight, lo, m, v, grad]


def _rounded(value: float) -> float:
    """To four digits: no rate is steadier."""
    return float(f"{value:.4g}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MiB}MiB" if num_bytes >= MiB else f"{num_bytes // 2**10}KiB"
