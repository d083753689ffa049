"""Measures the cases of `benchmarks.long`. In tiny mode, models of six layers and short rows, on a simulated GPU where
there is a plan, else on the CPU.
"""

import contextlib
import itertools
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from benchmarks import packed
from benchmarks.parts import ROOT, GiB, gib
from benchmarks.timing import Clock
from outsize.activation.strategies import RUN
from outsize.activation.tiles import Tiling
from outsize.activation.tokenwise import TileSearch
from outsize.device.choose import choose_device
from outsize.device.device import Device
from outsize.device.sdp_kernel import only_kernel, use_sdp_kernel
from outsize.hardware.host import peak_rss_bytes
from outsize.model.adapter import add_adapter, lora
from outsize.model.discover import find_layers
from outsize.model.strategies import TILE_TOKENS, choices
from outsize.optim.adamw import AdamW
from outsize.run.bench import training_step
from outsize.run.bench_long import bench_long
from outsize.run.random_weights import random_model, random_text
from outsize.run.shapes import SHAPES, shape_config
from outsize.schedule.pins import Pins
from outsize.schedule.render import summary
from outsize.setup import planner
from outsize.setup.prepare import prepare

if TYPE_CHECKING:
    from benchmarks.long import Case

TINY_TOKENS, TINY_TILE = 64, 16
_PINS: dict[str, str] = {strategy.name: strategy.pin for strategy in choices()}


def _config(case: "Case", tiny: bool, **changes: Any) -> tuple[Any, int]:
    """The model's config, and the tokens of a row."""
    if tiny:
        return shape_config({**SHAPES["tiny"], **changes}), TINY_TOKENS
    return shape_config(
        {**SHAPES["qwen3-8b"], "num_hidden_layers": case.layers, **changes}, seq=case.tokens
    ), case.tokens


def _kernel(case: "Case", tiny: bool) -> str:
    return "auto" if tiny else case.sdp_kernel


@contextlib.contextmanager
def _timed_profile() -> Iterator[dict[str, float]]:
    """Seconds of the profiling run of what is prepared within the block, and those of counting bytes on shapes."""
    found: dict[str, float] = {}
    profile = planner.profile_within_budget

    def timed(key: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **settings: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **settings)
            finally:
                found[key] = found.get(key, 0.0) + time.perf_counter() - began

        return run

    def run(trace: Any, count: Any, *args: Any, **settings: Any) -> Any:
        return timed("profile_s", profile)(trace, timed("count_s", count), *args, **settings)

    planner.profile_within_budget = run
    try:
        yield found
    finally:
        planner.profile_within_budget = profile


def engine(case: "Case", tiny: bool) -> dict[str, Any]:
    """A run with a plan, and its first steps beside the plan."""
    device = choose_device("sim:1GiB" if tiny else None)
    use_sdp_kernel(_kernel(case, tiny), device)
    config, tokens = _config(case, tiny)
    model, weights = random_model(config)
    if case.is_frozen:
        model = add_adapter(model, lora(r=16, task_type="CAUSAL_LM"))
    batches = random_text(config, 1, tokens, number=2)
    began = time.perf_counter()
    with _timed_profile() as profiled:
        made = prepare(
            model,
            batches[0],
            optimizer=AdamW(lr=1e-5, update="in_backward"),
            gpu_memory=None if tiny else case.gpu_memory,
            device=device,
            weights=weights,
            pins=Pins(**{_PINS[case.kept]: "all"}) if case.kept else None,  # type: ignore[arg-type]
            tile_tokens=TINY_TILE if tiny else TILE_TOKENS,
        )
    prepare_seconds = time.perf_counter() - began
    try:
        plan, clock = made.plan, Clock.of_engine(made)
        step = training_step(made, batches)
        began = clock.now()
        losses = [step()]
        clock.drain()
        first = clock.now() - began
        print(f"prepare {prepare_seconds:.1f} s, first step {first:.2f} s, planned {plan.estimate.step_seconds:.2f} s")
        marks = [clock.mark()]
        for _ in range(min(case.steps, 1) if tiny else case.steps):
            losses.append(step())  # read at the end: that would wait for the step
            marks.append(clock.mark())
        clock.drain()
        times = [clock.between(a, b) for a, b in itertools.pairwise(marks)]
        seconds = statistics.median(times or [first])
        is_gpu = device.is_gpu
        return {
            "device": device.spec.name,
            "torch": torch.__version__,
            "tokens": tokens,
            "layers": config.num_hidden_layers,
            "layer_input_gib": tokens * config.hidden_size * 2 / GiB,
            "prepare_s": prepare_seconds,
            **profiled,
            "first_step_s": first,
            "step_s": seconds,
            "times": times,
            "planned_step_s": plan.estimate.step_seconds,
            "tokens_per_s": tokens / seconds if seconds else None,
            "gpu_peak_gib": gib(device.peak_bytes),
            "planned_gpu_peak_gib": gib(plan.estimate.gpu_bytes),
            "gpu_reserved_gib": gib(torch.cuda.max_memory_reserved(device.torch_device)) if is_gpu else None,
            "host_gib": gib(peak_rss_bytes()),
            "planned_host_gib": gib(plan.estimate.host_bytes),
            "attention": plan.attention,
            "profiled_at": list(plan.extrapolated_from),
            "num_tiled": len(plan.tiled),
            "provenance": plan.provenance,
            "plan": summary(plan),
            "losses_finite": all(math.isfinite(loss) for loss in losses),
        }
    finally:
        made.close()
        use_sdp_kernel("auto", device)


def alone(case: "Case", tiny: bool) -> dict[str, Any]:
    """Forward and backward without an engine."""
    config, tokens = _config(case, tiny)
    found = bench_long(
        "tiny" if tiny else "qwen3-8b",
        config,
        tokens=tokens,
        activations=case.kept,
        device=choose_device("cpu" if tiny else None),
        steps=1 if tiny else case.steps,
        sdp_kernel=_kernel(case, tiny),
    )
    record = found.record()
    return {**record, "tokens_per_s": found.tokens_per_second, "layer_input_gib": tokens * config.hidden_size * 2 / GiB}


def layer(case: "Case", tiny: bool) -> dict[str, Any]:
    """Forward and backward of one recomputed layer, with or without tiles: seconds, and the peak of its backward above
    what is allocated when it begins (its input, its output's gradient, its weights and their gradients).
    """
    from transformers import AutoModel

    device = choose_device("cpu" if tiny else None)
    use_sdp_kernel(_kernel(case, tiny), device)
    config, tokens = _config(case, tiny, num_hidden_layers=1, vocab_size=1024)
    tile, place = TINY_TILE if tiny else TILE_TOKENS, device.torch_device
    with place:
        model = AutoModel.from_config(config, dtype=torch.bfloat16).train()
        x = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn_like(x)
        positions = model.rotary_emb(x, torch.arange(tokens)[None])
    one = model.layers[0]
    for param in one.parameters():
        param.grad = torch.zeros_like(param)
    settings = {"attention_mask": None, "position_embeddings": positions}
    search = TileSearch(model, find_layers(model), tile)
    search.attach()
    with torch.no_grad():
        one(x[:, : 2 * tile + 1], attention_mask=None, position_embeddings=[t[:, : 2 * tile + 1] for t in positions])
    search.detach()
    tiling = Tiling(model, tile, search.names if case.kept == "tiled" else ())
    tiling.attach()
    forwards, backwards, peak = [], [], 0
    try:
        with device.meter() as meter:
            for number in range(2 if tiny else 5):
                x.grad = None
                device.synchronize()
                start = device.mark()
                out = RUN["recompute"](one, (x,), settings, None, None, one)
                out = out if isinstance(out, torch.Tensor) else out[0]
                middle = device.mark()
                device.synchronize()
                before = meter.level()
                meter.reset_peak()
                restart = device.mark()
                out.backward(grad)
                del out
                end = device.mark()
                device.synchronize()
                if number:  # the first loads kernels
                    forwards.append(device.between(start, middle))
                    backwards.append(device.between(restart, end))
                    peak = max(peak, meter.peak() - before)
    finally:
        tiling.detach()
        use_sdp_kernel("auto", device)
    forward, backward = statistics.median(forwards), statistics.median(backwards)
    return {
        "tokens": tokens,
        "num_tiled": len(search.names) if case.kept == "tiled" else 0,
        "forward_s": forward,
        "backward_s": backward,
        "step_s": forward + backward,
        "backward_peak_h": peak / (tokens * config.hidden_size * 2),
    }


def packed_row(case: "Case", tiny: bool) -> dict[str, Any]:
    """A decoder layer over a row of 16 documents, with and without a mask."""
    if tiny:
        found = packed.rows(TINY_TOKENS, 4, place="cpu", shape="tiny", repeats=1)
    else:
        found = packed.rows(case.tokens, 16, repeats=2)
    flat = {f"{name} {key}": value for name, one in found.items() for key, value in one.items()}
    totals = {name: one["forward_ms"] + one["backward_ms"] for name, one in found.items() if one}
    if "masked" in totals:
        flat["masked_over_varlen"] = totals["masked"] / totals["varlen"]
    return flat


_TESTS = ("test_offload.py", "test_attention.py", "test_tiles.py", "test_packed.py")


def tests(case: "Case", tiny: bool) -> dict[str, Any]:
    """The tests of the offload, of attention, of tiles and of packed rows that need a GPU."""
    files = [f"tests/gpu/{name}" for name in _TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *(["--collect-only"] if tiny else []), *files]
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # for torch's deterministic mode
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", check=False
    )
    lines = [line for line in ran.stdout.splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    counts = {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1])}
    if ran.returncode:
        print("\n".join(lines[-80:]))
    problems = {"problem": " | ".join([*failed, *lines[-1:]])[:1500]} if ran.returncode and not tiny else {}
    return {"passed": 0, "failed": 0, **counts, **problems}


_HEADS = {64: (32, 8), 80: (32, 32), 96: (32, 32), 128: (32, 8), 256: (16, 8)}
"""Widths of heads that models use, with their numbers of heads of queries and of keys."""


def kernels(case: "Case", tiny: bool) -> dict[str, Any]:
    """Milliseconds of forward and backward of SDPA's kernels, causal, bf16."""
    device = choose_device("cpu" if tiny else None)
    lengths = (TINY_TOKENS,) if tiny else (4096, 16384, 32768, 65536)
    found: dict[str, Any] = {}
    for width, (queries, keys) in _HEADS.items():
        for tokens in lengths:
            for kernel in ("flash",) if tiny else ("flash", "cudnn", "efficient"):
                if tokens > 32768 and (width != 128 or kernel == "efficient"):
                    continue
                name = f"{width} wide, {tokens} tokens, {kernel} ms"
                try:
                    found[name] = _attention_ms(device, width, queries, keys, tokens, kernel)
                except RuntimeError as error:  # the kernel does not compute these shapes
                    found[name] = str(error).splitlines()[0][:100]
    return found


def _attention_ms(device: Device, width: int, queries: int, keys: int, tokens: int, kernel: str) -> list[float]:
    def tensor(heads: int) -> torch.Tensor:
        made = torch.randn(1, tokens, heads, width, dtype=torch.bfloat16, device=device.torch_device)
        return made.transpose(1, 2).requires_grad_()

    q, k, v = tensor(queries), tensor(keys), tensor(keys)
    times: list[tuple[float, float]] = []
    with only_kernel(kernel):
        for number in range(3):
            start = device.mark()
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=queries != keys)
            middle = device.mark()
            torch.autograd.grad(out, (q, k, v), out)
            end = device.mark()
            if number:
                times.append((device.between(start, middle), device.between(middle, end)))
    return [round(1e3 * min(one[part] for one in times), 3) for part in (0, 1)]


MEASURE: dict[str, Callable[["Case", bool], dict[str, Any]]] = {
    "engine": engine,
    "alone": alone,
    "layer": layer,
    "packed": packed_row,
    "tests": tests,
    "kernels": kernels,
}
