"""Reads preference pairs as TRL's DPOTrainer takes them."""

from typing import Any

from outsize.base.errors import DataError
from outsize.config.run import DatasetConfig
from outsize.data.chat import message_of
from outsize.data.files import Record, json_type
from outsize.data.sources import read

_COLUMNS = ("prompt", "chosen", "rejected")


def preference_rows(source: DatasetConfig) -> list[dict[str, Any]]:
    """Rows with `chosen`, `rejected` and perhaps `prompt`, all of them texts or all of them messages.

    Without a prompt, TRL takes what both answers begin with.
    """
    return [_row(record, source) for record in read(source)]


def _row(record: Record, source: DatasetConfig) -> dict[str, Any]:
    names = [name for name in _COLUMNS if name != "prompt" or record.fields.get("prompt") is not None]
    row = {name: _part(record, name, source) for name in names}
    answers = [row["chosen"], row["rejected"]]
    if isinstance(answers[0], str) != isinstance(answers[1], str):
        raise DataError(
            f"{record.place}: one of chosen and rejected is text, the other one messages. Correct or remove the record."
        )
    prompt = row.get("prompt")
    if isinstance(prompt, str) and not isinstance(answers[0], str):
        asked = [{"role": "user", "content": prompt}]
        if all(answer[:1] == asked for answer in answers):
            del row["prompt"]  # UltraFeedback: each answer is a whole conversation
        else:
            row["prompt"] = asked
    elif prompt is not None and isinstance(prompt, str) != isinstance(answers[0], str):
        raise DataError(f"{record.place}: the prompt has messages, the answers are text. Correct or remove the record.")
    return row


def _part(record: Record, name: str, source: DatasetConfig) -> Any:
    value = record.get(name, key="path")
    if isinstance(value, str):
        return value
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{record.place}: {name!r} is {json_type(value)}, not text or messages. Correct or remove the record."
        )
    return [
        message_of(given, source, f"message {n} of {name!r} of {record.place}") for n, given in enumerate(messages, 1)
    ]
