"""`outsize plan`: plans a model's config for any machine, without weights or a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.errors import ConfigError, PlanInfeasible
from outsize.base.units import show_bytes, show_enough, show_seconds
from outsize.cli.options import ConfigPath, planning, require_file
from outsize.hardware.catalog import lookup
from outsize.schedule.render import busiest_lane

if TYPE_CHECKING:
    from outsize.forecast.forecast import Forecast


@planning
def plan(
    model: ConfigPath,
    forecast: "Callable[[str], Forecast]",
    hardware: Annotated[
        str,
        typer.Option(
            help="A machine of the catalog, or several with commas between; a machine's YAML file; or a size."
        ),
    ] = "rtx4090",
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page to this file: memory and lanes over one step, what every block does."),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write what each lane would do in one step to this file, for Perfetto.")
    ] = None,
) -> None:
    """Will it fit, and how fast would it be? Needs a model's config alone: no weights, no GPU.

    [bold]Examples[/bold]

    outsize plan ~/models/llama-8b --hardware rtx4090 --sequence-len 4096

    outsize plan meta-llama/Llama-3.1-8B --gpu-memory 16GiB --host-memory 64GiB

    outsize plan ~/models/llama-8b --hardware rtx3090,rtx4090,h100     [dim]side by side[/dim]

    outsize plan ~/models/llama-8b --html report.html     [dim]memory and lanes over one step, to look at[/dim]

    outsize plan ~/models/llama-8b --accumulate 8 --save plan.json     [dim]for outsize.prepare(plan="plan.json")[/dim]
    """
    names = [name.strip() for name in hardware.split(",") if name.strip()]
    written = {
        option: path for option, path in (("--save", save), ("--html", html), ("--trace", trace)) if path is not None
    }
    if not names or (written and len(names) > 1):
        files = f", but {', '.join(written)} is for one plan" if names else ""
        raise ConfigError(f"--hardware names {len(names)} machines{files}. Name one.")
    for option, path in written.items():
        require_file(option, path)
    for name in names:
        lookup(name)  # check all names before the first plan

    if len(names) == 1:
        made = forecast(names[0])
        print(made)
        print(made.what_if())
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
            found_for[name] = forecast(name)
        except PlanInfeasible as no:
            found_for[name] = no
    print(side_by_side(found_for))
    if all(isinstance(found, PlanInfeasible) for found in found_for.values()):
        raise typer.Exit(2)


def side_by_side(found_for: "dict[str, Forecast | PlanInfeasible]") -> str:
    """One row per machine, the source of its rates, and what is missing where the model does not fit."""
    rows = [("machine", "tokens/s", "step", "GPU", "host", "bottleneck")]
    notes: list[str] = []
    rates: dict[str, list[str]] = {}
    for name, found in found_for.items():
        if isinstance(found, PlanInfeasible):
            missing = (
                f"{show_enough(found.needed_bytes)} of {'GPU' if found.resource == 'gpu' else 'host'} memory needed"
            )
            rows.append((name, "does not fit", "", "", "", f"{missing}, {show_bytes(found.allowed_bytes)} there"))
            notes.append(f"{name}: {found}")
            continue
        rates.setdefault(found.problem.spec.provenance, []).append(name)
        estimate = found.plan.estimate
        rows.append(
            (
                name,
                f"{found.tokens_per_second:,.0f}",
                show_seconds(estimate.step_seconds),
                show_bytes(estimate.gpu_bytes),
                show_bytes(estimate.host_bytes),
                busiest_lane(found.plan),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    lines = [
        "  ".join(
            cell.ljust(w) if i in (0, 5) else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    notes = [*(f"rates of {', '.join(same)}: {provenance}" for provenance, same in rates.items()), *notes]
    return "\n".join([lines[0], "─" * max(map(len, lines)), *lines[1:], "", *notes])
