"""How fast this machine trains a model of a known shape, compared with the plan, the hardware and a plain loop.

Run it in the repository root: `PYTHONPATH=src python -m benchmarks.bench --model llama-3b --gpu-memory 24GiB`.
"""

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.shapes import SHAPES
from outsize.base.errors import ConfigError, OutsizeError
from outsize.cli.options import MICRO_BATCH, SEQUENCE_LEN, require_file, update_mode
from outsize.run.shapes import require_one_of

_DOC = f"""How fast does this machine train, and is that what the plan predicts?

Weights and text are random: speed and memory do not depend on them. Without a GPU, a tiny model runs on a simulated
one.

Shapes: {", ".join(SHAPES)}.

[bold]Examples[/bold], each after `PYTHONPATH=src python -m benchmarks.bench`

--model llama-3b --gpu-memory 24GiB

--model llama-3b --gpu-memory 24GiB --clip 1.0 --accumulate 4     [dim]updates after the step[/dim]

--model llama-1b --compare plain,checkpointed     [dim]beside a plain loop, all on the GPU[/dim]

--model llama-7b --gpu-memory 24GiB --trace lanes.json     [dim]lanes for ui.perfetto.dev[/dim]

--model llama-7b --gpu-memory 24GiB --html run.html     [dim]the report page of plan and run[/dim]

--model qwen2.5-vl-7b --micro-batch 2 --seq 4096 --images 2     [dim]with images in every row[/dim]

--model llama-1b,llama-3b,llama-7b --gpu-memory 24GiB     [dim]a process for each, and a table[/dim]
"""
_BASELINES = ("plain", "checkpointed")


def bench(
    model: Annotated[
        str | None,
        typer.Option(help="A shape, or several with commas between.", show_default="llama-1b; tiny without a GPU"),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(help="Most GPU memory to use, such as 24GiB, CUDA context included.", show_default="what is free"),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Most host memory to use.", show_default="what is free, less a tenth")
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(*MICRO_BATCH, help="Rows of a batch.", show_default="8; 2 without a GPU")
    ] = None,
    seq: Annotated[
        int | None, typer.Option(*SEQUENCE_LEN, help="Tokens of a row.", show_default="1024; 64 without a GPU")
    ] = None,
    images: Annotated[
        int | None, typer.Option(help="Images per row, for vision models.", show_default="1 for those")
    ] = None,
    image_size: Annotated[int, typer.Option(help="Pixels of an image's side.")] = 1024,
    accumulate: Annotated[int, typer.Option(help="Backward passes per optimizer step.")] = 1,
    clip: Annotated[float | None, typer.Option(help="Clip the gradient norm here.", show_default="no clipping")] = None,
    osft: Annotated[
        float | None,
        typer.Option(help="Train this share of directions with OSFT; the rest is frozen.", show_default="full"),
    ] = None,
    update: Annotated[
        str | None,
        typer.Option(help="in-backward or after-step.", show_default="in-backward where nothing needs all gradients"),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to time.")] = 8,
    warm_up: Annotated[int, typer.Option(help="Warm-up steps before them.")] = 3,
    plan: Annotated[Path | None, typer.Option(help="A plan file to use unchanged.")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda, cpu, or sim:<catalog name, .yaml file or size>.", show_default="the GPU if there is one"
        ),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(help="Also run the usual loop: plain, checkpointed, or both with a comma.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write all results to this file.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write what each lane did in three steps to this file, for Perfetto.")
    ] = None,
    save_plan: Annotated[Path | None, typer.Option(help="Write the plan to this file, for --plan.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report page of plan and run to this file.")] = None,
) -> None:
    names = [require_one_of(SHAPES, name, "--model") for name in _split(model)]
    kinds = [require_one_of(_BASELINES, name, "--compare") for name in _split(compare)]
    how = update_mode(update) if update is not None else None
    given = [
        option
        for option, value in (("--plan", plan), ("--save-plan", save_plan), ("--trace", trace), ("--html", html))
        if value is not None
    ]
    if len(names) > 1 and given:
        raise ConfigError(f"{given[0]} is for one model, and --model names {len(names)}. Name one model.")
    for option, path in (("--json", json), ("--save-plan", save_plan), ("--trace", trace), ("--html", html)):
        require_file(option, path)
    if len(names) > 1:
        asked = {
            "--gpu-memory": gpu_memory,
            "--host-memory": host_memory,
            "--micro-batch": micro_batch,
            "--seq": seq,
            "--images": images,
            "--image-size": image_size,
            "--accumulate": accumulate,
            "--clip": clip,
            "--osft": osft,
            "--update": update,
            "--steps": steps,
            "--warm-up": warm_up,
            "--device": device,
            "--compare": compare,
        }
        _bench_each(
            names, [word for option, value in asked.items() if value is not None for word in (option, str(value))], json
        )
        return

    # Imports take seconds: wrong options were reported before them.
    from benchmarks.bench_text import show
    from benchmarks.measure import compare as run_baselines
    from benchmarks.measure import complete, run_bench
    from outsize import __version__
    from outsize.base.records import dumps
    from outsize.cli.bench import SIMULATED
    from outsize.run.quiet import quiet

    quiet()
    request = complete(
        model=names[0] if names else None,
        device=device,
        micro_batch=micro_batch,
        seq=seq,
        steps=steps,
        warm_up=warm_up,
        accumulate=accumulate,
        update=how,
        clip=clip,
        gpu_memory=gpu_memory,
        host_memory=host_memory,
        plan=plan,
        images=images,
        image_size=image_size,
        osft=osft,
    )
    if request.device.startswith("sim"):
        print(SIMULATED)
    command = shlex.join(["benchmarks.bench", *sys.argv[1:]])
    result = run_bench(
        request,
        say=lambda text: print(f"{text}\n", flush=True),
        trace=trace,
        page=html,
        save_plan=save_plan,
        command=command,
        version=__version__,
    )
    if json is not None:
        json.write_text(dumps(result) + "\n")  # before baselines run: they may take long
    if kinds:
        result = run_baselines(result, kinds)
        if json is not None:
            json.write_text(dumps(result) + "\n")
    print(show(result), flush=True)
    for path in filter(None, (json, save_plan, trace, html)):
        print(f"written   {path}")
    if not (result.losses_finite and result.within_budget):
        raise typer.Exit(1)


bench.__doc__ = _DOC


def _split(names: str | None) -> list[str]:
    return [name.strip() for name in (names or "").split(",") if name.strip()]


def _bench_each(names: list[str], asked: list[str], json: Path | None) -> None:
    """A process for each: host memory is counted by process, at its highest."""
    from benchmarks.bench_record import Result
    from benchmarks.bench_text import show_all
    from outsize.base.records import dumps, loads

    results, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            out = Path(folder) / f"{name}.json"
            print(f"{name}\n", flush=True)
            code = subprocess.run(
                [sys.executable, "-m", "benchmarks.bench", "--model", name, *asked, "--json", str(out)]
            ).returncode
            if code:
                failed.append(name)
            if out.exists():
                results.append(loads(Result, out.read_text(), where=str(out)))
            print(flush=True)
    if results:
        print(show_all(results))
    if json is not None:
        json.write_text(dumps(tuple(results)) + "\n")
        print(f"written   {json}")
    if failed:
        print(f"failed    {', '.join(failed)}")
        raise typer.Exit(1)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command()(bench)

if __name__ == "__main__":
    try:
        app()
    except OutsizeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
