"""Finds the turns of a conversation in the text that a chat template renders.

The contents are rendered once more with a private character before and after each. Without these marks the text must
be the same; then they are the places of the contents. A turn of the assistant begins where its generation prompt ends,
and ends where the conversation ends when rendered up to it. Templates that rewrite earlier turns (Qwen3 removes
thoughts, Mistral moves the system prompt) are covered: only the text between two contents is compared.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outsize.data.text import Span

Message = dict[str, Any]

_FIRST = 0xF0000
_BEGINNING = -1
_MARK = re.compile("[\U000f0000-\U000ffffd]")  # a plane for private use
_MAX_MESSAGES = 32_000
_PARTIAL = re.compile(r"([<\[][^>\]\n]*|\w+)\Z")
"""An incomplete token or word at the end of a common prefix."""
_TOKEN = re.compile(r"\s*[<\[][^>\]]*[>\]]")


class UnlocatedError(Exception):
    """Says why turns are not found."""


class UnrenderedError(UnlocatedError):
    """The template leaves out the content of a message."""


@dataclass(frozen=True, slots=True)
class Located:
    spans: list[Span]
    rewritten: int | None
    """The first message that is rendered differently when more messages follow."""
    hidden: int | None
    """The first message whose content is not rendered."""


@dataclass(frozen=True, slots=True)
class _Marked:
    """A rendered conversation without its marks."""

    text: str
    at: dict[int, int]
    """Where each mark was first: 2 n before the content of message n, 2 n + 1 behind it."""
    repeated: set[int]

    def anchor(self, index: int, other: "_Marked") -> int:
        """The mark behind the last content up to message `index` that both render; if there is none, the beginning."""
        return next((mark for mark in range(2 * index + 1, 0, -2) if mark in self.at and mark in other.at), _BEGINNING)

    def behind(self, mark: int) -> str:
        return self.text[self.at.get(mark, len(self.text)) :]


def locate(
    render: Callable[..., str], messages: Sequence[Message], text: str, wanted: Sequence[int], assistant: Sequence[int]
) -> Located:
    """The spans in `text` of the messages `wanted`. Of those not in `assistant`, the content.

    `render(messages, prompt=False)` applies the template; with `prompt`, a generation prompt follows.
    """
    if _MARK.search(text) or len(messages) > _MAX_MESSAGES:
        raise UnlocatedError("it has characters for private use, or too many messages")
    begins = {index for index in wanted if index == 0 or index not in assistant}
    marked = [_with_marks(message, index, begin=index in begins) for index, message in enumerate(messages)]
    whole = _unmarked(render(marked))
    if whole.text != text:
        raise UnlocatedError("the template changes contents")
    if twice := [mark // 2 for mark in whole.repeated if messages[mark // 2].get("content")]:
        raise UnlocatedError(f"the content of message {twice[0] + 1} is rendered twice")
    hidden = [n for n, message in enumerate(messages) if marked[n] is not message and 2 * n + 1 not in whole.at]
    spans, differing = [], []
    for index in wanted:
        if index in hidden:
            what = "content" if messages[index].get("content") else "tool calls"
            raise UnrenderedError(f"the chat template does not render the {what} of message {index + 1} as it is")
        if index not in assistant and marked[index] is messages[index]:
            continue  # no content
        if index in begins and 2 * index not in whole.at:
            raise UnlocatedError(f"the content of message {index + 1} is not rendered as it is")
        start, same = whole.at.get(2 * index, 0), True
        if index not in begins:
            start, same = _start(render, marked, whole, index)
        end = whole.at.get(2 * index + 1, start)
        if index in assistant:
            end, as_last = _end(render, marked, whole, index)
            same = same and as_last
        if any(at < start for mark, at in whole.at.items() if mark > 2 * index) or any(
            at < end for mark, at in whole.at.items() if mark > 2 * index + 1
        ):
            raise UnlocatedError(f"message {index + 1} is not rendered in its place")
        if any(name not in text[start:end] for name in _call_names(messages[index])):
            raise UnrenderedError(f"the chat template does not render the tool calls of message {index + 1}")
        spans.append((start, end))
        differing += [] if same else [index]
    return Located(spans, differing[0] if differing else None, hidden[0] if hidden else None)


def _start(render: Callable[..., str], marked: list[Message], whole: _Marked, index: int) -> tuple[int, bool]:
    """Where the generation prompt of a turn ends, and whether all up to there is as prompted."""
    before = _unmarked(render(marked[:index], prompt=True))
    mark = before.anchor(index - 1, whole)
    prompt = before.behind(mark)
    same = _common(prompt, whole.behind(mark))
    if same < len(prompt):
        # As in templates that begin thoughts only in the generation prompt, or only in the last turn.
        closed = _unmarked(render(marked[:index]))
        if same <= _common(prompt, closed.behind(mark)):
            raise UnlocatedError(f"message {index + 1} is not rendered as a continuation of its generation prompt")
    start = whole.at[mark] + same
    return start, whole.text[:start].startswith(before.text)


def _end(render: Callable[..., str], marked: list[Message], whole: _Marked, index: int) -> tuple[int, bool]:
    """Where a turn ends, and whether all up to there is rendered in the same way when the turn is the last."""
    after = whole if index == len(marked) - 1 else _unmarked(render(marked[: index + 1]))
    mark = after.anchor(index, whole)
    tail = after.behind(mark)
    asked = max((n + 1 for n in range(index) if marked[n].get("role") == "user"), default=0)
    if asked and len(_TOKEN.findall(tail)) > 1:
        # Command-A: a generation prompt follows each finished message. It begins with the token that ends a turn.
        closed, opened = (_unmarked(render(marked[:asked], prompt=prompt)) for prompt in (False, True))
        header = closed.behind(closed.anchor(asked - 1, opened)).lstrip()
        token = _TOKEN.match(header)
        if token and len(_TOKEN.findall(header)) > 1 and opened.text.startswith(closed.text) and tail.endswith(header):
            tail = tail[: len(tail) - len(header) + token.end()]
    same = _common(tail, whole.behind(mark))
    if same < len(tail) and mark != 2 * index + 1:
        raise UnlocatedError(f"message {index + 1} has no content and is rendered differently when more follow")
    return whole.at[mark] + same, whole.text.startswith(after.text[: after.at[mark] + len(tail)])


def _common(one: str, other: str) -> int:
    """Length of the common prefix, without an incomplete token at its end."""
    pairs = enumerate(zip(one, other, strict=False))
    same = next((n for n, (left, right) in pairs if left != right), min(len(one), len(other)))
    if same == len(one):
        return same
    partial = _PARTIAL.search(one[:same])
    return partial.start() if partial else same


def _with_marks(message: Message, index: int, *, begin: bool) -> Message:
    """Marks enclose the content without the spaces around it, which templates trim. Without a content, a mark is behind
    the name of the last tool call.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    before, after = chr(_FIRST + 2 * index) if begin else "", chr(_FIRST + 2 * index + 1)
    if isinstance(content, str) and content.strip():
        return {**message, "content": _enclosed(content, before, after)}
    if isinstance(content, list):
        texts = [n for n, part in enumerate(content) if isinstance(part, dict) and (part.get("text") or "").strip()]
        parts = list(content)
        for n in {*texts[:1], *texts[-1:]}:
            ends = (before if n == texts[0] else "", after if n == texts[-1] else "")
            parts[n] = {**parts[n], "text": _enclosed(parts[n]["text"], *ends)}
        if texts:
            return {**message, "content": parts}
    if isinstance(calls, list) and calls and isinstance(calls[-1], dict):
        return {**message, "tool_calls": [*calls[:-1], _named(calls[-1], after)]}
    return message


def _call_names(message: Message) -> list[str]:
    calls = [call.get("function", call) for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return [str(call.get("name")) for call in calls if isinstance(call, dict)]


def _named(call: dict[str, Any], after: str) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _named(call["function"], after)}
    return {**call, "name": f"{call.get('name')}{after}"}


def _enclosed(text: str, before: str, after: str) -> str:
    core = text.strip()
    start = text.index(core)
    return text[:start] + before + core + after + text[start + len(core) :]


def _unmarked(rendered: str) -> _Marked:
    at, repeated = {_BEGINNING: 0}, set()
    for count, match in enumerate(_MARK.finditer(rendered)):
        mark = ord(match[0]) - _FIRST
        repeated |= {mark} & at.keys()
        at.setdefault(mark, match.start() - count)
    return _Marked(_MARK.sub("", rendered), at, repeated)
