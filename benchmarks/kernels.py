"""Speed of the update kernels: C on the host by number of threads, alone and beside copies; Triton and torch on the
GPU; copies.

    PYTHONPATH=src python benchmarks/kernels.py [--params 268435456] [--out FILE.json]

Without CUDA, only the host is measured. Ranges exceed every cache and use huge pages, as in the engine. Takes half a
minute.
"""

import argparse
import json
import mmap
import os
import platform
import statistics
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outsize.layout.optimizer import PIECE_NUMEL
from outsize.optim.adamw import RULE
from outsize.optim.native import kernel
from outsize.optim.rule import Master, Scratch, find_gpu_kernel, gpu_kernel, update

HYPER = RULE.numbers(dict(lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1), 1000)
NUMBERS = HYPER
BYTES = 26
"""A parameter of a split master with a bf16 gradient: hi, lo, m and v are read and written, the gradient is read."""
COPY_BYTES = 256 * 2**20


def host_empty(num_bytes: int) -> Tensor:
    """Zeroed, in huge pages where the system gives them."""
    pages = mmap.mmap(-1, num_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.frombuffer(pages, dtype=torch.uint8).zero_()


def make_range(numel: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """weight, lo, m, v, gradient, of tame values: denormals are slow on a CPU and rare in training."""

    def empty(dtype: torch.dtype) -> Tensor:
        size = numel * dtype.itemsize
        return (host_empty(size) if device == "cpu" else torch.zeros(size, dtype=torch.uint8, device=device)).view(
            dtype
        )

    weight, lo, m, v, grad = (
        empty(dtype) for dtype in (torch.bfloat16, torch.int16, torch.float32, torch.float32, torch.bfloat16)
    )
    draw = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    for at in range(0, numel, 2**20):
        weight[at : at + 2**20] = draw[: numel - at]
        grad[at : at + 2**20] = draw[: numel - at]
    v.fill_(1.0)
    return weight, lo, m, v, grad


def seconds_of(work: Callable[[], object], *, total: float, at_least: int = 3) -> float:
    """Median over as many calls as fit into `total` seconds. `work` is done when it returns."""
    work()
    taken: list[float] = []
    began = time.perf_counter()
    while len(taken) < at_least or time.perf_counter() - began < total:
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


class Link:
    """Copies between two pinned buffers and the GPU, on two streams, kept busy by a thread while others are
    measured.
    """

    def __init__(self) -> None:
        self._host = {way: host_empty(COPY_BYTES) for way in ("h2d", "d2h")}
        for buffer in self._host.values():
            status = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), COPY_BYTES, 0)
            assert int(status) == 0, f"cudaHostRegister: {status}"
        self._card = {way: torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda") for way in self._host}
        self._streams = {way: torch.cuda.Stream() for way in self._host}
        torch.cuda.synchronize()

    @contextmanager
    def busy(self, ways: tuple[str, ...], rates: dict[str, float]) -> Any:
        """Fills `rates` (GB/s by way) at the end."""
        stop = threading.Event()
        threads = [threading.Thread(target=self._copy, args=(way, stop, rates)) for way in ways]
        for thread in threads:
            thread.start()
        time.sleep(0.02)
        yield
        stop.set()
        for thread in threads:
            thread.join()

    def _copy(self, way: str, stop: threading.Event, rates: dict[str, float]) -> None:
        source, target = (self._host[way], self._card[way]) if way == "h2d" else (self._card[way], self._host[way])
        waiting: list[torch.cuda.Event] = []
        done, began = 0, time.perf_counter()
        while not stop.is_set() or waiting:
            if not stop.is_set():
                with torch.cuda.stream(self._streams[way]):
                    target.copy_(source, non_blocking=True)
                    event = torch.cuda.Event(blocking=True)
                    event.record()
                waiting.append(event)
            if len(waiting) > 3 or stop.is_set():
                waiting.pop(0).synchronize()
                done += 1
        rates[way] = done * COPY_BYTES / (time.perf_counter() - began) / 1e9


def measure_host(numel: int, link: Link | None) -> list[dict[str, Any]]:
    native = kernel()
    if native is None:
        print("no C kernel here: its part is left out")
        return []
    state = make_range(numel, "cpu")
    cores = len(os.sched_getaffinity(0))
    rows = []
    beside: list[tuple[str, ...]] = [()] if link is None else [(), ("h2d",), ("d2h",), ("h2d", "d2h")]
    print(
        f"C kernel, {numel / 1e6:.0f} M parameters: G parameters/s (GB/s of memory), and GB/s of the copies beside it"
    )
    for threads in [n for n in (1, 2, 4, 8, 12, 14, 16) if n <= cores and (n >= 4 or cores < 4)]:
        cells = []
        for ways in beside:
            rates: dict[str, float] = {}

            def work(threads: int = threads) -> None:
                weight, lo, m, v, grad = state
                native.update("adamw", weight, lo, (m, v), grad, (*NUMBERS, 1.0), threads=threads)

            if ways and link is not None:
                with link.busy(ways, rates):
                    seconds = seconds_of(work, total=0.3)
            else:
                seconds = seconds_of(work, total=0.3)
            rate = numel / seconds / 1e9
            rows.append(
                {
                    "threads": threads,
                    "beside": list(ways),
                    "gparams_per_second": rate,
                    "gbytes_per_second": rate * BYTES,
                    "copies_gbps": rates,
                }
            )
            copies = ", ".join(f"{way} {value:.1f}" for way, value in rates.items())
            cells.append(
                f"{'+'.join(ways) or 'alone'} {rate:.2f} ({rate * BYTES:.0f})" + (f" [{copies}]" if copies else "")
            )
        print(f"  {threads:2} threads: " + "; ".join(cells))
    return rows


def measure_host_torch(numel: int) -> dict[str, Any]:
    """The fallback, called past the one door."""
    state = make_range(numel, "cpu")
    scratch = Scratch(torch.empty(RULE.layout.scratch_bytes(PIECE_NUMEL), dtype=torch.uint8))

    def work() -> None:
        for at in range(0, numel, PIECE_NUMEL):
            weight, lo, m, v, grad = (t[at : at + PIECE_NUMEL] for t in state)
            RULE.update_piece(Master(weight, lo, scratch.mask), (m, v), grad, HYPER, 1.0, scratch)

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    rate = numel / seconds_of(work, total=0.2, at_least=1) / 1e9
    print(f"torch on the host, {torch.get_num_threads()} threads: {rate:.2f} G parameters/s")
    return {"threads": torch.get_num_threads(), "gparams_per_second": rate}


def gpu_seconds(work: Callable[[], object], repeats: int = 20) -> float:
    work()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events)) / 1e3


def measure_gpu(numel: int) -> list[dict[str, Any]]:
    weight, lo, m, v, grad = make_range(numel, "cuda")
    rows = []
    triton = gpu_kernel()

    def say(name: str, seconds: float, num_bytes: int) -> None:
        rate = numel / seconds / 1e9
        rows.append({"kernel": name, "gparams_per_second": rate, "gbytes_per_second": rate * num_bytes})
        print(f"  {name:40} {rate:7.1f} G parameters/s {rate * num_bytes:7.0f} GB/s")

    print(f"GPU, {numel / 1e6:.0f} M parameters")
    if triton is not None:
        for block, warps in ((1024, 8), (512, 4), (1024, 4), (2048, 8)):
            seconds = gpu_seconds(
                partial(triton.update, "adamw", weight, lo, (m, v), grad, NUMBERS, 1.0, block=block, warps=warps)
            )
            say(f"Triton, split, bf16, block {block}, {warps} warps", seconds, BYTES)
        whole, wide = torch.zeros(numel, device="cuda"), torch.ones(numel, device="cuda")
        say(
            "Triton, split, fp32 gradient",
            gpu_seconds(lambda: triton.update("adamw", weight, lo, (m, v), wide, NUMBERS, 1.0)),
            BYTES + 2,
        )
        say(
            "Triton, fp32 weight, bf16 gradient",
            gpu_seconds(lambda: triton.update("adamw", whole, None, (m, v), grad, NUMBERS, 1.0)),
            BYTES,
        )
        say(
            "Triton, fp32 weight, fp32 gradient",
            gpu_seconds(lambda: triton.update("adamw", whole, None, (m, v), wide, NUMBERS, 1.0)),
            BYTES + 2,
        )
        n = 2**20
        small: Any = (weight[:n], lo[:n], (m[:n], v[:n]), grad[:n])
        launch = seconds_of(lambda: [triton.update("adamw", *small, NUMBERS, 1.0) for _ in range(100)], total=0.1) / 100
        torch.cuda.synchronize()
        rows.append({"kernel": "Triton, one call of 2^20", "host_microseconds": launch * 1e6})
        print(f"  a call of 2^20 parameters takes the host {launch * 1e6:.0f} us")
        del whole, wide
    os.environ["OUTSIZE_KERNELS"] = "torch"
    find_gpu_kernel.cache_clear()
    scratch = Scratch(torch.empty(RULE.layout.scratch_bytes(PIECE_NUMEL), dtype=torch.uint8, device="cuda"))
    say(
        "torch",
        gpu_seconds(
            lambda: update(RULE, weight, lo, (m, v), grad, numbers=HYPER, clip=1.0, scratch=scratch), repeats=3
        ),
        BYTES,
    )
    return rows


def measure_link(link: Link) -> dict[str, dict[str, float]]:
    rows = {}
    for ways in (("h2d",), ("d2h",), ("h2d", "d2h")):
        rates: dict[str, float] = {}
        with link.busy(ways, rates):
            time.sleep(0.4)
        rows["+".join(ways)] = rates
        print("link, " + " and ".join(f"{way} {value:.1f} GB/s" for way, value in rates.items()))
    return rows


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", type=int, default=2**28)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    cuda = torch.cuda.is_available()
    torch.set_num_threads(len(os.sched_getaffinity(0)))  # for filling
    facts: dict[str, Any] = {
        "date": date.today().isoformat(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if cuda else "none",
        "params": options.params,
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    link = Link() if cuda else None
    if link is not None:
        facts["link"] = measure_link(link)
    facts["host"] = measure_host(options.params, link)
    facts["host_torch"] = measure_host_torch(min(options.params, 2**24))
    if cuda:
        facts["gpu_rows"] = measure_gpu(options.params)
    facts["seconds"] = time.perf_counter() - began
    print(f"took {facts['seconds']:.0f} s")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
