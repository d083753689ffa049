"""The formats of datasets: which columns each needs, and how its rows become documents.

To add one, add an entry to `FORMATS` and its name to `DatasetType` in config/types.py.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from outsize.base.errors import DataError
from outsize.config.run import DatasetConfig
from outsize.data.chat import Chats, field_of
from outsize.data.files import Record, json_type
from outsize.data.images import IMAGE_COLUMNS
from outsize.data.rows import Document
from outsize.data.text import Segment, check_offsets, segment_documents, text_documents
from outsize.data.vision import Vision

Columns = Callable[[dict[str, Any], DatasetConfig], tuple[str, ...]]
"""The columns that a row must have. Takes its fields and the dataset."""
Documents = Callable[[Sequence[Record]], list[Document]]
INSTRUCTION = "{instruction}"
UNKNOWN_PROMPT = ""
"""In place of a prompt that is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    columns: Columns
    open: Callable[[Any, DatasetConfig, bool], Documents]
    """Takes a tokenizer, the dataset and `train_on_inputs`."""
    open_with_images: Callable[[Any, DatasetConfig, bool, Vision], Documents] | None = None
    """None: its rows cannot have images."""
    inferred: bool = False
    """Chosen for a dataset without `type` if its columns fit no other such format."""
    unless: tuple[str, ...] = ()
    """Columns that this format would ignore: it is then not chosen."""
    prompt: str | None = INSTRUCTION
    """The text before a trained answer, with `INSTRUCTION` in place of the user's. None: the chat template's."""

    def fits(self, fields: dict[str, Any], source: DatasetConfig) -> bool:
        return all(name in fields for name in self.columns(fields, source)) and not any(
            fields.get(n) for n in self.unless
        )


def open_format(
    first: Record, source: DatasetConfig, tokenizer: Any, train_on_inputs: bool, vision: Vision | None = None
) -> Documents:
    """What turns the records of a dataset into documents. `first`: its first record."""
    form = _format_of(first, source)
    if vision is None:
        return form.open(tokenizer, source, train_on_inputs)
    if form.open_with_images is None:
        raise DataError(
            f"{first.place}: the run's data have images, and this dataset is of a type that has no messages. Write it "
            "as conversations (type: chat_template), or train on it in a run of its own."
        )
    return form.open_with_images(tokenizer, source, train_on_inputs, vision)


def prompt_of(first: Record, source: DatasetConfig) -> str | None:
    """`Format.prompt` of a dataset. `first`: its first record."""
    form = _format_of(first, source)
    has_messages = form is FORMATS["prompt_completion"] and isinstance(first.fields.get("completion"), list)
    if form.prompt is not None and not has_messages:
        return form.prompt
    # The tokenizer that is saved has another template.
    return None if source.chat_template is None else UNKNOWN_PROMPT


def _format_of(first: Record, source: DatasetConfig) -> Format:
    if source.prompt is not None:
        return _instructions(**_own_prompt(source.prompt))
    if source.type is None:
        return FORMATS[_inferred(first, source)]
    form = FORMATS[source.type]
    others = _fitting(first.fields, source)
    if len(others) == 1 and not all(name in first.fields for name in form.columns(first.fields, source)):
        raise DataError(
            f"{first.place}: its columns ({', '.join(first.fields)}) are not those of type: {source.type}. Use type: "
            f"{others[0]}."
        )
    return form


def may_have_images(source: DatasetConfig) -> bool:
    return source.prompt is None and (source.type is None or FORMATS[source.type].open_with_images is not None)


# --- formats of segments


def _segmented(
    columns: tuple[str, ...],
    segments: Callable[[Record], list[Segment]],
    *,
    special_tokens: bool = True,
    inferred: bool = False,
    unless: tuple[str, ...] = (),
    prompt: str = INSTRUCTION,
) -> Format:
    """A format whose rows are texts with and without loss."""

    def open(tokenizer: Any, source: DatasetConfig, train_on_inputs: bool) -> Documents:
        if not train_on_inputs:
            check_offsets(tokenizer)

        def documents(records: Sequence[Record]) -> list[Document]:
            parts = [segments(record) for record in records]
            return segment_documents(
                tokenizer, records, parts, special_tokens=special_tokens, train_on_inputs=train_on_inputs
            )

        return documents

    return Format(columns=lambda fields, source: columns, open=open, inferred=inferred, unless=unless, prompt=prompt)


@dataclass(frozen=True, slots=True)
class _Style:
    system: str
    turn: str
    turn_without_input: str


_STYLES = {
    "instruct": _Style(
        "{system}\n\n",
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Response:\n",
    ),
    "chat": _Style("SYSTEM: {system}\n", "USER: {instruction}\n{input}\nASSISTANT:", "USER: {instruction}\nASSISTANT:"),
    "chatml": _Style(
        "<|im_start|>system\n{system}<|im_end|>\n",
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "phi": _Style(
        "<|system|>\n{system}<|end|>\n",
        "<|user|>\n{instruction}<|end|>{input}<|assistant|>",
        "<|user|>\n{instruction}<|end|>\n<|assistant|>\n",
    ),
    "orca": _Style(
        "### System:\n{system}\n",
        "### Human:\n{instruction}\n### Additional Context:\n{input}\n### Assistant:\n",
        "### Human:\n{instruction}\n### Assistant:\n",
    ),
}
_ALPACA_SYSTEM = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.",
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
)


def _instructions(
    style: _Style,
    *,
    instruction: str = "instruction",
    input: str = "input",
    output: str = "output",
    system: str | None = None,
    system_texts: tuple[str, str] = ("", ""),
    inferred: bool = False,
) -> Format:
    """An instruction, perhaps with an input, and the answer. `system`: its column. `system_texts`: with and without an
    input, for rows that have none.
    """

    def prompt_text(values: dict[str, Any]) -> str:
        before = _filled(style.system, values) if values["system"] else ""
        return before + _filled(style.turn if values["input"] else style.turn_without_input, values)

    def segments(record: Record) -> list[Segment]:
        given = record.fields.get(input)
        values = {
            "instruction": record.get_text(instruction, key="type"),
            "input": given if given is None else record.get_text(input, key="type"),
            "system": (record.fields.get(system) if system else None) or system_texts[0 if given else 1],
        }
        return [
            Segment(text=prompt_text(values), trained=False),
            Segment(text=record.get_text(output, key="type"), trained=True),
        ]

    # A column that holds a system prompt is not ignored without saying so.
    unless = () if system else ("system",)
    prompt = prompt_text({"instruction": INSTRUCTION, "input": None, "system": system_texts[1]})
    return _segmented((instruction, output), segments, inferred=inferred, unless=unless, prompt=prompt)


def _filled(text: str, values: dict[str, Any]) -> str:
    return re.sub(r"\{(instruction|input|system)\}", lambda match: str(values[match[1]] or ""), text)


def _own_prompt(prompt: Mapping[Any, str]) -> dict[str, Any]:
    """`type` as a mapping, with Axolotl's defaults."""
    style = _Style(
        prompt.get("system_format", "{system}"),
        prompt.get("format", "{instruction} {input} "),
        prompt.get("no_input_format", "{instruction} "),
    )
    columns = {key: prompt.get(f"field_{key}", key) for key in ("instruction", "input", "output", "system")}
    return {"style": style, **columns, "system_texts": (prompt.get("system_prompt", ""),) * 2}


def _labelled_segments(record: Record) -> list[Segment]:
    given = record.get("segments", key="type")
    if not isinstance(given, list) or not all(
        isinstance(part, dict) and isinstance(part.get("text"), str) and isinstance(part.get("label"), bool)
        for part in given
    ):
        raise DataError(
            f"{record.place}: 'segments' is not a list of objects with text and label (true or false). Correct or "
            "remove the record."
        )
    return [Segment(text=part["text"], trained=part["label"]) for part in given]


# --- the others


def _open_chat(tokenizer: Any, source: DatasetConfig, train_on_inputs: bool, vision: Vision | None = None) -> Documents:
    return Chats(tokenizer=tokenizer, source=source, train_on_inputs=train_on_inputs, vision=vision).documents


def _open_text(tokenizer: Any, source: DatasetConfig, _: bool) -> Documents:
    return partial(text_documents, tokenizer, field=source.field)


_IN_COMPLETION = "in_completion"


def _open_prompt_completion(
    tokenizer: Any, source: DatasetConfig, train_on_inputs: bool, vision: Vision | None = None
) -> Documents:
    """Texts, or messages: then the completion's messages are trained."""
    text = _segmented(
        ("prompt", "completion"),
        lambda record: [
            Segment(text=record.get_text("prompt", key="type"), trained=False),
            Segment(text=record.get_text("completion", key="type"), trained=True),
        ],
    ).open(tokenizer, source, train_on_inputs)
    chats: Chats | None = None

    def documents(records: Sequence[Record]) -> list[Document]:
        nonlocal chats
        if vision is None and not isinstance(records[0].fields.get("completion"), list):
            return text(records)
        chats = chats or Chats(
            tokenizer=tokenizer,
            source=replace(source, field_messages="messages", message_field_training=_IN_COMPLETION),
            train_on_inputs=train_on_inputs,
            vision=vision,
        )
        return chats.documents([_as_messages(record, source) for record in records])

    return documents


def _as_messages(record: Record, source: DatasetConfig) -> Record:
    messages: list[Any] = []
    for column in ("prompt", "completion"):
        part = record.get(column, key="type")
        if not isinstance(part, list):
            raise DataError(f"{record.place}: {column!r} is {json_type(part)}, not messages. Correct the record.")
        trained = column == "completion"
        messages += [{**message, _IN_COMPLETION: trained} if isinstance(message, dict) else message for message in part]
    others = {name: record.fields[name] for name in ("tools", *IMAGE_COLUMNS) if name in record.fields}
    return Record(fields={"messages": messages, **others}, place=record.place)


def _alpaca(style: str, **options: Any) -> Format:
    return _instructions(_STYLES[style], **{"system_texts": _ALPACA_SYSTEM, **options})


def _with_system(style: str, **options: Any) -> Format:
    return _instructions(_STYLES[style], **{"system": "system", **options})


_COMPLETION = Format(columns=lambda fields, source: (source.field,), open=_open_text, inferred=True)
_CHAT = Format(
    columns=lambda fields, source: (field_of(fields, source),),
    open=_open_chat,
    open_with_images=_open_chat,
    inferred=True,
    prompt=None,
)

FORMATS: dict[str, Format] = {
    "completion": _COMPLETION,
    "pretrain": replace(_COMPLETION, inferred=False),
    "chat_template": _CHAT,
    "chat_template.default": replace(_CHAT, inferred=False),
    "sharegpt": replace(_CHAT, inferred=False),
    "prompt_completion": Format(
        columns=lambda fields, source: ("prompt", "completion"),
        open=_open_prompt_completion,
        open_with_images=_open_prompt_completion,
        inferred=True,
    ),
    "input_output": _segmented(("segments",), _labelled_segments, special_tokens=False, inferred=True),
    "alpaca": _alpaca("instruct", inferred=True),
    "alpaca:instruct": _alpaca("instruct"),
    "alpaca:chat": _alpaca("chat"),
    "alpaca:chatml": _alpaca("chatml"),
    "alpaca:phi": _alpaca("phi"),
    "alpaca_instruct": _alpaca("instruct"),
    "alpaca_instruct.load_no_prompt": _alpaca("instruct", system_texts=("", "")),
    "alpaca_chat": _alpaca("chat"),
    "alpaca_chat.load_no_prompt": _alpaca("chat", system_texts=("", "")),
    "alpaca_w_system": _with_system("chat"),
    "alpaca_w_system.load_instruct": _with_system("instruct"),
    "alpaca_w_system.load_chat": _with_system("chat"),
    "alpaca_w_system.load_open_orca": _with_system(
        "orca", instruction="question", output="response", system="system_prompt"
    ),
    "gpteacher": _alpaca("instruct", output="response"),
}
"""By the value of `type`."""


# --- a dataset without type


_ASKING = ("instruction", "question", "query", "problem", "input", "prompt", "user", "text")
_ANSWERING = ("output", "response", "answer", "completion", "solution", "assistant", "target", "summary")


def _fitting(fields: dict[str, Any], source: DatasetConfig) -> list[str]:
    return [name for name, kind in FORMATS.items() if kind.inferred and kind.fits(fields, source)]


def _inferred(first: Record, source: DatasetConfig) -> str:
    fields = first.fields
    fits = _fitting(fields, source)
    if len(fits) == 1:
        return fits[0]
    columns = ", ".join(fields) or "none"
    if fits:
        lines = " or ".join(f"`type: {name}`" for name in fits)
        raise DataError(f"{first.place}: its columns ({columns}) fit several formats. Add {lines} to this dataset.")
    raise DataError(
        f"{first.place}: its columns ({columns}) fit no format. {_guess(fields)} docs/data.md lists the formats."
    )


def _guess(fields: dict[str, Any]) -> str:
    """The line to add, by the names and values of the columns."""
    if {"chosen", "rejected"} <= set(fields):
        return "chosen and rejected are preference pairs: add `rl: dpo` to the run file."
    for name, kind in FORMATS.items():
        if not kind.inferred and kind.fits(fields, DatasetConfig(path="-")):
            return f"They look like `type: {name}`: add it to this dataset."
    if text := _misspelled(fields):
        return text
    for name, value in fields.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            keys = list(value[0])
            if {"role", "content"} <= set(keys) or {"from", "value"} <= set(keys):
                return f"{name!r} looks like a conversation: add `field_messages: {name}` to this dataset."
            return (
                f"{name!r} looks like a conversation with the keys {', '.join(keys)}: add `field_messages: {name}` and "
                "`message_property_mappings: {role: …, content: …}` to this dataset."
            )
    texts = [name for name, value in fields.items() if isinstance(value, str)]
    lower = {name.lower(): name for name in reversed(texts)}
    asked = next((lower[name] for name in _ASKING if name in lower), None)
    answered = next((lower[name] for name in _ANSWERING if name in lower), None)
    if len(texts) == 2 and (asked or answered):
        asked = asked or next(name for name in texts if name != answered)
        answered = answered or next(name for name in texts if name != asked)
    if asked and answered:
        return (
            f"{asked!r} and {answered!r} look like an instruction and its answer: add "
            f"`type: {{field_instruction: {asked}, field_output: {answered}}}` to this dataset."
        )
    if len(texts) == 1:
        return f"{texts[0]!r} looks like text: add `field: {texts[0]}` to this dataset."
    return (
        "Add what they are to this dataset: `field: …` (text), `field_messages: …` (conversations) or "
        "`type: {field_instruction: …, field_output: …}` (an instruction and its answer), each with a column."
    )


def _misspelled(fields: dict[str, Any]) -> str:
    """The column that a format of texts lacks, if another one has nearly its name."""
    for name in ("alpaca", "prompt_completion"):
        needed = FORMATS[name].columns(fields, DatasetConfig(path="-"))
        missing = [column for column in needed if column not in fields]
        others = {column.lower(): column for column in fields if column not in needed}
        if len(missing) == 1 and (near := difflib.get_close_matches(missing[0], list(others), n=1, cutoff=0.8)):
            return f"{others[near[0]]!r} is near {missing[0]!r} of `type: {name}`: rename the column."
    return ""
