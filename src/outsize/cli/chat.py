"""`outsize chat`: a quick look at a trained model."""

import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outsize.base.errors import ConfigError
from outsize.checkpoint.folder import require_exists

if TYPE_CHECKING:
    from outsize.run.chat import Chat

_DOC = """Chat with a trained model: the output_dir of a run, a checkpoint, an exported folder, or an adapter.

Prompts are written as in the training data of the run: with the folder's chat template, or in the format of single
instructions. Without both, the model continues your text. Ctrl-C ends an answer; /new begins
a new conversation; Ctrl-D or /exit ends the chat. Models with images: text only.

[bold]Examples[/bold]

outsize chat out

outsize chat out --prompt "What is a plan?" --temperature 0     [dim]one answer, greedy[/dim]

outsize chat out/checkpoint-500 --gpu-memory 8GiB     [dim]weights that do not fit are streamed[/dim]
"""


def chat(
    folder: Annotated[Path, typer.Argument(help="The folder of a model or an adapter.", metavar="FOLDER")],
    prompt: Annotated[str | None, typer.Option(help="Print one answer and exit.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as given, without a template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of an answer.")] = 512,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0: greedy.", show_default="the folder's generation config")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The adapter's base, if it has moved.", show_default="where the adapter says")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.", show_default="the GPU if there is one")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Such as 8GiB.", show_default="what is free")] = None,
) -> None:
    require_exists(folder)  # imports take seconds

    from outsize.run.chat import Chat, ChatRequest
    from outsize.run.quiet import quiet

    quiet()
    request = ChatRequest(
        folder=folder,
        base=base,
        device=device,
        gpu_memory=gpu_memory,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        system=system,
        raw=raw,
    )
    talk = Chat(request)
    try:
        _say(talk.summary)
        if talk.note:
            _say(talk.note)
        elif not talk.has_template:
            _say(f"{'--raw' if raw else 'No chat template'}: the model continues your text.")
        if prompt is not None:
            _answer(talk, prompt)
        else:
            _converse(talk)
    finally:
        talk.close()


def _converse(talk: "Chat") -> None:
    with suppress(ImportError):
        import readline  # noqa: F401 - input() then edits lines

    if sys.stdin.isatty():
        _say("/new begins a new conversation; /exit or Ctrl-D ends the chat.")
    while (text := _read()) not in (None, "/exit"):
        if text == "/new":
            talk.restart()
        elif text:
            try:
                _answer(talk, text)
            except ConfigError as error:
                _say(str(error))


def _answer(talk: "Chat", text: str) -> None:
    before = signal.signal(signal.SIGINT, lambda *_: talk.stop())
    try:
        talk.answer(text)
    finally:
        signal.signal(signal.SIGINT, before)
    if talk.is_cut:
        _say("(cut at its maximum length)")


def _read() -> str | None:
    """A line of the user. None: the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _say(text: str) -> None:
    """To stderr: stdout has the answers alone."""
    print(text, file=sys.stderr)


chat.__doc__ = _DOC
