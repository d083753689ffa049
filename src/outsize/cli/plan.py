"""`outsize plan`: will it fit, and how fast would it be? For machines one has or only thinks of buying."""

from pathlib import Path
from typing import Annotated

import typer

from outsize.base.errors import ConfigError, PlanInfeasible, tell

_EXAMPLES = """Will it fit, and how fast would it be? Needs a model's config alone: no weights, no GPU.

[bold]Examples[/bold]

outsize plan ~/models/llama-8b --hardware rtx4090 --sequence-len 4096

outsize plan meta-llama/Llama-3.1-8B --gpu-memory 16GiB --host-memory 64GiB

outsize plan ~/models/llama-8b --hardware rtx3090,rtx4090,h100     [dim]one line for each[/dim]

outsize plan ~/models/llama-8b --accumulate 8 --save plan.json     [dim]for outsize.prepare(..., plan="plan.json")[/dim]
"""


def plan(
    model: Annotated[str, typer.Argument(help="A folder with a config.json, that file, or a hub id.", metavar="PATH")],
    hardware: Annotated[str, typer.Option(help="A machine of the catalog, or several with commas between; or a size such as 64MiB.")] = "rtx4090",
    sequence_len: Annotated[int, typer.Option(help="Tokens of a row.")] = 2048,
    micro_batch_size: Annotated[int, typer.Option(help="Rows of a batch.")] = 1,
    gpu_memory: Annotated[str | None, typer.Option(help="Most GPU memory to use, such as 24GiB, CUDA context included.", show_default="the machine's")] = None,
    host_memory: Annotated[str | None, typer.Option(help="Most host memory to use.", show_default="the machine's, less a tenth")] = None,
    accumulate: Annotated[int, typer.Option(help="Backward passes per optimizer step.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16 or float32.")] = "bfloat16",
    save: Annotated[Path | None, typer.Option(help="Write the plan to this file.")] = None,
) -> None:
    names = [name.strip() for name in hardware.split(",") if name.strip()]
    if not names or (save is not None and len(names) > 1):
        found = f"--hardware names {len(names)} machines"
        raise ConfigError(tell("one machine for a plan that is saved, and one or more to compare", found, "Name one of them with --hardware"))
    if save is not None and not save.absolute().parent.is_dir():
        raise ConfigError(tell("--save names a file in a folder that exists", f"{save.parent} does not", "Make it first"))

    # Importing takes seconds; what can be refused without it was refused above.
    from outsize.plan.check import save as save_plan
    from outsize.train.forecast import Forecast
    from outsize.train.forecast import plan as forecast

    def plan_for(name: str) -> Forecast:
        return forecast(
            model, sequence_len=sequence_len, micro_batch_size=micro_batch_size, hardware=name, gpu_memory=gpu_memory, host_memory=host_memory,
            accumulate=accumulate, dtype=dtype,
        )  # fmt: skip

    if len(names) == 1:
        made = plan_for(names[0])
        print(made)
        if save is not None:
            save_plan(made.plan, save)
            print(f"\nsaved to {save}")
        return
    num_fit = 0
    for name in names:
        try:
            print(plan_for(name).summary())
            num_fit += 1
        except PlanInfeasible as no:
            print(f"{name}: does not fit. {no}")
    if not num_fit:
        raise typer.Exit(2)


plan.__doc__ = _EXAMPLES
