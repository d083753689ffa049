"""How the training data of a run wrote prompts: stored with its checkpoints and its result, for `outsize chat`."""

import json
from collections.abc import Sequence
from pathlib import Path

from outsize.base.errors import BadFile
from outsize.data.formats import INSTRUCTION, UNKNOWN_PROMPT

PROMPT_FILE = "prompt_format.json"
_SHOWN_CHARS = 60
_RAW = "`outsize chat --raw` takes prompts as they are in the data."


def write_prompts(folder: Path, prompts: Sequence[str | None]) -> None:
    """`prompts`: the different `Format.prompt` of the datasets. No file: the chat template."""
    if not any(prompt is not None for prompt in prompts):
        (folder / PROMPT_FILE).unlink(missing_ok=True)  # of an earlier run
        return
    (folder / PROMPT_FILE).write_text(json.dumps({"prompts": prompts}, indent=1))


def read_prompts(folder: Path) -> list[str | None]:
    """Empty if the folder has no such file."""
    path = folder / PROMPT_FILE
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_text())["prompts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadFile(f"{path}: cannot be read ({error}). Remove it to use the chat template.") from None


def prompt_format(prompts: Sequence[str | None]) -> tuple[str | None, str]:
    """The format to chat with (None: the chat template), and a note for the user."""
    first = next(iter(prompts), None) or None
    if UNKNOWN_PROMPT in prompts:
        return first, f"The prompt format of the training data is not known; the answers may be meaningless. {_RAW}"
    if first is None and len(prompts) < 2:
        return None, ""
    words = {None: "the chat template", INSTRUCTION: "the text as it is, without the chat template"}
    text = first or ""
    shown = words.get(first) or repr(text if len(text) <= _SHOWN_CHARS else f"…{text[-_SHOWN_CHARS:]}")
    note = f"Each prompt stands alone, in the format of the training data: {shown}."
    if len(prompts) > 1:
        note = f"The training data have {len(prompts)} prompt formats; prompts use the first: {shown}."
    return first, note if list(prompts) == [INSTRUCTION] else f"{note} {_RAW}"
