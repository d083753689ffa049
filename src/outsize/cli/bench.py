"""`outsize bench`: train a model of random weights for some steps, and print the plan and the measurement.

The developers' benchmarks (comparisons, tables, reports) are in the repository's benchmarks/.
"""

import json
import math
import time
from pathlib import Path
from typing import Annotated

import typer

from outsize.base.errors import ConfigError
from outsize.base.units import show_bytes, show_seconds
from outsize.cli.options import MICRO_BATCH, SEQUENCE_LEN
from outsize.run.shapes import SHAPES, require_one_of, shape_config

_DOC = f"""How fast does this machine train, and is that what the plan predicts?

Weights and text are random: speed and memory do not depend on them. Without a GPU, a tiny model runs on a simulated
one.

Models: {", ".join(SHAPES)}; or the path of a folder with a config.json.

[bold]Examples[/bold]

outsize bench --model llama-3b --gpu-memory 24GiB

outsize bench --model llama-3b --gpu-memory 24GiB --clip 1.0 --accumulate 4     [dim]updates after the step[/dim]

outsize bench --long --seq 65536     [dim]forward and backward of one long row, without an optimizer[/dim]
"""
SIMULATED = (
    "The GPU is simulated: the CPU computes, and the seconds below are simulated. They say nothing about any machine.\n"
)
WARM_UP_STEPS = 3
SMALL_DEVICE, SMALL_CHUNK_BYTES = "sim:8MiB", 256 * 2**10
"""For `tiny` without a GPU: a budget far below what a resident `tiny` needs."""


def bench(
    model: Annotated[
        str | None,
        typer.Option(
            help="A model of the list, or a path.", show_default="llama-1b, qwen3-8b with --long; tiny without a GPU"
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Maximum GPU memory, CUDA context included: 24GiB.", show_default="what is free")
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Maximum host memory.", show_default="what is free, less a tenth")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(*MICRO_BATCH, min=1, help="Rows of a batch.", show_default="8; 2 without a GPU")
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(
            *SEQUENCE_LEN, min=1, help="Tokens of a row.", show_default="1024, 32768 with --long; 64 without a GPU"
        ),
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Backward passes per optimizer step.")] = 1,
    clip: Annotated[float | None, typer.Option(help="Clip the gradient norm.", show_default="no clipping")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to time, after three warm-up steps.")] = 8,
    device: Annotated[
        str | None,
        typer.Option(help="cuda, cpu, or sim:<catalog name, .yaml file or size>.", show_default="the GPU, if any"),
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", help="Forward and backward of one long row, without a plan or an optimizer.")
    ] = False,
    activations: Annotated[
        str | None,
        typer.Option(
            help="With --long: hidden_states, hidden_states+attention (on the host), disk, or checkpoint.",
            show_default="hidden_states",
        ),
    ] = None,
    sdp_kernel: Annotated[
        str | None,
        typer.Option(help="With --long: SDPA's kernel: flash, cudnn, efficient or math.", show_default="torch chooses"),
    ] = None,
) -> None:
    if model is not None and not Path(model).exists():
        require_one_of(SHAPES, model, "--model")
    of_plans = {
        "--gpu-memory": gpu_memory,
        "--host-memory": host_memory,
        "--micro-batch-size": micro_batch,
        "--clip": clip,
        "--accumulate": accumulate if accumulate > 1 else None,
    }
    if long and (beside := [option for option, value in of_plans.items() if value is not None]):
        raise ConfigError(f"--long: {', '.join(beside)} has no effect without a plan. Leave it out.")
    of_long = {"--activations": activations, "--sdp-kernel": sdp_kernel}
    if not long and (alone := [option for option, value in of_long.items() if value is not None]):
        raise ConfigError(f"{', '.join(alone)} has no effect without --long. Add it.")
    if long:
        kept, kernel = activations or "hidden_states", sdp_kernel or "auto"
        _bench_long(model, tokens=seq, activations=kept, device=device, steps=steps, sdp_kernel=kernel)
        return

    # Imports take seconds: wrong options were reported before them.
    from outsize.device.choose import choose_device
    from outsize.hardware.host import peak_rss_bytes
    from outsize.layout.chunks import DEFAULT_CHUNK_BYTES
    from outsize.model.build import load_config
    from outsize.optim.names import default_spec
    from outsize.run.bench import training_step
    from outsize.run.quiet import quiet
    from outsize.run.random_weights import random_model, random_text
    from outsize.schedule.render import render
    from outsize.setup.prepare import prepare

    quiet()
    chosen = choose_device(device)
    has_gpu = chosen.is_gpu
    model = model or ("llama-1b" if has_gpu else "tiny")
    if device is None and not has_gpu:
        if model != "tiny":
            raise ConfigError(
                f"--model {model} needs a GPU, and there is none. Use --model tiny, or simulate a GPU on the CPU with "
                "--device sim:<name> (slow)."
            )
        chosen = choose_device(SMALL_DEVICE)
    if chosen.is_simulated:
        print(SIMULATED)
    rows, tokens = micro_batch or (8 if has_gpu else 2), seq or (1024 if has_gpu else 64)
    config = shape_config(SHAPES[model], seq=tokens) if model in SHAPES else load_config(model)
    built, weights = random_model(config)
    batches = random_text(config, rows, tokens)
    in_backward = clip is None and accumulate == 1
    engine = prepare(
        built,
        batches[0],
        optimizer=default_spec(lr=1e-5, update="in_backward" if in_backward else "after_step", max_grad_norm=clip),
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        device=chosen,
        accumulate=accumulate,
        weights=weights,
        chunk_bytes=SMALL_CHUNK_BYTES if model == "tiny" else DEFAULT_CHUNK_BYTES,
    )
    now = time.perf_counter if has_gpu else lambda: engine.report().seconds  # simulated seconds on `sim`
    try:
        print(f"{render(engine.plan, engine.graph, engine.layout)}\n", flush=True)
        step = training_step(engine, batches, accumulate)
        losses = [step() for _ in range(WARM_UP_STEPS)]
        engine.drain()
        started = now()
        losses += [step() for _ in range(steps)]
        engine.drain()
        mean = (now() - started) / steps
        per_step, planned = rows * tokens * accumulate, engine.plan.estimate
        predicted = f"{per_step / planned.step_seconds:,.0f}" if planned.step_seconds else ""
        gpu = chosen.peak_bytes if chosen.has_own_memory else 0
        found = [
            ("", "measured", "predicted", ""),
            ("tokens/s", f"{per_step / mean:,.0f}", predicted, ""),
            ("step", show_seconds(mean), show_seconds(planned.step_seconds), f"mean of {steps}"),
            ("GPU peak", show_bytes(gpu), show_bytes(planned.gpu_bytes), "allocated"),
            ("host peak", show_bytes(peak_rss_bytes()), show_bytes(planned.host_bytes), "measured: the whole process"),
        ]
        print(f"{model}, {engine.graph.num_params:,} parameters, {rows} × {tokens} tokens, on {chosen.spec.name}\n")
        print("\n".join(f"{name:<9}  {a:>10}  {b:>10}  {note}".rstrip() for name, a, b, note in found))
    finally:
        engine.close()
    if not all(math.isfinite(loss) for loss in losses):
        print("WRONG      a loss is not finite")
        raise typer.Exit(1)


def _bench_long(
    model: str | None, *, tokens: int | None, activations: str, device: str | None, steps: int, sdp_kernel: str
) -> None:
    from outsize.device.choose import choose_device
    from outsize.device.sdp_kernel import KERNELS
    from outsize.model.build import load_config
    from outsize.run.bench_long import ACTIVATIONS, bench_long
    from outsize.run.quiet import quiet

    quiet()
    require_one_of(ACTIVATIONS, activations, "--activations")
    require_one_of(("auto", *KERNELS), sdp_kernel, "--sdp-kernel")
    chosen = choose_device(device)
    if chosen.is_simulated:
        raise ConfigError("--long measures a real device, and sim has no speed of its own. Use --device cuda or cpu.")
    model = model or ("qwen3-8b" if chosen.is_gpu else "tiny")
    tokens = tokens or (32768 if chosen.is_gpu else 64)
    config = shape_config(SHAPES[model], seq=tokens) if model in SHAPES else load_config(model)
    found = bench_long(
        model, config, tokens=tokens, activations=activations, device=chosen, steps=steps, sdp_kernel=sdp_kernel
    )
    print(f"{found}\n\nRESULT {json.dumps(found.record())}")
    if not all(math.isfinite(loss) for loss in found.losses):
        print("WRONG      a loss is not finite")
        raise typer.Exit(1)


bench.__doc__ = _DOC
