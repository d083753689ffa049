"""What is trained of a conversation is what the assistant says, whichever way its template shows it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from outsize.base.errors import ConfigError, DataError
from outsize.config.run import DatasetConfig
from outsize.data.chat import Chats, messages_of
from outsize.data.files import Record
from outsize.data.rows import IGNORED, Document

SOURCE = DatasetConfig(path="data.jsonl")

TWO_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is the sea full?"},
    {"role": "assistant", "content": "Not yet. "},
    {"role": "user", "content": "And the sun é?"},
    {"role": "assistant", "content": " It rises. 😀"},
]


def record(messages: Any, column: str = "messages", **more: Any) -> Record:
    return Record(fields={column: messages, **more}, place="data.jsonl:7")


def document_of(tokenizer: Any, given: Record, *, train_on_inputs: bool = False, **source: Any) -> Document:
    chats = Chats(
        tokenizer=tokenizer, source=DatasetConfig(path="data.jsonl", **source), train_on_inputs=train_on_inputs
    )
    (document,) = chats.documents([given])
    return document


def trained(tokenizer: Any, messages: Any, **source: Any) -> list[str]:
    """The runs of tokens that have labels, as text."""
    document = document_of(tokenizer, record(messages), **source)
    runs: list[list[int]] = [[]]
    for token, label in zip(document.ids, document.labels, strict=True):
        assert label in (token, IGNORED)
        runs[-1].append(token) if label != IGNORED else runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_without_marks_the_assistants_turns_are_trained_to_their_end(
    tokenizer_with: Callable[..., Any], trim_offsets: bool
) -> None:
    assert trained(tokenizer_with(trim_offsets=trim_offsets), TWO_TURNS) == [
        "Not yet. <|im_end|>\n",
        " It rises. 😀<|im_end|>\n",
    ]


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_with_marks_exactly_what_is_marked_is_trained(
    tokenizer_with: Callable[..., Any], marked_template: str, trim_offsets: bool
) -> None:
    """Trimmed offsets have no character for the space at the end of a span: transformers' own mask would go on to the
    end of the conversation.
    """
    assert trained(tokenizer_with(marked_template, trim_offsets=trim_offsets), TWO_TURNS) == [
        "Not yet. ",
        " It rises. 😀",
    ]


def test_the_whole_is_tokenized_as_the_template_writes_it(tokenizer: Any) -> None:
    document = document_of(tokenizer, record(TWO_TURNS))
    assert document.ids == tokenizer.apply_chat_template(TWO_TURNS)["input_ids"]
    assert document.place == "data.jsonl:7"


def test_train_on_inputs_trains_every_token(tokenizer: Any) -> None:
    document = document_of(tokenizer, record(TWO_TURNS), train_on_inputs=True)
    assert document.labels == document.ids


def test_a_token_that_is_partly_the_prompts_is_not_trained(tokenizer_with: Callable[..., Any]) -> None:
    tokenizer = tokenizer_with("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    merged = " sea" if len(tokenizer.tokenize(" sea")) == 1 else pytest.fail("the tokenizer should know ' sea'")
    assert trained(
        tokenizer, [{"role": "user", "content": merged[:2]}, {"role": "assistant", "content": merged[2:] + "."}]
    ) == ["."]


def test_sharegpt_is_another_way_to_write_messages(tokenizer: Any) -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Is the sea full?"},
        {"from": "gpt", "value": "Not yet. "},
    ]
    assert messages_of(record(turns, "conversations"), SOURCE) == TWO_TURNS[:3]


def test_a_column_that_is_named_is_the_only_one_looked_at() -> None:
    both = Record(fields={"talk": TWO_TURNS[:1], "messages": TWO_TURNS}, place="data.jsonl:7")
    assert messages_of(both, replace(SOURCE, field_messages="talk")) == TWO_TURNS[:1]
    with pytest.raises(
        DataError, match=r"data\.jsonl:7: no column 'chat'; its columns are talk, messages\. .*`field_messages`"
    ):
        messages_of(both, replace(SOURCE, field_messages="chat"))


def test_keys_without_a_value_do_not_reach_the_template() -> None:
    """Parquet gives every message every key."""
    (message,) = messages_of(
        record([{"role": "assistant", "content": None, "tool_calls": [{"name": "sum"}], "name": None}]), SOURCE
    )
    assert message == {"role": "assistant", "tool_calls": [{"name": "sum"}]}


def test_tools_reach_the_template(tokenizer_with: Callable[..., Any]) -> None:
    tokenizer = tokenizer_with(
        "{{ tools[0]['name'] }}{% for m in messages %}{{ '|' + m['content'] }}{% endfor %}{% if add_generation_prompt "
        "%}|{% endif %}"
    )
    document = document_of(tokenizer, record(TWO_TURNS[1:3], tools=[{"name": "sum"}]))
    assert tokenizer.decode(document.ids) == "sum|Is the sea full?|Not yet. "


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_way_out(tokenizer_with: Callable[..., Any]) -> None:
    """As templates of reasoning models do: only the last turn keeps its thoughts."""
    thinking = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.last "
        "%}{{ '<think></think>' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% "
        "endif %}"
    )
    tokenizer = tokenizer_with(thinking)
    assert trained(tokenizer, TWO_TURNS[:3]) == ["<think></think>Not yet. <|im_end|>"]
    with pytest.raises(
        DataError,
        match=r"data\.jsonl:7: .* message 3 is rendered differently when more messages follow\. .*chat_template_jinja.*generation",
    ):
        trained(tokenizer, TWO_TURNS)


def test_a_template_whose_prompt_is_not_how_answers_begin_is_refused(tokenizer_with: Callable[..., Any]) -> None:
    tokenizer = tokenizer_with(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
    )
    with pytest.raises(DataError, match=r"data\.jsonl:7: .* message 3 is not rendered as a continuation"):
        trained(tokenizer, TWO_TURNS)


def test_a_conversation_that_the_assistant_begins_needs_marks(
    tokenizer: Any, tokenizer_with: Callable[..., Any], marked_template: str
) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl:7: .* begins with the assistant"):
        trained(tokenizer, TWO_TURNS[2:3])
    assert trained(tokenizer_with(marked_template), TWO_TURNS[2:3]) == ["Not yet. "]


def test_what_a_template_refuses_is_reported_with_its_words(tokenizer_with: Callable[..., Any]) -> None:
    tokenizer = tokenizer_with("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match=r"data\.jsonl:7: the chat template fails \(roles must alternate\)\. "):
        trained(tokenizer, TWO_TURNS)


def test_a_tokenizer_without_a_template_is_reported_with_the_key(tokenizer_with: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="chat_template_jinja"):
        trained(tokenizer_with(None), TWO_TURNS)


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([{"role": "narrator", "content": "x"}], r"message 1 of data\.jsonl:7: unknown role 'narrator'\. Use one of"),
        ([{"from": "bing", "value": "x"}], r"message 1 of data\.jsonl:7: unknown role 'bing'"),
        ([{"content": "x"}], r"message 1 of data\.jsonl:7: no role among content"),
        ([TWO_TURNS[0], {"role": "user"}], r"message 2 of data\.jsonl:7: no content among role"),
        ([{"role": "user", "content": 3}], r"message 1 of data\.jsonl:7: the content is a number, not text"),
        (["hello"], r"message 1 of data\.jsonl:7: text, not an object with role and content"),
        ("hello", r"data\.jsonl:7: text, not a list of messages"),
        ([], r"data\.jsonl:7: the list of messages is empty"),
    ],
)
def test_a_bad_message_is_reported_with_its_place(tokenizer: Any, messages: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        trained(tokenizer, messages)
