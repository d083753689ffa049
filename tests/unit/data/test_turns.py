"""The turns of the assistant under templates that rewrite, move and leave out text, as those of real models do.

Each template here is small and has one of the behaviors that tests/unit/data/test_other_templates.py finds in others'.
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outsize.base.errors import DataError
from outsize.config.run import DatasetConfig
from outsize.data.chat import Chats
from outsize.data.files import Record
from outsize.data.rows import IGNORED
from outsize.data.turns import UnlocatedError, locate

SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    {"role": "user", "content": "Is the sea full?"},
    {"role": "assistant", "content": "Not yet."},
    {"role": "user", "content": " And [the] sun? "},
    {"role": "assistant", "content": " It rises. "},
    {"role": "user", "content": "Rivers?"},
    {"role": "assistant", "content": "They run."},
]


def template(turn: str, *, prompt: str = "", before: str = "", after: str = "") -> str:
    closing = f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}" if prompt else ""
    return before + "{% for m in messages %}" + turn + "{% endfor %}" + after + closing


TURN = "<|im_start|>{{ m.role }}{{ '\\n' }}{{ m.content | trim }}<|im_end|>{{ '\\n' }}"
PROMPT = "<|im_start|>assistant{{ '\\n' }}"
THOUGHT = "{% if m.role == 'assistant' and loop.last %}<think>{{ '\\n\\n' }}</think>{{ '\\n\\n' }}{% endif %}"
THINKS_LAST = template(TURN.replace("{{ m.content", THOUGHT + "{{ m.content"), prompt=PROMPT)
PROMPTS_THOUGHT = template(
    TURN.replace("{{ m.content", THOUGHT + "{{ m.content"), prompt=PROMPT + "<think>{{ '\\n\\n' }}"
)
PARSES_THOUGHTS = template(
    TURN.replace("m.content |", "(m.content if loop.last else m.content.split('</think>')[-1]) |"), prompt=PROMPT
)
SYSTEM_IN_LAST = template(
    "{% if m.role == 'user' %}[INST] {% if messages[0].role == 'system' and loop.index > messages | length - 2 %}"
    "{{ messages[0].content }}{{ '\\n' }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}<|end|>{% endif %}"
)
ENDS_ONCE = (
    template("<|{{ m.role }}|>{{ m.content.strip() }}")
    + "{% if add_generation_prompt %}<|assistant|>{% else %}<|end|>{% endif %}"
)
ALWAYS_PROMPTS = template(TURN.replace("{{ '\\n' }}", ""), after="<|im_start|>assistant")
SPACED = template("{{ m.role.upper() }}: {{ m.content }} ", prompt="ASSISTANT:")
MARKED_AFTER_SPACE = template(
    "{{ m.role.upper() }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }} {% endgeneration %}"
    "{% else %}{{ m.content }} {% endif %}",
    prompt="ASSISTANT:",
)
IN_PARTS = template(
    "<|im_start|>{{ m.role }}{{ '\\n' }}{% for part in m.content if part.text is defined %}{{ part.text }}{% endfor %}"
    "<|im_end|>",
    prompt=PROMPT,
)
CALLS = template(
    "<|im_start|>{{ m.role }}{{ '\\n' }}{{ m.content | default('') }}{% for call in m.tool_calls | default([]) %}"
    "<call>{{ call.name }}</call>{% endfor %}<|im_end|>",
    prompt=PROMPT,
)


def trained(tokenizer: Any, messages: Any) -> list[str]:
    """The runs of tokens that have labels, as text. Asserts that the text is the template's."""
    (document,) = Chats(tokenizer=tokenizer, source=DatasetConfig(path="-")).documents(
        [Record(fields={"messages": messages}, place="data.jsonl:7")]
    )
    runs: list[list[int]] = [[]]
    for token, label in zip(document.ids, document.labels, strict=True):
        assert label in (token, IGNORED)
        runs[-1].append(token) if label != IGNORED else runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def ended(end: str, *, last: str = "", trim: bool = True, lead: str = "") -> list[str]:
    answers = [message["content"] for message in TALK if message["role"] == "assistant"]
    return [lead + last * (n == 2) + (text.strip() if trim else text) + end for n, text in enumerate(answers)]


@pytest.mark.parametrize("system", [[], [SYSTEM]], ids=["no system", "system"])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(template(TURN, prompt=PROMPT), ended("<|im_end|>\n"), id="trims contents"),
        pytest.param(THINKS_LAST, ended("<|im_end|>\n", last="<think>\n\n</think>\n\n"), id="thinks in the last turn"),
        pytest.param(PROMPTS_THOUGHT, ended("<|im_end|>\n", last="</think>\n\n"), id="prompts a thought"),
        pytest.param(SYSTEM_IN_LAST, ended("<|end|>", trim=False, lead=" "), id="moves the system prompt"),
        pytest.param(ENDS_ONCE, [*ended("")[:2], "They run.<|end|>"], id="ends only the last turn"),
        pytest.param(ALWAYS_PROMPTS, ended("<|im_end|>"), id="prompts after each conversation"),
        pytest.param(SPACED, ended(" ", trim=False, lead=" "), id="a space after the prompt"),
        pytest.param(IN_PARTS, ended("<|im_end|>", trim=False), id="contents in parts only"),
    ],
)
def test_all_turns_are_found(
    tokenizer_with: Callable[..., Any], template: str, expected: list[str], system: list[Any]
) -> None:
    if template is not ENDS_ONCE or not system:
        assert trained(tokenizer_with(template), [*system, *TALK]) == expected
    assert trained(tokenizer_with(template), [*system, *TALK[4:]]) == expected[2:]


def test_a_first_word_that_takes_a_space_of_its_prompt_is_trained(tokenizer_with: Callable[..., Any]) -> None:
    """` the` is one token: the space is written before the mark, but generated with the word."""
    talk = [TALK[0], {"role": "assistant", "content": "the sea"}]
    assert trained(tokenizer_with(MARKED_AFTER_SPACE), talk) == [" the sea "]


def test_what_is_rewritten_is_reported_once(
    tokenizer_with: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    chats = Chats(tokenizer=tokenizer_with(THINKS_LAST))
    with caplog.at_level(logging.INFO, "outsize"):
        chats.documents([Record(fields={"messages": TALK}, place=f"data.jsonl:{n}") for n in (1, 2)])
    (message,) = caplog.messages
    assert "renders earlier turns differently when more messages follow (message 2 of data.jsonl:1)" in message


def test_thoughts_that_are_removed_from_earlier_turns_are_not_trained(tokenizer_with: Callable[..., Any]) -> None:
    thinking = [
        {**message, "content": f"<think>Hm.</think>{message['content']}"} if message["role"] == "assistant" else message
        for message in TALK
    ]
    found = trained(tokenizer_with(PARSES_THOUGHTS), thinking)
    assert found == ["Not yet.<|im_end|>\n", "It rises.<|im_end|>\n", "<think>Hm.</think>They run.<|im_end|>\n"]


def test_thoughts_that_the_template_leaves_out_are_reported(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    trained(tokenizer, [TALK[0], {**TALK[1], "reasoning_content": "Hm."}])
    assert caplog.messages == ["the chat template does not render thoughts (in the last answer of data.jsonl:7)"]


def test_tool_calls_without_content_are_trained(tokenizer_with: Callable[..., Any]) -> None:
    talk = [
        TALK[0],
        {"role": "assistant", "tool_calls": [{"name": "look"}]},
        {"role": "tool", "content": "full"},
        TALK[1],
        TALK[4],
        {"role": "assistant", "content": "", "tool_calls": [{"name": "run"}]},
    ]
    assert trained(tokenizer_with(CALLS), talk) == [
        "<call>look</call><|im_end|>",
        "Not yet.<|im_end|>",
        "<call>run</call><|im_end|>",
    ]


def test_tool_calls_without_content_are_found_where_thoughts_are_removed(tokenizer_with: Callable[..., Any]) -> None:
    thinking = CALLS.replace("{% for call", THOUGHT.replace("loop.last", "loop.index > 3") + "{% for call")
    talk = [
        TALK[0],
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        {"role": "tool", "content": "full"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}, {"name": "run"}]},
        {"role": "tool", "content": "look"},
        TALK[1],
    ]
    calls = thinking.replace("call.name", "(call.function or call).name")
    assert trained(tokenizer_with(calls), talk) == [
        "<call>look</call><|im_end|>",
        "<think>\n\n</think>\n\n<call>look</call><call>run</call><|im_end|>",
        "Not yet.<think>\n\n</think>\n\n<|im_end|>",
    ]


@pytest.mark.parametrize("content", ["Hm.", None])
def test_a_template_without_tool_calls_is_refused(tokenizer: Any, content: str | None) -> None:
    talk = [TALK[0], {"role": "assistant", "content": content or "", "tool_calls": [{"name": "look"}]}, TALK[2]]
    with pytest.raises(DataError, match=r"data\.jsonl:7: .*does not render the tool calls of message 2"):
        trained(tokenizer, talk)


def test_a_conversation_that_the_assistant_begins_is_trained_from_its_content(tokenizer: Any) -> None:
    assert trained(tokenizer, TALK[1:4]) == ["Not yet.<|im_end|>\n", " It rises. <|im_end|>\n"]


def test_if_contents_are_changed_the_last_turn_is_trained(
    tokenizer_with: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    shouting = tokenizer_with(
        template("<|im_start|>{{ m.role }} {{ m.content | length }} {{ m.content }}<|im_end|>", prompt="<|im_start|>")
    )
    with caplog.at_level(logging.INFO, "outsize"):
        assert trained(shouting, TALK) == ["assistant 9 They run.<|im_end|>"]
    assert caplog.messages == [
        "only the last turn of data.jsonl:7 and others like it is trained: the template changes contents"
    ]
    with pytest.raises(DataError, match=r"data\.jsonl:7: .* because the template changes contents\. .*generation"):
        trained(shouting, TALK[:5])


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ("{{ m.role }}<|im_end|>", "does not render the content of message 2 as it is"),
        ("{{ m.content }}{{ m.content }}", "the content of message 1 is rendered twice"),
    ],
)
def test_a_template_without_the_answers_is_refused(tokenizer_with: Callable[..., Any], turn: str, told: str) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl:7: .*{told}\. .*chat_template_jinja"):
        trained(tokenizer_with(template(turn, prompt="assistant: ")), TALK)


def test_a_system_message_that_is_left_out_is_reported(
    tokenizer_with: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    deaf = tokenizer_with(template("{% if m.role != 'system' %}" + TURN + "{% endif %}", prompt=PROMPT))
    with caplog.at_level(logging.INFO, "outsize"):
        assert trained(deaf, [SYSTEM, *TALK[:2]]) == ["Not yet.<|im_end|>\n"]
    assert caplog.messages == ["the chat template does not render the system message of data.jsonl:7: it is left out"]


# --- any contents, also such that look like the template's own text


PIECES = (
    "a",
    "sun ",
    " ",
    "\n",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "[/INST]",
    "<think>",
    "</think>",
    "é😀",
    "<|",
)
CONTENTS = st.lists(st.sampled_from(PIECES), max_size=4).map("".join)


def rendered(name: str, contents: list[str]) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation and the spans of its answers. The first content is the system's."""
    text, spans = "", []
    for index, content in enumerate(contents):
        if name == "inst":
            if index == 0:
                continue
            system = contents[0] + "\n" if index == len(contents) - 2 else ""
            before, begin, after = ("", "", "<|end|>") if index % 2 == 0 else ("[INST] ", system, "[/INST]")
            content = f" {content}" if index % 2 == 0 else content
        else:
            before = f"<|im_start|>{('assistant' if index % 2 == 0 else 'user') if index else 'system'}\n"
            begin = "<think>\n\n</think>\n\n" if name == "think" and index == len(contents) - 1 else ""
            content, after = content.strip(), "<|im_end|>\n"
        text += before
        start = len(text)
        text += begin + content + after
        if index and index % 2 == 0:
            spans.append((start, len(text)))
    return text, spans


@given(
    name=st.sampled_from(["think", "inst"]),
    contents=st.integers(1, 3).flatmap(
        lambda turns: st.lists(CONTENTS, min_size=2 * turns + 1, max_size=2 * turns + 1)
    ),
)
def test_spans_are_right_or_refused_whatever_the_contents_are(name: str, contents: list[str]) -> None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    compiled = environment.from_string({"think": THINKS_LAST, "inst": SYSTEM_IN_LAST}[name])
    roles = ["system", *["user", "assistant"] * (len(contents) // 2)]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    text, spans = rendered(name, contents)
    answers = range(2, len(messages), 2)

    def render(messages: Any, prompt: bool = False) -> str:
        return compiled.render(messages=messages, add_generation_prompt=prompt)

    assert render(messages) == text
    try:
        assert locate(render, messages, text, answers, answers).spans == spans
    except UnlocatedError:
        assert not all(content.strip() for content in contents), "only without a content, turns are not found"
