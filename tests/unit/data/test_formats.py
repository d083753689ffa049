"""Each format, token by token: what is trained of a row, and which format a dataset without `type` has."""

import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from outsize.base.errors import DataError
from outsize.config.read import parse_config
from outsize.config.run import DatasetConfig
from outsize.config.types import TextType
from outsize.data.build import load_rows
from outsize.data.files import Record
from outsize.data.formats import FORMATS, INSTRUCTION, UNKNOWN_PROMPT, prompt_of
from outsize.data.rows import IGNORED

ALPACA = {"instruction": "Is the sea full?", "input": "", "output": "Not yet."}
WITH_INPUT = {"instruction": "Go on.", "input": "The sun", "output": "rises."}
WITH_SYSTEM = {**ALPACA, "system": "Be brief."}
BARE = "Below is an instruction that describes a task. Write a response that appropriately completes the request."
PAIRED = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request."
)
QUESTION, ANSWER = {"role": "user", "content": "Is it full?"}, {"role": "assistant", "content": "No."}


@pytest.fixture
def parts(tokenizer: Any, write_jsonl: Callable[..., Path]) -> Callable[..., list[tuple[bool, str]]]:
    """Runs of tokens with the same answer to whether they are trained, as text. `dataset`: its keys in YAML."""

    def parts(record: dict[str, Any], **dataset: Any) -> list[tuple[bool, str]]:
        train_on_inputs = dataset.pop("train_on_inputs", False)
        given = {"base_model": "m", "datasets": [{"path": str(write_jsonl(record)), **dataset}]}
        rows, _ = load_rows(
            tokenizer,
            parse_config(given, "run.yaml").datasets,
            sequence_len=512,
            pad_id=0,
            train_on_inputs=train_on_inputs,
        )
        (row,) = rows
        runs: list[tuple[bool, list[int]]] = []
        for token, label in zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True):
            assert label in (token, IGNORED)
            if not runs or runs[-1][0] != (label != IGNORED):
                runs.append((label != IGNORED, []))
            runs[-1][1].append(token)
        return [(is_trained, tokenizer.decode(ids)) for is_trained, ids in runs]

    return parts


def pair(prompt: str, answer: str) -> list[tuple[bool, str]]:
    return [(False, prompt), (True, answer + "<|end|>")]


@pytest.mark.parametrize(
    ("kind", "record", "prompt"),
    [
        (None, ALPACA, f"{BARE}\n\n### Instruction:\nIs the sea full?\n\n### Response:\n"),
        (None, WITH_INPUT, f"{PAIRED}\n\n### Instruction:\nGo on.\n\n### Input:\nThe sun\n\n### Response:\n"),
        ("alpaca:chat", ALPACA, f"SYSTEM: {BARE}\nUSER: Is the sea full?\nASSISTANT:"),
        ("alpaca_chat", WITH_INPUT, f"SYSTEM: {PAIRED}\nUSER: Go on.\nThe sun\nASSISTANT:"),
        ("alpaca_chat.load_no_prompt", ALPACA, "USER: Is the sea full?\nASSISTANT:"),
        ("alpaca_instruct.load_no_prompt", ALPACA, "### Instruction:\nIs the sea full?\n\n### Response:\n"),
        (
            "alpaca:chatml",
            ALPACA,
            f"<|im_start|>system\n{BARE}<|im_end|>\n<|im_start|>user\nIs the sea full?<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("alpaca:phi", ALPACA, f"<|system|>\n{BARE}<|end|>\n<|user|>\nIs the sea full?<|end|>\n<|assistant|>\n"),
        ("alpaca_w_system", WITH_SYSTEM, "SYSTEM: Be brief.\nUSER: Is the sea full?\nASSISTANT:"),
        (
            "alpaca_w_system.load_instruct",
            WITH_SYSTEM,
            "Be brief.\n\n### Instruction:\nIs the sea full?\n\n### Response:\n",
        ),
        ("alpaca_w_system.load_instruct", ALPACA, "### Instruction:\nIs the sea full?\n\n### Response:\n"),
    ],
)
def test_instructions_are_prompts_and_the_output_is_trained(
    parts: Callable[..., Any], kind: str | None, record: dict[str, str], prompt: str
) -> None:
    assert parts(record, type=kind) == pair(prompt, record["output"])


def test_other_columns_of_instructions(parts: Callable[..., Any]) -> None:
    orca = {"system_prompt": "Be brief.", "question": "Full?", "response": "No."}
    prompt = "### System:\nBe brief.\n### Human:\nFull?\n### Assistant:\n"
    assert parts(orca, type="alpaca_w_system.load_open_orca") == pair(prompt, "No.")
    teacher = {"instruction": "Full?", "response": "No."}
    assert parts(teacher, type="gpteacher") == pair(f"{BARE}\n\n### Instruction:\nFull?\n\n### Response:\n", "No.")


def test_a_prompt_of_ones_own(parts: Callable[..., Any]) -> None:
    own = {
        "field_instruction": "question",
        "field_output": "answer",
        "format": "Q: {instruction} ({input}) {x}\nA:",
        "no_input_format": "Q: {instruction} {x}\nA:",
        "system_prompt": "Brief.",
        "system_format": "{system}\n",
    }
    record = {"question": "Is {it} full?", "answer": " No."}
    assert parts(record, type=own) == pair("Brief.\nQ: Is {it} full? {x}\nA:", " No.")
    assert parts({**record, "input": "the sea", "system": "Slow."}, type=own) == pair(
        "Slow.\nQ: Is {it} full? (the sea) {x}\nA:", " No."
    )
    bare = {"field_instruction": "question", "field_output": "answer"}
    assert parts({"question": "Full?", "answer": "No."}, type=bare) == pair("Full? ", "No.")


def test_train_on_inputs_trains_the_prompt_too(parts: Callable[..., Any]) -> None:
    (run,) = parts(ALPACA, type="alpaca_chat.load_no_prompt", train_on_inputs=True)
    assert run == (True, "USER: Is the sea full?\nASSISTANT:Not yet.<|end|>")


def test_the_completion_of_a_prompt_is_trained(parts: Callable[..., Any]) -> None:
    assert parts({"prompt": "The sun", "completion": " rises."}) == pair("The sun", " rises.")


def test_a_completion_may_be_messages(parts: Callable[..., Any]) -> None:
    asked, answered = "<|im_start|>user\nIs it full?<|im_end|>\n<|im_start|>assistant\n", "No.<|im_end|>\n"
    assert parts({"prompt": [QUESTION], "completion": [ANSWER]}) == [(False, asked), (True, answered)]
    history = {"prompt": [QUESTION, ANSWER, QUESTION], "completion": [ANSWER]}
    assert parts(history) == [(False, asked + answered + asked), (True, answered)]


def test_segments_are_trained_as_labelled_and_nothing_is_added(parts: Callable[..., Any]) -> None:
    segments = [
        {"label": False, "text": "Is it full?\n"},
        {"label": True, "text": "No.<|end|>"},
        {"label": False, "text": "\nWhy?\n"},
        {"label": True, "text": "Rivers."},
    ]
    assert parts({"segments": segments}) == [(part["label"], part["text"]) for part in segments]


@pytest.mark.parametrize("kind", ["completion", "pretrain"])
def test_plain_text_is_trained_whole(parts: Callable[..., Any], kind: str) -> None:
    assert parts({"body": "The sun rises."}, type=kind, field="body") == [(True, "The sun rises.<|end|>")]


@pytest.mark.parametrize("kind", [None, "sharegpt", "chat_template", "chat_template.default"])
def test_sharegpt_conversations(parts: Callable[..., Any], kind: str | None) -> None:
    record = {"conversations": [{"from": "human", "value": "Is it full?"}, {"from": "gpt", "value": "No."}]}
    prompt = "<|im_start|>user\nIs it full?<|im_end|>\n<|im_start|>assistant\n"
    assert parts(record, type=kind) == [(False, prompt), (True, "No.<|im_end|>\n")]


def test_special_tokens_that_the_tokenizer_adds_are_not_doubled(
    tokenizer_with: Callable[..., Any], write_jsonl: Callable[..., Path]
) -> None:
    tokenizer = tokenizer_with()
    begin, end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|end|>"))
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|end|>", special_tokens=[("<|im_start|>", begin), ("<|end|>", end)]
    )
    for prompt in ("The sun", ""):
        path = write_jsonl({"prompt": prompt, "completion": " rises."})
        ((row,), _) = load_rows(tokenizer, [DatasetConfig(path=str(path))], sequence_len=64, pad_id=0)
        assert tokenizer.decode(row["input_ids"]) == f"<|im_start|>{prompt} rises.<|end|>"
        assert tokenizer.decode(row["labels"][row["labels"] != IGNORED]) == " rises.<|end|>"


def test_a_token_of_prompt_and_output_is_not_trained(parts: Callable[..., Any]) -> None:
    """` sea` is one token, as at inference it would not be. A space at the end of the prompt is no loss."""
    assert parts({"prompt": "the se", "completion": "a is full"}) == pair("the sea", " is full")
    assert parts({"prompt": "the ", "completion": "sea"}) == pair("the", " sea")


# --- without type


def test_the_names_in_the_config_are_those_of_the_registry() -> None:
    assert set(typing.get_args(TextType)) == set(FORMATS)


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (
            {**ALPACA, "text": "x"},
            r"\(instruction, input, output, text\) fit several formats\. Add `type: completion` or `type: alpaca`",
        ),
        (WITH_SYSTEM, r"fit no format\. They look like `type: alpaca_w_system`: add it"),
        ({"instruction": "x", "response": "y"}, "They look like `type: gpteacher`"),
        (
            {"id": "7", "question": "x", "answer": "y"},
            r"'question' and 'answer' look like .*: add `type: \{field_instruction: question, field_output: answer\}`",
        ),
        (
            {"question": "x", "long_answer": "y"},
            r"'question' and 'long_answer' look like .*field_instruction: question, field_output: long_answer\}",
        ),
        (
            {"text_a": "x", "text_b": "y"},
            r"`field: …` \(text\), `field_messages: …` .* or `type: \{field_instruction: …",
        ),
        (
            {"instuction": "x", "input": "", "output": "y"},
            "'instuction' is near 'instruction' of `type: alpaca`: rename the column",
        ),
        ({"Prompt": "x", "completion": "y"}, "'Prompt' is near 'prompt' of `type: prompt_completion`: rename"),
        ({"talk": [QUESTION]}, "'talk' looks like a conversation: add `field_messages: talk`"),
        (
            {"talk": [{"who": "x", "says": "y"}]},
            r"with the keys who, says: add `field_messages: talk` and `message_property_mappings: \{role",
        ),
        ({"body": "x", "id": 3}, "'body' looks like text: add `field: body`"),
        ({"chosen": "x", "rejected": "y", "prompt": "z"}, r"preference pairs: add `rl: dpo` to the run file"),
    ],
)
def test_the_columns_say_which_line_is_missing(parts: Callable[..., Any], record: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=rf"data\.jsonl:1: its columns .*{told}"):
        parts(record)


@pytest.mark.parametrize(
    ("record", "kind", "told"),
    [
        ({"instruction": "x", "output": None}, "alpaca", "data.jsonl:1: 'output' is null, not text"),
        ({"instruction": "x", "input": 3, "output": "y"}, "alpaca", "data.jsonl:1: 'input' is a number, not text"),
        ({"instruction": "x"}, "alpaca", "data.jsonl:1: no column 'output'; its columns are instruction"),
        ({"segments": [{"text": "x"}]}, "input_output", "data.jsonl:1: 'segments' is not a list of objects"),
        ({"prompt": "x", "completion": [ANSWER]}, None, "data.jsonl:1: 'prompt' is text, not messages"),
    ],
)
def test_a_row_that_does_not_fit_is_named(
    parts: Callable[..., Any], record: dict[str, Any], kind: str | None, told: str
) -> None:
    with pytest.raises(DataError) as caught:
        parts(record, type=kind)
    assert told in str(caught.value)


def test_slow_tokenizers_are_refused_where_offsets_are_needed(write_jsonl: Callable[..., Path]) -> None:
    class Slow:
        is_fast = False

    source = DatasetConfig(path=str(write_jsonl(ALPACA)))
    with pytest.raises(Exception, match="Slow does not report character offsets"):
        load_rows(Slow(), [source], sequence_len=64, pad_id=0)


@pytest.mark.parametrize(
    ("record", "keys", "prompt"),
    [
        (ALPACA, {}, f"{BARE}\n\n### Instruction:\n{{instruction}}\n\n### Response:\n"),
        (
            ALPACA,
            {"type": "alpaca:chatml"},
            f"<|im_start|>system\n{BARE}<|im_end|>\n<|im_start|>user\n{{instruction}}<|im_end|>\n<|im_start|>assistant\n",
        ),
        (WITH_SYSTEM, {"type": "alpaca_w_system"}, "USER: {instruction}\nASSISTANT:"),
        (
            {"q": "a", "a": "b"},
            {
                "type": {
                    "field_instruction": "q",
                    "field_output": "a",
                    "format": "Q: {instruction}\nA: ",
                    "no_input_format": "Q: {instruction}\nA: ",
                }
            },
            "Q: {instruction}\nA: ",
        ),
        ({"prompt": "a", "completion": "b"}, {}, INSTRUCTION),
        ({"prompt": [QUESTION], "completion": [ANSWER]}, {}, None),
        ({"messages": [QUESTION, ANSWER]}, {}, None),
        ({"messages": [QUESTION, ANSWER]}, {"chat_template": "chatml"}, UNKNOWN_PROMPT),
        ({"text": "a"}, {}, INSTRUCTION),
    ],
)
def test_the_prompt_that_answers_are_trained_after(
    record: dict[str, Any], keys: dict[str, Any], prompt: str | None
) -> None:
    given = {"base_model": "m", "datasets": [{"path": "-", **keys}]}
    (source,) = parse_config(given, "run.yaml").datasets
    assert prompt_of(Record(fields=record, place="-"), source) == prompt


def test_a_type_that_does_not_fit_the_columns_names_the_one_that_does() -> None:
    given = {"base_model": "m", "datasets": [{"path": "-", "type": "chat_template"}]}
    (source,) = parse_config(given, "run.yaml").datasets
    with pytest.raises(DataError, match=r"are not those of type: chat_template\. Use type: alpaca\."):
        prompt_of(Record(fields=ALPACA, place="-"), source)
