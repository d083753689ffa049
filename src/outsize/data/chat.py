"""Turns conversations into documents with the tokenizer's chat template. The loss is on the assistant's turns, end of
turn included, or as `roles_to_train` and `train_on_eos` say.

The turns are spans of the rendered text. Some templates mark the assistant's (`{% generation %}`); for the others,
`turns.py` finds them. The tokenizer's `return_assistant_tokens_mask` is not used: if a tokenizer trims spaces from its
offsets (GPT-2), a span that ends in a space makes it mark everything after it, the user's turns included.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from outsize import compat
from outsize.base.errors import ConfigError, DataError
from outsize.base.log import log
from outsize.config.run import DatasetConfig
from outsize.data.files import Record, json_type
from outsize.data.images import has_images, image_parts
from outsize.data.rows import Document
from outsize.data.templates import template_named
from outsize.data.text import Span, check_offsets, span_documents
from outsize.data.turns import Message, UnlocatedError, UnrenderedError, locate
from outsize.data.vision import Vision

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_FIELD = "conversations"
_OTHER_ROLES = {"human": "user", "gpt": "assistant"}
_MARKS_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_CORRECT = "Correct or remove the record."
_PROBE = "probe"


@dataclass(kw_only=True)
class Chats:
    """Makes documents of the conversations of one dataset."""

    tokenizer: Any
    source: DatasetConfig = field(default_factory=lambda: DatasetConfig(path="-"))
    train_on_inputs: bool = False
    """The loss is on every token."""
    vision: Vision | None = None
    """Makes rows of conversations that may have images. None: the data have none."""
    _noted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        name, has_own = self.source.chat_template, bool(self.tokenizer.chat_template)
        self._template = None if name is None else template_named(name, has_own=has_own)
        if not (self._template or has_own):
            raise ConfigError(
                f"The tokenizer of {self.tokenizer.name_or_path or 'this model'} has no chat template. Set "
                "chat_template_jinja to a template or its file, or use the tokenizer of an instruct model."
            )
        if not self.train_on_inputs:
            check_offsets(self.tokenizer)
        self._in_parts = not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: Any) -> bool:
        """Templates of models with images may show contents only in parts."""
        try:
            return _PROBE in _apply(self.tokenizer, self._template, None, [{"role": "user", "content": content}])
        except (TemplateError, TypeError):
            return False

    def documents(self, records: Sequence[Record]) -> list[Document]:
        messages = [messages_of(record, self.source) for record in records]
        if self.vision is None:
            texts, spans = self._rendered(records, messages)
            return span_documents(self.tokenizer, records, texts, spans)
        with_parts, images = zip(*map(image_parts, records, messages), strict=True)
        path = Path(self.source.path).expanduser()
        files = self.vision.files(images, records, path if path.is_dir() else path.parent)
        texts, spans = self._rendered(records, with_parts)
        return self.vision.documents(self.tokenizer, records, texts, spans, files)

    def _rendered(
        self, records: Sequence[Record], messages: Sequence[list[Message]]
    ) -> tuple[list[str], list[list[Span]] | None]:
        """Texts, and where the loss is in them."""
        rendered = list(map(self._render, records, messages))
        return [text for text, _ in rendered], None if self.train_on_inputs else [spans for _, spans in rendered]

    def _render(self, record: Record, messages: list[Message]) -> tuple[str, list[Span]]:
        if self.vision is None and has_images(record):
            raise DataError(
                f"{record.place}: the row has images, but the model takes none. Remove them, or use another model."
            )
        if len(messages) > 1 and self.source.drop_system_message and messages[0]["role"] == "system":
            messages = messages[1:]
        if self._in_parts:
            messages = [_with_parts(message) for message in messages]
        tools = _tools_of(record)
        render = partial(_apply, self.tokenizer, self._template, tools)
        try:
            text = render(messages)
            if self.train_on_inputs:
                return text, []
            wanted = [index for index, message in enumerate(messages) if self._is_trained(message)]
            assistant = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
            template = self.tokenizer.get_chat_template(self._template, tools=tools)
            if wanted == assistant and _MARKS_GENERATION.search(template):
                text, spans = _render_marked(self.tokenizer, template, messages, tools)
            else:
                spans = self._locate(render, messages, text, wanted, assistant, record.place)
        except (TemplateError, TypeError) as error:
            drop = ", set drop_system_message: true" if messages[0]["role"] == "system" else ""
            raise DataError(
                f"{record.place}: the chat template fails ({str(error).rstrip('.')}). Correct the record{drop}, or set "
                "chat_template_jinja."
            ) from error
        return text, self._with_ends(text, spans)

    def _is_trained(self, message: Message) -> bool:
        flag = message.get(self.source.message_field_training) if self.source.message_field_training else None
        return message["role"] in self._roles if flag is None else bool(flag)

    @cached_property
    def _roles(self) -> set[str]:
        """The roles that are trained, by their names in templates."""
        return {_role_names(self.source).get(role, role) for role in self.source.roles_to_train}

    def _locate(
        self, render: Any, messages: list[Message], text: str, wanted: list[int], assistant: list[int], place: str
    ) -> list[Span]:
        try:
            located = locate(render, messages, text, wanted, assistant)
            if located.rewritten is not None:
                self._note(
                    "rewritten",
                    "the chat template renders earlier turns differently when more messages follow (message "
                    f"{located.rewritten + 1} of {place}): every turn is trained as the whole conversation shows it",
                )
            thoughts = messages[assistant[-1]].get(self.source.template_thinking_key) if assistant else None
            if isinstance(thoughts, str) and thoughts.strip() not in text:
                self._note("thoughts", f"the chat template does not render thoughts (in the last answer of {place})")
            if located.hidden is not None:
                role = messages[located.hidden]["role"]
                self._note("hidden", f"the chat template does not render the {role} message of {place}: it is left out")
            return located.spans
        except UnlocatedError as error:
            # The last turn is enough, if it continues its prompt.
            last = wanted[-1] if wanted else 0
            alone = last and not isinstance(error, UnrenderedError)
            if alone and last in assistant and last == len(messages) - 1:
                before = render(messages[:last], prompt=True)
                if text.startswith(before):
                    self._note("last", f"only the last turn of {place} and others like it is trained: {error}")
                    return [(len(before), len(text))]
            raise DataError(
                f"{place}: the assistant's turns cannot be located, because {error}. Set chat_template_jinja to a "
                "template with {% generation %} and {% endgeneration %} around them, or set train_on_inputs: true."
            ) from None

    def _note(self, kind: str, note: str) -> None:
        """Log each kind once per dataset."""
        if kind not in self._noted:
            self._noted.add(kind)
            log.warning("%s", note)

    # --- ends of turns

    @cached_property
    def _added(self) -> str:
        """Matches one of the tokenizer's special tokens."""
        added = {*self.tokenizer.get_added_vocab(), *self.tokenizer.all_special_tokens}
        return "|".join(re.escape(token) for token in sorted(added, key=len, reverse=True)) or r"(?!)"

    def _with_ends(self, text: str, spans: list[Span]) -> list[Span]:
        """The spans with or without the tokens that end turns."""
        mode = self.source.train_on_eos
        if mode is None:
            return spans
        bare, full, tokens = [], [], {self.tokenizer.eos_token}
        for start, end in spans:
            inside = re.search(rf"({self._added})\s*$", text[start:end])
            after = re.match(rf"\s?({self._added})", text[end:]) if inside is None else None
            bare.append((start, start + inside.start()) if inside else (start, end))
            full.append((start, end + after.end()) if after else (start, end))
            tokens |= {match[1] for match in (inside, after) if match}
        if mode == "none":
            return bare
        if mode == "last":
            return [*bare[:-1], *full[-1:]]
        if mode == "turn":
            return full
        ends = "|".join(re.escape(token) for token in tokens if token) or r"(?!)"
        return sorted([*full, *((match.start(), match.end()) for match in re.finditer(ends, text))])

    # --- parts of conversations

    def text(self, messages: list[Message], record: Record, *, prompt: bool = False) -> str:
        """The messages as the template renders them. `prompt`: with the beginning of an answer."""
        shown = [_with_parts(message) for message in messages] if self._in_parts else messages
        return _apply(self.tokenizer, self._template, _tools_of(record), shown, prompt)


# --- messages


def field_of(fields: dict[str, Any], source: DatasetConfig) -> str:
    """The column of the messages."""
    is_default = source.field_messages == "messages" and "messages" not in fields
    return SHAREGPT_FIELD if is_default and SHAREGPT_FIELD in fields else source.field_messages


def messages_of(record: Record, source: DatasetConfig) -> list[Message]:
    """The messages with `role` and `content`. Keys without a value, as parquet columns have them, are dropped."""
    messages = record.get(field_of(record.fields, source), key="field_messages")
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else f"{json_type(messages)}, not a list of messages"
        raise DataError(f"{record.place}: {field_of(record.fields, source)!r} is {found}. {_CORRECT}")
    return [message_of(given, source, f"message {n} of {record.place}") for n, given in enumerate(messages, start=1)]


def _role_names(source: DatasetConfig) -> dict[str, str]:
    return _OTHER_ROLES | {other: role for role, others in (source.roles or {}).items() for other in others}


def message_of(given: Any, source: DatasetConfig, place: str) -> Message:
    if not isinstance(given, dict):
        raise DataError(f"{place}: {json_type(given)}, not an object with role and content. {_CORRECT}")
    message = {key: value for key, value in given.items() if value is not None}
    mappings = {
        source.template_thinking_key: source.field_thinking,
        "role": source.message_field_role or "role",
        "content": source.message_field_content or "content",
        **(source.message_property_mappings or {}),
    }
    if "from" in message and mappings["role"] == "role" and "role" not in message:
        mappings |= {"role": "from", "content": "value"}
    moved = {key: message[name] for key, name in mappings.items() if name in message}
    renamed = {name for key, name in mappings.items() if key != name}
    message = {key: value for key, value in message.items() if key not in renamed} | moved
    role, content = message.get("role"), message.get("content")
    role = _role_names(source).get(role, role) if isinstance(role, str) else role
    if role not in ROLES and role not in (source.roles or {}):
        if role is None:
            raise DataError(f"{place}: no role among {', '.join(given) or 'no keys'}. {_map('role')}")
        known = f"{', '.join(ROLES)} (or human, gpt and system in `from`)"
        raise DataError(
            f"{place}: unknown role {role!r}. Use one of {known}, set `roles` of this dataset, or remove the record."
        )
    if not isinstance(content, (str, list)) and not (content is None and "tool_calls" in message):
        if content is None:
            raise DataError(f"{place}: no content among {', '.join(given)}. {_map('content')}")
        raise DataError(f"{place}: the content is {json_type(content)}, not text. {_CORRECT}")
    return {**message, "role": role}


def _map(key: str) -> str:
    return (
        f"Correct or remove the record, or name the key in `message_property_mappings: {{{key}: …}}` of this dataset."
    )


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _tools_of(record: Record) -> list[Any] | None:
    tools = record.fields.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise DataError(f"{record.place}: tools is not valid JSON ({error}). {_CORRECT}") from error
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{record.place}: tools is {json_type(tools)}, not a list of JSON schemas. {_CORRECT}")
    return tools


# --- rendering


def _apply(
    tokenizer: Any, template: str | None, tools: list[Any] | None, messages: list[Message], prompt: bool = False
) -> str:
    text: str = tokenizer.apply_chat_template(
        messages, chat_template=template, tools=tools, tokenize=False, add_generation_prompt=prompt
    )
    return text


def _render_marked(
    tokenizer: Any, template: str, messages: list[Message], tools: list[Any] | None
) -> tuple[str, list[Span]]:
    (text,), (spans,) = compat.transformers().render_jinja_template(
        [messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return text, list(spans)
