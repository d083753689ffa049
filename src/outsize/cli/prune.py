"""`outsize prune`: pruned variants of every layer of a model, each trained on its own, and models made of them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

_DOC = """Prune the layers of a model in several ways and train each variant to do what the layer did.

Layers are trained one after another, so one layer fits where the model does not. The result is a library of variants
in output_dir. Ctrl-C saves and stops; the same command continues, with more tokens or further variants if the file
names them.

[bold]Examples[/bold]

outsize prune run.yaml

outsize prune run.yaml --dry-run     [dim]memory, disk and hours; then stop[/dim]

outsize prune run.yaml --set prune.tokens=100M     [dim]train unfinished layers longer[/dim]

outsize prune run.yaml --only choose --set prune.target.params=0.7     [dim]another model from the same library[/dim]

outsize prune --show out     [dim]library, scores and models[/dim]
"""


def prune(
    config: Annotated[
        Path | None, typer.Argument(help="What to do; docs/prune.md lists the keys.", metavar="RUN.YAML")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key; may be given several times.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan and stop.")] = False,
    only: Annotated[
        Literal["choose"] | None, typer.Option("--only", help="Make models from the library as it is; train nothing.")
    ] = None,
    show: Annotated[
        Path | None, typer.Option("--show", metavar="FOLDER", help="Print library, scores and models, and stop.")
    ] = None,
) -> None:
    if show is not None:
        from rich.console import Console

        from outsize.run.prune_show import show_folder

        show_folder(show, Console(width=None if Console().is_terminal else 140))
        return
    if config is None:
        raise typer.BadParameter("name a run file, or --show with a folder", param_hint="RUN.YAML")
    from outsize.config.read import read_config
    from outsize.run.paths import require_paths

    run = read_config(config, overrides or ())
    require_paths(run)

    print("Reading the data, measuring a layer and planning …", flush=True)
    # Imports take seconds: a wrong config or path was reported before them.
    from rich.console import Console

    from outsize.run.prune import choose_run, prune_run
    from outsize.run.prune_sweep import sweep_run
    from outsize.run.quiet import quiet

    quiet()

    console = Console(width=None if Console().is_terminal else 120)
    if run.prune is not None and run.prune.sweep:
        failed = sweep_run(config, overrides or (), console, dry_run=dry_run)
        raise typer.Exit(1 if failed else 0)
    if only is not None:
        choose_run(run, console)
        return
    outcome = prune_run(run, console, dry_run=dry_run)
    if not outcome.is_finished and not dry_run:
        raise typer.Exit(130)


prune.__doc__ = _DOC
