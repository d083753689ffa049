"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from outsize.base.errors import ConfigError
from outsize.run.shapes import require_one_of

ConfigPath = Annotated[str, typer.Argument(help="A folder with a config.json, that file, or a hub id.", metavar="PATH")]
Hardware = Annotated[
    str, typer.Option(help="A machine of the catalog, a machine's YAML file, or a size such as 64MiB.")
]
# The names of the YAML file, and shorter ones.
SEQUENCE_LEN, MICRO_BATCH = ("--sequence-len", "--seq"), ("--micro-batch-size", "--micro-batch")
SequenceLen = Annotated[int, typer.Option(*SEQUENCE_LEN, help="Tokens of a row.")]
MicroBatch = Annotated[
    int | None, typer.Option(*MICRO_BATCH, help="Rows of a batch.", show_default="1; with --batch-size, the fastest")
]
BatchSize = Annotated[
    int | None,
    typer.Option(help="Rows of an optimizer step: micro-batches and accumulation follow from it.", show_default=False),
]
GpuMemory = Annotated[
    str | None,
    typer.Option(help="Most GPU memory to use, such as 24GiB, CUDA context included.", show_default="the machine's"),
]
HostMemory = Annotated[
    str | None, typer.Option(help="Most host memory to use.", show_default="the machine's, less a tenth")
]
Accumulate = Annotated[
    int | None,
    typer.Option(help="Backward passes per optimizer step.", show_default="1, or what --batch-size makes of it"),
]
Dtype = Annotated[str, typer.Option(help="Of the weights: bfloat16 or float32.")]
NumImages = Annotated[
    int | None, typer.Option("--images", help="Images in a row; only for vision models.", show_default="1 for those")
]
ImageSize = Annotated[int, typer.Option(help="Pixels of an image's side.")]
Update = Annotated[str, typer.Option(help="after-step (needed for clipping), or in-backward: faster, and less memory.")]


def require_file(option: str, path: Path | None) -> None:
    """Fail before the work if its result could not be written."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        found = f"{path} is a folder" if path.is_dir() else f"the folder {path.parent} does not exist"
        raise ConfigError(f"{option}: {found}. Name a file in an existing folder.")


def update_mode(update: str) -> Literal["after_step", "in_backward"]:
    modes: dict[str, Literal["after_step", "in_backward"]] = {"after-step": "after_step", "in-backward": "in_backward"}
    return modes[require_one_of(modes, update, "--update")]
