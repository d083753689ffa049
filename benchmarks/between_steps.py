"""The cost of access to prepared parameters between steps: `PYTHONPATH=src python -m benchmarks.between_steps --model
llama-1b`.

Compares the medians of alternating blocks of steps, with and without the class assignments of runtime/access.py. Then
times common reads and writes between steps under the same plan.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import outsize
from benchmarks.measure import complete
from benchmarks.shapes import random_batches, random_shape
from outsize.device.choose import choose_device
from outsize.runtime.access import ParameterAccess
from outsize.runtime.engine import Engine
from outsize.runtime.store import Store
from outsize.schedule.pins import Pins

_torch_clip = nn.utils.clip_grad_norm_


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--gpu-memory", default="24GiB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument(
        "--resident",
        action="store_true",
        help="everything on the GPU; default: everything streamed, updated on the host",
    )
    args = parser.parse_args()
    bench = complete(model=args.model, device=args.device, update="after_step", gpu_memory=args.gpu_memory)
    model, weights = random_shape(bench.model, seq=bench.seq)
    batches = random_batches(model, bench)
    pins = Pins() if args.resident else Pins(n_persist=0, n_optimizer_gpu=0, n_optimizer_streamed=0)
    engine = outsize.prepare(
        model,
        batches[0],
        optimizer=outsize.AdamW(lr=1e-5),
        device=choose_device(args.device),
        gpu_memory=args.gpu_memory,
        pins=pins,
        weights=weights,
    )
    print(
        f"{engine.device.spec.name}, torch {torch.__version__}, {' '.join(sys.argv)}; "
        f"{sum(1 for _ in model.parameters())} parameters"
    )
    feed = itertools.cycle(batches)
    for _ in range(3):
        step(engine, next(feed))
    found: dict[bool, list[float]] = {True: [], False: []}
    for block in range(2 * args.blocks):
        with_access = block % 2 == 0
        set_access(engine, with_access)
        step(engine, next(feed))
        for _ in range(args.steps):
            found[with_access].append(timed(engine, lambda: step(engine, next(feed))))
    set_access(engine, True)
    with_it, without = statistics.median(found[True]), statistics.median(found[False])
    print(
        f"step with access {with_it * 1e3:.2f} ms, without {without * 1e3:.2f} ms: "
        f"{100 * (with_it / without - 1):+.2f} %"
    )
    cost = statistics.median(timed_access(engine) for _ in range(20))
    print(
        f"of it, class assignments and checks of one forward and backward: {cost * 1e6:.0f} µs, "
        f"{100 * cost / with_it:.3f} % of the step"
    )
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    shadow = (
        [torch.zeros(p.shape, dtype=p.dtype, device="cpu") for p in model.parameters()] if not args.resident else None
    )
    for name, work in reads(model, shadow).items():
        seconds = timed(engine, work)
        print(f"{name:<44} {seconds * 1e3:8.1f} ms  {size / seconds / 1e9:6.1f} GB/s of weights")
    engine.model(**next(feed)).loss.backward()
    for name, work in clips(model).items():
        print(f"{name:<44} {timed(engine, work) * 1e3:8.1f} ms")
    engine.close()


def step(engine: Engine, batch: dict[str, Any]) -> None:
    engine.model(**batch).loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()


def timed(engine: Engine, work: Callable[[], Any]) -> float:
    engine.drain()
    started = time.perf_counter()
    work()
    engine.drain()
    return time.perf_counter() - started


def timed_access(engine: Engine) -> float:
    """Seconds of access per step: parameters change class four times, and the model's tables are compared."""
    access, store = engine.runtime.access, engine.runtime.store
    started = time.perf_counter()
    store.replaced()
    for _ in range(2):
        access.begin_pass()
        access.end_pass()
    return time.perf_counter() - started


_begin, _end, _replaced = ParameterAccess.begin_pass, ParameterAccess.end_pass, Store.replaced


def set_access(engine: Engine, on: bool) -> None:
    """Without it, parameters stay plain ones, as before there was such a thing."""
    if not on:
        engine.runtime.access.begin_pass()
    ParameterAccess.begin_pass = _begin if on else lambda self: None  # type: ignore[method-assign]
    ParameterAccess.end_pass = _end if on else lambda self: None  # type: ignore[method-assign]
    Store.replaced = _replaced if on else lambda self: None  # type: ignore[method-assign]
    if on:
        engine.runtime.access.end_pass()


@torch.no_grad()
def _norms(model: nn.Module) -> float:
    return float(torch.stack([p.detach().float().norm() for p in model.parameters()]).norm())


@torch.no_grad()
def _ema(model: nn.Module, shadow: list[torch.Tensor]) -> None:
    for mine, param in zip(shadow, model.parameters(), strict=True):
        mine.mul_(0.99).add_(param.data.to(mine.device), alpha=0.01)


@torch.no_grad()
def _clamp(model: nn.Module) -> None:
    for param in model.parameters():
        param.clamp_(-1.0, 1.0)


def reads(model: nn.Module, shadow: list[torch.Tensor] | None) -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {"norms of all weights": lambda: _norms(model)}
    if shadow is not None:
        found["EMA kept on the CPU"] = lambda: _ema(model, shadow)
    return {**found, "clamp of all weights (bf16: compares masters)": lambda: _clamp(model)}


def clips(model: nn.Module) -> dict[str, Callable[[], Any]]:
    return {
        "clip_grad_norm_ through the engine": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        "torch's own clip_grad_norm_ on p.grad": lambda: _torch_clip(model.parameters(), 1.0),
    }


if __name__ == "__main__":
    main()
