"""Turns conversations into documents with the tokenizer's chat template. The loss is on the assistant's turns, end of
turn included.

The assistant's turns are spans of the rendered text. Some templates mark them (`{% generation %}`). For the others, the
conversation rendered up to the turn, with the generation prompt, must be a prefix of the whole; the turn is what
follows. The whole text is tokenized once: tokenizing it in parts would give other tokens at the boundaries than at
inference.

The tokenizer's `return_assistant_tokens_mask` is not used. If a tokenizer trims spaces from its offsets (GPT-2), a span
that ends in a space makes it mark everything after it, the user's turns included.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from outsize import compat
from outsize.base.errors import ConfigError, DataError
from outsize.data.files import Record, json_type
from outsize.data.rows import IGNORED, Document

Message = dict[str, Any]
Span = tuple[int, int]

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
_MARKS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_DEFAULT_FIELD, _SHAREGPT_FIELD = "messages", "conversations"
_CORRECT = "Correct or remove the record."


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    text: str
    spans: Sequence[Span]
    """The assistant's turns, in characters."""


def chat_documents(
    tokenizer: Any, records: Sequence[Record], *, field_messages: str = _DEFAULT_FIELD, train_on_inputs: bool = False
) -> list[Document]:
    """One document per record. `train_on_inputs`: the loss is on every token."""
    check_tokenizer(tokenizer, needs_offsets=not train_on_inputs)
    rendered = [_render(tokenizer, record, field_messages, find_spans=not train_on_inputs) for record in records]
    encoded = tokenizer(
        [chat.text for chat in rendered],
        add_special_tokens=False,
        return_offsets_mapping=not train_on_inputs,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    documents = []
    for index, (record, chat, ids) in enumerate(zip(records, rendered, encoded["input_ids"], strict=True)):
        labels = ids if train_on_inputs else _labels(ids, encoded["offset_mapping"][index], chat.spans)
        documents.append(Document(ids=ids, labels=labels, place=record.place))
    return documents


def is_chat(record: Record, field_messages: str = _DEFAULT_FIELD) -> bool:
    return _field(record, field_messages) in record.fields


def check_tokenizer(tokenizer: Any, *, needs_offsets: bool) -> None:
    if not tokenizer.chat_template:
        raise ConfigError(
            f"The tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template. Set chat_template_jinja "
            "to a template or its file, or use the tokenizer of an instruct model."
        )
    if needs_offsets and not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} does not report character offsets of tokens. Use a fast tokenizer, or set "
            "train_on_inputs: true."
        )


# --- messages


def messages_of(record: Record, field_messages: str = _DEFAULT_FIELD) -> list[Message]:
    """The messages with `role` and `content`. Keys without a value, as parquet columns have them, are dropped."""
    messages = record.get(_field(record, field_messages), key="field_messages")
    if not isinstance(messages, list) or not messages:
        found = "the list of messages is empty" if messages == [] else f"{json_type(messages)}, not a list of messages"
        raise DataError(f"{record.place}: {found}. {_CORRECT}")
    return [
        _message(message, f"message {number} of {record.place}") for number, message in enumerate(messages, start=1)
    ]


def _field(record: Record, field_messages: str) -> str:
    alias = (
        field_messages == _DEFAULT_FIELD and _DEFAULT_FIELD not in record.fields and _SHAREGPT_FIELD in record.fields
    )
    return _SHAREGPT_FIELD if alias else field_messages


def _message(given: Any, place: str) -> Message:
    if not isinstance(given, dict):
        raise DataError(f"{place}: {json_type(given)}, not an object with role and content. {_CORRECT}")
    message = {key: value for key, value in given.items() if value is not None}
    if "role" not in message and "from" in message:
        message = {"role": _SHAREGPT_ROLES.get(str(message["from"]), message["from"]), "content": message.get("value")}
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        found = f"unknown role {role!r}" if role is not None else f"no role among {', '.join(given) or 'no keys'}"
        known = f"{', '.join(ROLES)} (or human, gpt and system in `from`)"
        raise DataError(f"{place}: {found}. Use one of {known}, or remove the record.")
    if not isinstance(content, (str, list)) and not (content is None and "tool_calls" in message):
        found = f"the content is {json_type(content)}, not text"
        if content is None:
            found = f"no content among {', '.join(given)}"
        raise DataError(f"{place}: {found}. {_CORRECT}")
    return message


# --- rendering


def _render(tokenizer: Any, record: Record, field_messages: str, *, find_spans: bool) -> Rendered:
    messages = messages_of(record, field_messages)
    tools = record.fields.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{record.place}: tools is {json_type(tools)}, not a list of JSON schemas. {_CORRECT}")
    try:
        if find_spans and _MARKS_GENERATION.search(template := tokenizer.get_chat_template(tools=tools)):
            return _render_marked(tokenizer, template, messages, tools)
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        return Rendered(
            text=text,
            spans=tuple(_spans_by_prefix(tokenizer, messages, tools, text, record.place)) if find_spans else (),
        )
    except (TemplateError, TypeError) as error:
        raise DataError(
            f"{record.place}: the chat template fails ({str(error).rstrip('.')}). Correct the record, or set "
            "chat_template_jinja."
        ) from error


def _render_marked(tokenizer: Any, template: str, messages: list[Message], tools: list[Any] | None) -> Rendered:
    (text,), (spans,) = compat.transformers().render_jinja_template(
        [messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return Rendered(text=text, spans=tuple(spans))


def _spans_by_prefix(
    tokenizer: Any, messages: list[Message], tools: list[Any] | None, whole: str, place: str
) -> Iterator[Span]:
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if index == 0:
            raise _not_a_prefix(place, "it begins with the assistant")
        before = tokenizer.apply_chat_template(
            messages[:index], tools=tools, tokenize=False, add_generation_prompt=True
        )
        after = tokenizer.apply_chat_template(messages[: index + 1], tools=tools, tokenize=False)
        if not after.startswith(before):
            raise _not_a_prefix(
                place, f"message {index + 1} is not rendered as a continuation of its generation prompt"
            )
        if not whole.startswith(after):
            raise _not_a_prefix(place, f"message {index + 1} is rendered differently when more messages follow")
        yield len(before), len(after)


def _not_a_prefix(place: str, found: str) -> DataError:
    return DataError(
        f"{place}: the assistant's turns cannot be located, because {found}. Set chat_template_jinja to a template "
        "with {% generation %} and {% endgeneration %} around them, or set train_on_inputs: true."
    )


def _labels(ids: list[int], offsets: list[Span], spans: Sequence[Span]) -> list[int]:
    labels = [IGNORED] * len(ids)
    token = 0
    for start, end in spans:
        # Trimmed offsets make a token of spaces empty, at the end of the spaces: at `start` it is part of the prompt.
        while token < len(ids) and (offsets[token][0] < start or offsets[token] == (start, start)):
            token += 1
        while token < len(ids) and offsets[token][1] <= end:
            labels[token] = ids[token]
            token += 1
    return labels
