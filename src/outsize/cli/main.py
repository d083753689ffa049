"""The `outsize` command. Prints our errors without a traceback.

Imports neither torch nor transformers, so that `outsize --help` is fast.
"""

import sys
from logging import ERROR, getLogger
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from outsize import __version__
from outsize.base.errors import OutsizeError
from outsize.cli.bench import bench
from outsize.cli.chat import chat
from outsize.cli.doctor import doctor
from outsize.cli.example import example
from outsize.cli.export import export
from outsize.cli.imports import import_problem
from outsize.cli.plan import plan
from outsize.cli.probe import probe
from outsize.cli.prune import prune
from outsize.cli.train import train


class _Commands(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        # When transformers or PEFT imports bitsandbytes, it advises about kernels that training does not use.
        getLogger("bitsandbytes").setLevel(ERROR)
        try:
            return super().invoke(ctx)
        except OutsizeError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(2) from None
        except (ImportError, RuntimeError) as error:
            if not (problem := import_problem(error)):
                raise
            print(problem, file=sys.stderr)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
)
app.command()(train)
app.command()(prune)
app.command()(plan)
app.command()(chat)
app.command()(export)
app.command()(bench)
app.command()(probe)
app.command()(doctor)
app.command()(example)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"outsize {__version__}")
        raise typer.Exit


@app.callback(help="Trains Hugging Face models that are larger than the GPU, with the same bits as plain PyTorch.")
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """No logging handler: warnings go to stderr anyway, and those of libraries with a handler would appear twice."""


if __name__ == "__main__":
    app()
