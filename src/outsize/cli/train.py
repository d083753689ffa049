"""`outsize train`: a run from a YAML file."""

from pathlib import Path
from typing import Annotated

import typer

_DOC = """Run the training that a YAML file describes: plan, train, save, export.

The plan is shown first. Ctrl-C saves and stops; a second one exits at once.

[bold]Examples[/bold]

outsize train run.yaml

outsize train run.yaml --set learning_rate=1e-5 --set gpu_memory=16GiB

outsize train run.yaml --dry-run     [dim]plan and stop[/dim]

outsize train run.yaml --resume     [dim]resume from the newest complete checkpoint[/dim]

outsize train run.yaml --resume --set learning_rate=1e-5     [dim]change it from there on[/dim]
"""


def train(
    config: Annotated[Path, typer.Argument(help="What to do; docs/config.md lists the keys.", metavar="RUN.YAML")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; may be given several times.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and stop.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest complete checkpoint in output_dir.")
    ] = False,
) -> None:
    from outsize.config.read import read_config
    from outsize.run.paths import require_paths

    requested = [
        *(overrides or ()),
        *(["resume_from_checkpoint=true", "auto_resume_from_checkpoints=false"] if resume else ()),
    ]
    run = read_config(config, requested)
    require_paths(run)

    print("Reading the data, measuring the model and planning …", flush=True)
    # Imports take seconds: a wrong config or path was reported before them.
    from rich.console import Console

    from outsize.run.quiet import quiet
    from outsize.run.train import preview_run, train_run

    quiet()

    console = Console(width=None if Console().is_terminal else 120)
    if dry_run:
        preview_run(run, console)
        return
    outcome = train_run(run, console)
    if outcome.result is None:
        raise typer.Exit(130)


train.__doc__ = _DOC
