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
from outsize.data.templates import TEMPLATES

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


def test_a_template_whose_prompt_is_not_how_answers_begin_is_refused(tokenizer_with: Callable[..., Any]) -> None:
    tokenizer = tokenizer_with(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
    )
    with pytest.raises(DataError, match=r"data\.jsonl:7: .* message 3 is not rendered as a continuation"):
        trained(tokenizer, TWO_TURNS)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("turn", ["Not yet. <|im_end|>\n", " It rises. 😀<|im_end|>\n"]),
        ("none", ["Not yet. ", " It rises. 😀"]),
        ("last", ["Not yet. ", " It rises. 😀<|im_end|>\n"]),
        ("all", ["<|im_end|>", "<|im_end|>", "Not yet. <|im_end|>\n", "<|im_end|>", " It rises. 😀<|im_end|>\n"]),
    ],
)
def test_train_on_eos_says_which_ends_of_turns_are_trained(tokenizer: Any, mode: str, expected: list[str]) -> None:
    assert trained(tokenizer, TWO_TURNS, train_on_eos=mode) == expected


def test_a_marked_turn_can_be_trained_with_its_end(tokenizer_with: Callable[..., Any], marked_template: str) -> None:
    tokenizer = tokenizer_with(marked_template)
    assert trained(tokenizer, TWO_TURNS, train_on_eos="turn") == ["Not yet. <|im_end|>", " It rises. 😀<|im_end|>"]


def test_roles_to_train_names_whose_turns_are_trained(tokenizer: Any) -> None:
    """Of others than the assistant, the content: what comes before and after is the template's."""
    assert trained(tokenizer, TWO_TURNS, roles_to_train=("user",)) == ["Is the sea full?", "And the sun é?"]
    both = trained(tokenizer, TWO_TURNS, roles_to_train=("human", "gpt"))
    assert both == ["Is the sea full?", "Not yet. <|im_end|>\n", "And the sun é?", " It rises. 😀<|im_end|>\n"]


def test_a_message_can_say_whether_it_is_trained(tokenizer: Any) -> None:
    messages = [dict(message) for message in TWO_TURNS]
    messages[1]["train"], messages[2]["train"] = True, False
    found = trained(tokenizer, messages, message_field_training="train")
    assert found == ["Is the sea full?", " It rises. 😀<|im_end|>\n"]


def test_other_names_of_keys_and_roles_are_mapped(tokenizer: Any) -> None:
    talk = [{"who": "asker", "says": "Is the sea full?"}, {"who": "gpt", "says": "Not yet.", "why": "Rivers."}]
    source = replace(
        SOURCE,
        message_property_mappings={"role": "who", "content": "says"},
        roles={"user": ("asker",)},
        field_thinking="why",
    )
    older = replace(source, message_property_mappings=None, message_field_role="who", message_field_content="says")
    expected = [
        {"role": "user", "content": "Is the sea full?"},
        {"role": "assistant", "content": "Not yet.", "reasoning_content": "Rivers."},
    ]
    assert messages_of(record(talk), source) == messages_of(record(talk), older) == expected


def test_the_system_message_can_be_dropped(tokenizer: Any) -> None:
    document = document_of(tokenizer, record(TWO_TURNS), drop_system_message=True)
    assert document.ids == tokenizer.apply_chat_template(TWO_TURNS[1:])["input_ids"]


def test_a_chat_template_is_taken_by_name(tokenizer_with: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    named, own = ["Not yet.<|im_end|>\n", "It rises. 😀<|im_end|>\n"], trained(tokenizer_with(), TWO_TURNS)
    assert own != named
    for name in ("chatml", "tokenizer_default_fallback_chatml"):
        assert trained(tokenizer_with(None), TWO_TURNS, chat_template=name) == named
    assert trained(tokenizer_with(), TWO_TURNS, chat_template="chatml") == named
    for name in ("tokenizer_default", "tokenizer_default_fallback_chatml"):
        assert trained(tokenizer_with(), TWO_TURNS, chat_template=name) == own
    assert not caplog.messages
    assert trained(tokenizer_with(), TWO_TURNS, chat_template="qwen3") == own
    assert [message for message in caplog.messages if "chat_template: qwen3 is not among chatml" in message]
    with pytest.raises(ConfigError, match=r"chat_template: qwen3 is not among chatml, .*chat_template_jinja"):
        trained(tokenizer_with(None), TWO_TURNS, chat_template="qwen3")


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_named_templates_begin_answers_as_they_prompt_them(tokenizer_with: Callable[..., Any], name: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[name])
    tokenizer.bos_token = "<|end|>"
    asked = tokenizer.apply_chat_template(TWO_TURNS[:2], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(TWO_TURNS[:3], tokenize=False)
    (turn,) = trained(tokenizer, TWO_TURNS[:3])
    assert whole == asked + turn and turn.startswith("Not yet.<")


def test_tools_may_be_json(tokenizer_with: Callable[..., Any]) -> None:
    tokenizer = tokenizer_with("{{ tools[0]['name'] }}{% for m in messages %}{{ '|' + m['content'] }}{% endfor %}")
    document = document_of(tokenizer, record(TWO_TURNS[1:3], tools='[{"name": "sum"}]'), train_on_inputs=True)
    assert tokenizer.decode(document.ids) == "sum|Is the sea full?|Not yet. "
    with pytest.raises(DataError, match=r"data\.jsonl:7: tools is not valid JSON"):
        document_of(tokenizer, record(TWO_TURNS[1:3], tools="[{"))


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
        (
            [{"content": "x"}],
            r"message 1 of data\.jsonl:7: no role among content\. .*`message_property_mappings: \{role: …\}`",
        ),
        ([TWO_TURNS[0], {"role": "user"}], r"message 2 of data\.jsonl:7: no content among role"),
        (
            [{"from": "human", "valeu": "x"}],
            r"no content among from, valeu\. .*`message_property_mappings: \{content: …\}`",
        ),
        ([{"role": "user", "content": 3}], r"message 1 of data\.jsonl:7: the content is a number, not text"),
        (["hello"], r"message 1 of data\.jsonl:7: text, not an object with role and content"),
        ("hello", r"data\.jsonl:7: 'messages' is text, not a list of messages"),
        ([], r"data\.jsonl:7: 'messages' is an empty list"),
    ],
)
def test_a_bad_message_is_reported_with_its_place(tokenizer: Any, messages: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        trained(tokenizer, messages)
