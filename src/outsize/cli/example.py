"""`outsize example`: a tiny model and data to try outsize with."""

from pathlib import Path
from typing import Annotated

import typer


def example(
    folder: Annotated[Path, typer.Argument(help="Where to write model/ and data.jsonl.", metavar="FOLDER")] = Path(),
) -> None:
    """Write a tiny chat model with random weights, and 24 conversations to train it on. Nothing is downloaded."""
    from outsize.run.example import write_example

    write_example(folder)
    print(f"saved {folder / 'model'} (a tiny model) and {folder / 'data.jsonl'} (24 conversations)")
