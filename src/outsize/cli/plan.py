"""`outsize plan`: plans a model's config, or a run file, for any machine, without weights or a GPU."""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outsize.base.errors import ConfigError, OutsizeError, PlanInfeasible
from outsize.base.units import show_bytes, show_enough, show_seconds
from outsize.cli.legend import LEGEND
from outsize.cli.options import MICRO_BATCH, SEQUENCE_LEN, require_file, update_mode
from outsize.hardware.catalog import DEFAULT_HARDWARE, is_size, lookup
from outsize.hub import require_model_path
from outsize.run.shapes import require_one_of
from outsize.schedule.render import busiest_lane

if TYPE_CHECKING:
    from outsize.forecast.forecast import Forecast, ForecastRequest

DEFAULT_FREE_SHARE = 0.25
"""Of the directions, that OSFT trains."""
DEFAULT_LORA_R = 16
RUN_FILES = (".yaml", ".yml")
OBJECTS_PER_COLLECTION = 100_000
"""Python's default, 700, makes the command a tenth slower: it imports and traces for seconds."""

_DOC = """Will it fit, and how fast would it be? Needs only a model's config: no weights, no GPU.

[bold]Examples[/bold]

outsize plan ~/models/llama-8b --hardware rtx4090 --sequence-len 4096

outsize plan meta-llama/Llama-3.1-8B --gpu-memory 16GiB --host-memory 64GiB

outsize plan ~/models/llama-8b --hardware rtx3090,rtx4090,h100     [dim]side by side[/dim]

outsize plan ~/models/llama-8b --adapter lora --lora-r 16

outsize plan ~/models/llama-70b --adapter lora --load-in-4bit     [dim]QLoRA[/dim]

outsize plan ~/models/llama-8b --adapter osft --osft-unfreeze-rank-ratio 0.25

outsize plan run.yaml     [dim]the run of this file: model, adapter, data, batch, budgets[/dim]

outsize plan ~/models/llama-8b --why     [dim]common recipes, and the gain from a better machine[/dim]

outsize plan ~/models/llama-8b --html report.html     [dim]memory and lanes over one step, as a page[/dim]

outsize plan ~/models/llama-8b --accumulate 8 --save plan.json     [dim]for outsize.prepare(plan="plan.json")[/dim]
"""


@contextmanager
def _collecting_rarely() -> Iterator[None]:
    was = gc.get_threshold()
    gc.set_threshold(OBJECTS_PER_COLLECTION, *was[1:])
    try:
        yield
    finally:
        gc.set_threshold(*was)
        atexit.register(gc.freeze)  # else Python collects all of it at exit, which takes most of a second


def _show_legend(wanted: bool) -> None:
    if wanted:
        print(LEGEND)
        raise typer.Exit


@_collecting_rarely()
def plan(
    model: Annotated[
        str,
        typer.Argument(help="A folder with a config.json, that file, a hub id, or a run's YAML file.", metavar="PATH"),
    ],
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Machines of the catalog, separated by commas; a machine's YAML file; or a size, for an invented "
            "machine with this much GPU memory.",
            show_default="rtx4090; with a run file, this machine's GPU",
        ),
    ] = None,
    sequence_len: Annotated[
        int | None, typer.Option(*SEQUENCE_LEN, help="Tokens of a row.", show_default="2048")
    ] = None,
    micro_batch_size: Annotated[
        int | None,
        typer.Option(*MICRO_BATCH, help="Rows of a batch.", show_default="1; with --batch-size, the fastest"),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows of an optimizer step. The micro-batch follows from it.", show_default=False)
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="Maximum GPU memory, CUDA context included: 24GiB.", show_default="the machine's")
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory that the plan may use, also more than the catalog's machine has.",
            show_default="the machine's, less a tenth",
        ),
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(help="Backward passes per optimizer step.", show_default="1, or what --batch-size leaves"),
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="lora or osft.", show_default="all weights are trained")] = None,
    lora_r: Annotated[int | None, typer.Option(help="Rank of the adapter.", show_default="16")] = None,
    lora_target_modules: Annotated[
        str | None, typer.Option(help="Modules with an adapter, separated by commas.", show_default="all linear layers")
    ] = None,
    load_in_4bit: Annotated[
        bool, typer.Option("--load-in-4bit", help="Quantize the base below an adapter to 4 bits (NF4, double).")
    ] = False,
    load_in_8bit: Annotated[
        bool, typer.Option("--load-in-8bit", help="Quantize the base below an adapter to 8 bits.")
    ] = False,
    osft_unfreeze_rank_ratio: Annotated[
        float | None, typer.Option(help="Share of the directions that OSFT trains.", show_default="0.25")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights: bfloat16 or float32.", show_default="bfloat16")
    ] = None,
    update: Annotated[
        str | None,
        typer.Option(
            help="after-step (needed for clipping), or in-backward: faster, and less memory.", show_default="after-step"
        ),
    ] = None,
    images: Annotated[
        int | None, typer.Option(help="Images per row, for vision models.", show_default="1 for those")
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels of an image's side.", show_default="1024")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run file.")
    ] = None,
    why: Annotated[
        bool, typer.Option("--why", help="Compare common recipes, and show the gain from a better machine.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report page to this file.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write what each lane does in one step to this file, for Perfetto.")
    ] = None,
    legend: Annotated[
        bool,
        typer.Option("--legend", callback=_show_legend, is_eager=True, help="Explain the lines of a plan, and exit."),
    ] = False,
) -> None:
    names = None if hardware is None else [name.strip() for name in hardware.split(",") if name.strip()]
    written = {option: path for option, path in (("--save", save), ("--html", html), ("--trace", trace)) if path}
    if names == [] or (names and (written or why) and len(names) > 1):
        options = ", ".join([*written, *(["--why"] if why else [])])
        needs_one = f", but {options} is for one plan" if names else ""
        raise ConfigError(f"--hardware names {len(names)} machines{needs_one}. Name one.")
    for option, path in written.items():
        require_file(option, path)
    for name in names or []:
        lookup(name)  # check all names before the first plan
        if is_size(name):
            print(
                f"note: {name} is an invented machine, whose rates are of no real GPU. For a real one, name it and add "
                f"--gpu-memory {name} for this budget.",
                file=sys.stderr,
            )
    require_one_of(("lora", "osft"), adapter or "lora", "--adapter")
    if adapter != "lora" and (lora_r or lora_target_modules):
        raise ConfigError("--lora-r and --lora-target-modules have no effect without --adapter lora. Add it.")
    is_quantized = load_in_4bit or load_in_8bit
    if is_quantized and adapter != "lora" and Path(model).suffix not in RUN_FILES:
        raise ConfigError(
            "--load-in-4bit and --load-in-8bit: only LoRA is trained over quantized weights. Add --adapter lora."
        )
    if adapter != "osft" and osft_unfreeze_rank_ratio is not None:
        raise ConfigError("--osft-unfreeze-rank-ratio has no effect without --adapter osft. Add it.")
    # What a run file says itself, by option.
    settings = {
        "--sequence-len": sequence_len,
        "--micro-batch-size": micro_batch_size,
        "--batch-size": batch_size,
        "--accumulate": accumulate,
        "--adapter": adapter,
        "--load-in-4bit": load_in_4bit or None,
        "--load-in-8bit": load_in_8bit or None,
        "--dtype": dtype,
        "--update": update,
        "--images": images,
        "--image-size": image_size,
    }
    say_planning = partial(print, "Measuring the model and planning …", file=sys.stderr, flush=True)
    notes: list[str] = []
    filled = 1.0
    memory = _given(gpu_memory=gpu_memory, host_memory=host_memory)
    is_run_file = Path(model).suffix in RUN_FILES
    if is_run_file:
        if beside := [option for option, value in settings.items() if value is not None]:
            raise ConfigError(f"{', '.join(beside)}: {model} is a run file, which says it. Use --set key=value.")
        from outsize.config.read import read_config

        config = read_config(model, overrides or ())
        require_model_path(config.base_model)
        say_planning()

        # Imports take seconds: a wrong file was reported before them.
        from outsize.run.plan import plan_request
        from outsize.run.quiet import quiet

        quiet()
        found = plan_request(config, names[0] if names else None)
        model, notes, filled = config.base_model, [*config.notes, *found.notes], found.filled
        first = replace(found.request, **memory)
    else:
        if overrides:
            raise ConfigError(f"--set: {model} is no run file. Use the options; outsize plan --help lists them.")
        mode = update_mode(update or "after-step")
        require_model_path(model)
        say_planning()
        from outsize.forecast.forecast import ForecastRequest
        from outsize.optim.names import default_spec

        first = ForecastRequest(
            hardware=names[0] if names else DEFAULT_HARDWARE,
            optimizer=default_spec(update=mode),
            micro_batch_size=micro_batch_size,
            batch_size=batch_size,
            accumulate=accumulate,
            images=images,
            **_given(sequence_len=sequence_len, dtype=dtype, image_size=image_size),
            **memory,
        )
        if adapter == "osft":
            from outsize.methods.osft.method import OSFT

            ratio = DEFAULT_FREE_SHARE if osft_unfreeze_rank_ratio is None else osft_unfreeze_rank_ratio
            first = replace(first, method=OSFT(unfreeze_rank_ratio=ratio))
        if adapter == "lora":
            from outsize.model.adapter import lora
            from outsize.quant.settings import Quantization

            targets = lora_target_modules.replace(" ", "").split(",") if lora_target_modules else "all-linear"
            base = Quantization(load_in_4bit=load_in_4bit, load_in_8bit=load_in_8bit) if is_quantized else None
            first = replace(first, adapter=lora(r=lora_r or DEFAULT_LORA_R, target_modules=targets), quantization=base)
    for note in notes:
        print(f"note: {note}")
    if names and len(names) > 1:
        _compare(model, first, names)
        return
    made = forecast_or_adapter(model, first)
    if names is None and not is_run_file:
        print(f"note: planned for {DEFAULT_HARDWARE}; --hardware names another machine")
    print(made)
    print("`outsize plan --legend` explains these lines.\n")
    print(made.machine_text())
    if why:
        from outsize.cli.advice import saved_by_4bit

        print(f"\n{made.explain()}")
        if line := saved_by_4bit(model, first, made):
            print(line)
    else:
        from outsize.cli.advice import advice

        print(advice(model, first, made, filled))
    if save is not None:
        from outsize.schedule.check import save as save_plan

        save_plan(made.plan, save)
        print(f"\nsaved to {save}")
    if html is not None:
        made.write_page(html, title=Path(model).name if Path(model).exists() else model)
        print(f"\npage in {html}")
    if trace is not None:
        made.write_trace(trace)
        print(f"\ntrace in {trace}, for ui.perfetto.dev")


plan.__doc__ = _DOC


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def forecast_or_adapter(model: str, request: "ForecastRequest") -> "Forecast":
    """The forecast. If it does not fit, the error says which row length fits, and what LoRA needs."""
    from outsize.forecast.forecast import forecast
    from outsize.forecast.row_lengths import is_long, rows_that_fit

    try:
        return forecast(model, request)
    except PlanInfeasible as no:
        lines = [str(no)]
        if is_long(request):
            lines.append(rows_that_fit(model, request))
        if request.adapter is None:
            lines.append(_with_lora(model, request))
        raise PlanInfeasible(
            "\n".join(line for line in lines if line),
            resource=no.resource,
            allowed_bytes=no.allowed_bytes,
            needed_bytes=no.needed_bytes,
        ) from None


def _with_lora(model: str, request: "ForecastRequest") -> str:
    from outsize.forecast.forecast import forecast
    from outsize.model.adapter import lora

    what = f"LoRA (--adapter lora --lora-r {DEFAULT_LORA_R}, all linear layers)"
    try:
        other = replace(request, adapter=lora(r=DEFAULT_LORA_R), method=None, pins=None, reserved_host_bytes=0)
        found = forecast(model, other)
    except PlanInfeasible as no:
        memory = "GPU" if no.resource == "gpu" else "host"
        return f"{what} does not fit either: it needs {show_enough(no.needed_bytes)} of {memory} memory."
    except OutsizeError as error:
        return f"{what} cannot be planned here: {error}"
    estimate, budget = found.plan.estimate, found.problem.gpu
    gpu = show_bytes(budget.total_for(estimate.gpu_bytes))
    rate = f"{found.tokens_per_second:,.0f} tokens/s"
    return f"It fits with {what}: {gpu} GPU, {show_bytes(estimate.host_bytes)} host, {rate}."


def _compare(model: str, request: "ForecastRequest", names: list[str]) -> None:
    from outsize.forecast.forecast import forecast

    found_for: dict[str, Forecast | PlanInfeasible] = {}
    for name in names:
        try:
            found_for[name] = forecast(model, replace(request, hardware=name))
        except PlanInfeasible as no:
            found_for[name] = no
    print(side_by_side(found_for))
    if all(isinstance(found, PlanInfeasible) for found in found_for.values()):
        raise typer.Exit(2)


def side_by_side(found_for: "dict[str, Forecast | PlanInfeasible]") -> str:
    """One row per machine, the source of its rates, and the missing memory if the model does not fit."""
    rows = [("machine", "tokens/s", "step", "GPU", "host", "bottleneck")]
    notes: list[str] = []
    rates: dict[str, list[str]] = {}
    for name, found in found_for.items():
        if isinstance(found, PlanInfeasible):
            needed, memory = show_enough(found.needed_bytes), "GPU" if found.resource == "gpu" else "host"
            missing = f"needs {needed} of {memory} memory, has {show_bytes(found.allowed_bytes)}"
            rows.append((name, "does not fit", "", "", "", missing))
            notes.append(f"{name}: {found}")
            continue
        rates.setdefault(found.problem.spec.provenance, []).append(name)
        estimate = found.plan.estimate
        sizes = show_bytes(estimate.gpu_bytes), show_bytes(estimate.host_bytes)
        seconds = show_seconds(estimate.step_seconds)
        rows.append((name, f"{found.tokens_per_second:,.0f}", seconds, *sizes, busiest_lane(found.plan)))
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = []
    for row in rows:
        cells = zip(row, widths, "<>>>><", strict=True)
        lines.append("  ".join(f"{cell:{side}{width}}" for cell, width, side in cells).rstrip())
    notes = [*(f"rates of {', '.join(same)}: {provenance}" for provenance, same in rates.items()), *notes]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:], "", *notes])
