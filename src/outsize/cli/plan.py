"""`outsize plan`: plans a model's config for any machine, without weights or a GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.errors import ConfigError, PlanInfeasible
from outsize.base.units import show_bytes, show_enough, show_seconds
from outsize.cli.options import MICRO_BATCH, SEQUENCE_LEN, require_file, update_mode
from outsize.hardware.catalog import lookup
from outsize.schedule.render import busiest_lane

if TYPE_CHECKING:
    from outsize.forecast.forecast import Forecast

_DOC = """Will it fit, and how fast would it be? Needs only a model's config: no weights, no GPU.

[bold]Examples[/bold]

outsize plan ~/models/llama-8b --hardware rtx4090 --sequence-len 4096

outsize plan meta-llama/Llama-3.1-8B --gpu-memory 16GiB --host-memory 64GiB

outsize plan ~/models/llama-8b --hardware rtx3090,rtx4090,h100     [dim]side by side[/dim]

outsize plan ~/models/llama-8b --why     [dim]common recipes, and the gain from a better machine[/dim]

outsize plan ~/models/llama-8b --html report.html     [dim]memory and lanes over one step, as a page[/dim]

outsize plan ~/models/llama-8b --accumulate 8 --save plan.json     [dim]for outsize.prepare(plan="plan.json")[/dim]
"""


def plan(
    model: Annotated[str, typer.Argument(help="A folder with a config.json, that file, or a hub id.", metavar="PATH")],
    hardware: Annotated[
        str, typer.Option(help="Machines of the catalog, separated by commas; a machine's YAML file; or a size.")
    ] = "rtx4090",
    sequence_len: Annotated[int, typer.Option(*SEQUENCE_LEN, help="Tokens of a row.")] = 2048,
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
        str | None, typer.Option(help="Maximum host memory.", show_default="the machine's, less a tenth")
    ] = None,
    accumulate: Annotated[
        int | None,
        typer.Option(help="Backward passes per optimizer step.", show_default="1, or what --batch-size leaves"),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16 or float32.")] = "bfloat16",
    update: Annotated[
        str, typer.Option(help="after-step (needed for clipping), or in-backward: faster, and less memory.")
    ] = "after-step",
    images: Annotated[
        int | None, typer.Option(help="Images per row, for vision models.", show_default="1 for those")
    ] = None,
    image_size: Annotated[int, typer.Option(help="Pixels of an image's side.")] = 1024,
    why: Annotated[
        bool, typer.Option("--why", help="Compare common recipes, and show the gain from a better machine.")
    ] = False,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report page to this file.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write what each lane does in one step to this file, for Perfetto.")
    ] = None,
) -> None:
    names = [name.strip() for name in hardware.split(",") if name.strip()]
    written = {option: path for option, path in (("--save", save), ("--html", html), ("--trace", trace)) if path}
    if not names or ((written or why) and len(names) > 1):
        options = ", ".join([*written, *(["--why"] if why else [])])
        needs_one = f", but {options} is for one plan" if names else ""
        raise ConfigError(f"--hardware names {len(names)} machines{needs_one}. Name one.")
    for option, path in written.items():
        require_file(option, path)
    for name in names:
        lookup(name)  # check all names before the first plan
    mode = update_mode(update)

    def forecast_for(name: str) -> "Forecast":
        from outsize.forecast.forecast import ForecastRequest, forecast
        from outsize.optim.names import default_spec

        request = ForecastRequest(
            hardware=name,
            optimizer=default_spec(update=mode),
            sequence_len=sequence_len,
            micro_batch_size=micro_batch_size,
            batch_size=batch_size,
            gpu_memory=gpu_memory,
            host_memory=host_memory,
            accumulate=accumulate,
            dtype=dtype,
            images=images,
            image_size=image_size,
        )
        return forecast(model, request)

    if len(names) == 1:
        made = forecast_for(names[0])
        print(made)
        print(f"\n{made.explain()}" if why else made.what_if())
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
        return
    found_for: dict[str, Forecast | PlanInfeasible] = {}
    for name in names:
        try:
            found_for[name] = forecast_for(name)
        except PlanInfeasible as no:
            found_for[name] = no
    print(side_by_side(found_for))
    if all(isinstance(found, PlanInfeasible) for found in found_for.values()):
        raise typer.Exit(2)


plan.__doc__ = _DOC


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
