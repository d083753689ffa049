"""`outsize export`: a checkpoint as a plain Hugging Face folder."""

from pathlib import Path
from typing import Annotated

import typer

from outsize.checkpoint.folder import require_exists

_DOC = """Write a checkpoint's model (or adapter) as a plain Hugging Face folder, for from_pretrained.

[bold]Examples[/bold]

outsize export out/checkpoint-500 model

outsize export out model --merge     [dim]an adapter, merged into its base[/dim]
"""


def export(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or the output_dir of a run.", metavar="FROM")],
    target: Annotated[Path, typer.Argument(help="The folder to write; empty or not there yet.", metavar="TO")],
    merge: Annotated[bool, typer.Option("--merge", help="Merge an adapter into its base.")] = False,
    dequantize: Annotated[
        bool, typer.Option("--dequantize", help="With --merge: use the rounded weights of its quantized base.")
    ] = False,
    base: Annotated[
        str | None, typer.Option(help="The adapter's base, if it has moved.", show_default="where the adapter says")
    ] = None,
) -> None:
    require_exists(source)  # imports take seconds

    from outsize.run.export import export_folder
    from outsize.run.quiet import quiet

    quiet()
    export_folder(source, target, merge=merge, base=base, dequantized=dequantize)
    is_adapter = (target / "adapter_config.json").exists()
    print(f"saved {target}: {'a PEFT adapter' if is_adapter else 'a plain Hugging Face model'}, for from_pretrained")


export.__doc__ = _DOC
