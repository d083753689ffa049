"""One benchmark run: a model with random weights, prepared as a user does, timed, and compared with its plan and with
the limits of the machine.
"""

import dataclasses
import datetime
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
import transformers

from benchmarks.bench_record import Baseline, Bench, Lanes, Machine, Memory, Prediction, Result, Speed, StartUp
from benchmarks.limits import Demand, limit
from benchmarks.plain import run_baseline
from benchmarks.shapes import random_batches, random_shape
from benchmarks.timing import Clock, Timed, time_steps
from outsize.base.errors import ConfigError
from outsize.base.records import fingerprint
from outsize.base.units import parse_bytes
from outsize.cli.bench import SMALL_CHUNK_BYTES, SMALL_DEVICE
from outsize.device.choose import choose_device
from outsize.device.timeline import Timeline
from outsize.hardware.host import peak_rss_bytes
from outsize.hardware.lanes import LANES
from outsize.hardware.spec import HardwareSpec
from outsize.layout.chunks import DEFAULT_CHUNK_BYTES
from outsize.methods.osft.method import OSFT
from outsize.optim.adamw import AdamW
from outsize.report.measured import Measured
from outsize.report.page import write_page
from outsize.report.trace import write_trace
from outsize.run.bench import training_step
from outsize.runtime.engine import Engine
from outsize.schedule.actions import TYPES, action_seconds, effect
from outsize.schedule.check import save
from outsize.schedule.placement import Placement
from outsize.schedule.render import render, summary
from outsize.schedule.schedule import compile_schedule
from outsize.setup.prepare import prepare

TRACED_STEPS = 3


def complete(
    *,
    model: str | None = None,
    device: str | None = None,
    micro_batch: int | None = None,
    seq: int | None = None,
    steps: int = 8,
    warm_up: int = 1,
    accumulate: int = 1,
    update: str | None = None,
    clip: float | None = None,
    gpu_memory: str | None = None,
    host_memory: str | None = None,
    plan: Path | None = None,
    images: int | None = None,
    image_size: int = 1024,
    osft: float | None = None,
) -> Bench:
    """Fill in defaults: a real model on a GPU, otherwise `tiny` on `sim`."""
    has_gpu = device.startswith("cuda") if device is not None else choose_device().is_gpu
    model = model or ("llama-1b" if has_gpu else "tiny")
    if device is None and not has_gpu and model != "tiny":
        raise ConfigError(f"--model {model} needs a GPU, and there is none. Use --model tiny or --device sim:<name>.")
    if update is None:
        update = "in_backward" if clip is None and accumulate == 1 else "after_step"
    if clip is not None and update == "in_backward":
        raise ConfigError("--clip needs all gradients before the update. Remove it, or use --update after-step.")
    sizes = {"micro-batch": micro_batch, "seq": seq, "steps": steps, "warm-up": warm_up, "accumulate": accumulate}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{name} {value} is too small. Use 1 or more.")
    rows, tokens = (8, 1024) if has_gpu else (2, 64)
    return Bench(
        model=model,
        device=device or ("cuda" if has_gpu else SMALL_DEVICE),
        micro_batch=micro_batch or rows,
        seq=seq or tokens,
        steps=steps,
        warm_up=warm_up,
        accumulate=accumulate,
        update="in_backward" if update == "in_backward" else "after_step",
        clip=clip,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        plan=str(plan) if plan is not None else None,
        images=images,
        image_size=image_size,
        osft=osft,
    )


def run_bench(
    bench: Bench,
    *,
    say: Callable[[str], None],
    trace: Path | None = None,
    page: Path | None = None,
    save_plan: Path | None = None,
    command: str = "",
    version: str = "",
    same_layers: bool = False,
) -> Result:
    """`trace` and `page` are files: the measured lanes for Perfetto, and the report page. `command` and `version` are
    stored in the result. `same_layers`: all layers have the first one's weights.
    """
    device = choose_device(bench.device)  # an unknown name fails before a model is built
    before = peak_rss_bytes()
    marks = [time.perf_counter()]
    model, weights = random_shape(bench.model, seq=bench.seq, same_layers=same_layers)
    marks.append(time.perf_counter())
    batches = random_batches(model, bench)
    engine = prepare(
        model,
        batches[0],
        optimizer=AdamW(lr=1e-5, update=bench.update, max_grad_norm=bench.clip),
        method=None if bench.osft is None else OSFT(unfreeze_rank_ratio=bench.osft, others=bench.osft_others),
        gpu_memory=bench.gpu_memory,
        host_memory=bench.host_memory,
        device=device,
        accumulate=bench.accumulate,
        plan=bench.plan,
        weights=weights,
        chunk_bytes=SMALL_CHUNK_BYTES if bench.model == "tiny" else DEFAULT_CHUNK_BYTES,
    )
    marks.append(time.perf_counter())
    try:
        say(render(engine.plan, engine.graph, engine.layout))
        if save_plan is not None:
            save(engine.plan, save_plan)
        step = training_step(engine, batches, bench.accumulate)
        timed = time_steps(step, Clock.of_engine(engine), warm_up=bench.warm_up, steps=bench.steps)
        memory = _memory(engine, before)
        with device.timeline() as timeline:
            for _ in range(TRACED_STEPS):
                step()
        if trace is not None:
            write_trace(timeline.spans, trace)
        start_up = StartUp(
            build_seconds=marks[1] - marks[0],
            prepare_seconds=marks[2] - marks[1],
            first_step_seconds=timed.first_step_seconds,
        )
        result = _result(
            bench, engine, timed, memory, timeline, start_up, command=command, machine=_machine(engine, version)
        )
        if page is not None:
            found = Measured(
                step_seconds=result.speed.median_step_seconds,
                gpu_bytes=memory.gpu_peak_bytes,
                spans=timeline.spans,
                where=result.machine.device,
                tokens_per_second=result.speed.tokens_per_second,
            )
            write_page(page, engine.plan, engine.graph, engine.layout, device.spec, title=bench.model, measured=found)
        return result
    finally:
        engine.close()


def compare(result: Result, kinds: Sequence[str]) -> Result:
    """The same shape in plain loops, each in a process of its own. After ours has ended: its memory is free again."""
    baselines: dict[str, Baseline] = {}
    for kind in kinds:
        baseline = run_baseline(kind, result.bench)
        if baseline.speed is not None and not result.is_simulated:
            ratio = result.speed.tokens_per_second / baseline.speed.tokens_per_second
            baseline = dataclasses.replace(baseline, ratio=ratio)
        baselines[kind] = baseline
    return dataclasses.replace(result, baselines=baselines)


def _memory(engine: Engine, before: int) -> Memory:
    kind, host = engine.device.kind, peak_rss_bytes()
    return Memory(
        gpu_peak_bytes=engine.device.peak_bytes if kind != "cpu" else None,
        gpu_reserved_bytes=torch.accelerator.max_memory_reserved(engine.device.torch_device)
        if kind == "cuda"
        else None,
        gpu_trial_bytes=getattr(engine.device, "trial_peak_bytes", None),
        host_peak_bytes=host,
        host_before_bytes=before,
        host_bytes_per_param=host / engine.graph.num_params,
    )


def demand_of(place: Placement, spec: HardwareSpec) -> Demand:
    """The plan's own actions, added up. On a machine that does one of everything in a second, their seconds are the
    bytes and parameters.
    """
    unit = dataclasses.replace(
        spec,
        launch_seconds=0.0,
        h2d_bytes_per_second=1.0,
        d2h_bytes_per_second=1.0,
        host_adam_params_per_second=1.0,
        gpu_adam_params_per_second=1.0,
    )
    in_backward = place.step_config.update == "in_backward"
    sums = dict.fromkeys(LANES, 0.0)
    updated = 0.0
    for segment in compile_schedule(place, only_steps=True).step(place.step_config.accumulate, in_backward):
        for action in segment.actions:
            lane = effect(place, action).lane
            amount = action_seconds(place, action, unit, lane)
            if lane == "compute" and TYPES[action.kind].operation in ("update", "add"):
                updated += amount
            else:
                sums[lane] += amount
    forward, backward = (
        sum(getattr(work, f"{name}_seconds") for work in place.work) for name in ("forward", "backward")
    )
    return Demand(
        compute_seconds=sums["compute"],
        hiding_seconds=forward + (backward if in_backward else 0.0),
        h2d_bytes=sums["h2d"],
        d2h_bytes=sums["d2h"],
        host_params=sums["host"],
        gpu_params=updated,
    )


def _result(
    bench: Bench,
    engine: Engine,
    timed: Timed,
    memory: Memory,
    timeline: Timeline,
    start_up: StartUp,
    *,
    command: str,
    machine: Machine,
) -> Result:
    plan = engine.plan
    speed = Speed.of(bench.tokens, bench.steps, timed.window_seconds, timed.step_seconds)
    best = limit(demand_of(engine.runtime.place, engine.device.spec), engine.device.spec)
    return Result(
        bench=bench,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=command,
        machine=machine,
        num_params=engine.graph.num_params,
        is_simulated=engine.device.is_simulated,
        speed=speed,
        memory=memory,
        start_up=start_up,
        plan=_prediction(engine, memory),
        lanes=_lanes(timeline, speed.median_step_seconds),
        limit=best,
        limit_ratio=speed.median_step_seconds / best.seconds if best.seconds else 0.0,
        losses_finite=all(loss - loss == 0.0 for loss in timed.losses),
        within_budget=_within_budget(bench, memory, plan.gpu_budget_bytes),
        baselines={},
    )


def _prediction(engine: Engine, memory: Memory) -> Prediction:
    plan, place = engine.plan, engine.runtime.place
    estimate, process_overhead = plan.estimate, plan.process_overhead
    # Weights that live on the card alone come through the host one by one, among the homes of others and before all
    # else of the plan.
    alone = [chunk for chunk in place.layout.chunks if not place.has_host_weights(chunk.index)]
    passing = max((chunk.nbytes * piece.numel // chunk.numel for chunk in alone for piece in chunk.pieces), default=0)
    homes = place.parts(place.host).get("home", 0)
    # Libraries are loaded by then if there was a profiling run; with a cached trace, the first step loads them.
    loaded = process_overhead.host_bytes if memory.gpu_trial_bytes else memory.host_before_bytes
    return Prediction(
        fingerprint=fingerprint(plan),
        summary=summary(plan),
        step_seconds=estimate.step_seconds,
        gpu_bytes=estimate.gpu_bytes,
        gpu_reserved_bytes=int(estimate.gpu_bytes * (1 + engine.device.spec.allocator_share))
        + process_overhead.workspace_bytes,
        gpu_budget_bytes=plan.gpu_budget_bytes,
        host_bytes=estimate.host_bytes,
        host_process_bytes=max(estimate.host_bytes + process_overhead.host_bytes, homes + passing + loaded),
        provenance=plan.provenance,
        search=plan.search,
    )


def _within_budget(bench: Bench, memory: Memory, planned: int) -> bool:
    """Whether reserved GPU memory is within `gpu_memory`; on `sim`, the peak within the plan's budget."""
    if memory.gpu_reserved_bytes is not None:
        return bench.gpu_memory is None or memory.gpu_reserved_bytes <= parse_bytes(bench.gpu_memory)
    return memory.gpu_peak_bytes is None or memory.gpu_peak_bytes <= planned


def _lanes(timeline: Timeline, step_seconds: float) -> Lanes:
    busy = {lane: seconds / TRACED_STEPS for lane, seconds in timeline.busy_seconds().items()}
    shares = {lane: seconds / step_seconds if step_seconds else 0.0 for lane, seconds in busy.items()}
    return Lanes(
        num_steps=TRACED_STEPS, busy_seconds=busy, shares=shares, bottleneck=max(shares, key=lambda lane: shares[lane])
    )


def _machine(engine: Engine, version: str) -> Machine:
    spec = engine.device.spec
    versions = {
        "outsize": version,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return Machine(
        device=spec.name if not engine.device.is_simulated else f"sim ({spec.name})",
        gpu_bytes=spec.gpu_bytes,
        cpu=platform.processor() or platform.machine(),
        cores=os.cpu_count() or 0,
        threads=torch.get_num_threads(),
        host_bytes=psutil.virtual_memory().total,
        versions={**versions, "cuda": torch.version.cuda or "none"},
    )
