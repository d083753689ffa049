"""The `outsize` command: gathers the commands, one file each, and shows our errors as the sentences they are, without a
traceback.

Importing this loads neither torch nor transformers, so `outsize --help` answers at once.
"""

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from outsize import __version__
from outsize.base.errors import OutsizeError
from outsize.cli.bench import bench
from outsize.cli.doctor import doctor
from outsize.cli.explain import explain
from outsize.cli.export import export
from outsize.cli.plan import plan
from outsize.cli.probe import probe
from outsize.cli.train import train


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OutsizeError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
)
app.command()(train)
app.command()(plan)
app.command()(explain)
app.command()(export)
app.command()(bench)
app.command()(probe)
app.command()(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"outsize {__version__}")
        raise typer.Exit


@app.callback(help="Trains Hugging Face models that are too large for the GPU at hand, to the same bits.")
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """Warnings go to stderr by themselves: a handler for all of Python would say those of libraries that have one
    twice.
    """


if __name__ == "__main__":
    app()
