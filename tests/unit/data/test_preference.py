"""Preference pairs: the pair of a record in every format, its tokens and labels, and which pairs are kept."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from outsize.base.errors import ConfigError, DataError
from outsize.config.run import DatasetConfig
from outsize.config.types import PAIR_TYPES
from outsize.data.files import Record
from outsize.data.preference import load_pairs, pair_of, trl_columns
from outsize.data.rows import IGNORED, Rows

ASKED = {"role": "user", "content": "Full?"}
SYSTEM = {"role": "system", "content": "Be brief."}
NO, YES = ({"role": "assistant", "content": text} for text in ("No.", "Yes."))
MESSAGES = {"prompt": [ASKED], "chosen": [NO], "rejected": [YES]}
CHATML = {
    "prompt": "<|im_start|>user\nFull?<|im_end|>\n<|im_start|>assistant\n",
    "chosen": "No.<|im_end|>",
    "rejected": "Yes.<|im_end|>",
}
LLAMA3 = {
    "prompt": "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nFull?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "chosen": "No.<|eot_id|>",
    "rejected": "Yes.<|eot_id|>",
}
TEXTS = {"chosen": "No.", "rejected": "Yes."}


def pair(record: dict[str, Any], **source: Any) -> Any:
    return pair_of(Record(fields=record, place="data.jsonl:1"), DatasetConfig(path="-", **source))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"id": 7, "prompt": "Full?", **TEXTS}, {"prompt": "Full?", **TEXTS}),
        ({"prompt": None, "chosen": "Full? No.", "rejected": "Full? Yes."}, {"prompt": "Full?", "chosen": " No.", "rejected": " Yes."}),
        ({"chosen": "Full?ab", "rejected": "Full?abc"}, {"prompt": "Full?a", "chosen": "b", "rejected": "bc"}),
        ({"prompt": [ASKED], "chosen": [NO], "rejected": [YES]}, MESSAGES),
        ({"prompt": "Full?", "chosen": [ASKED, NO], "rejected": [ASKED, YES]}, MESSAGES),
        ({"prompt": "Full?", "chosen": NO, "rejected": {"from": "gpt", "value": "Yes."}}, MESSAGES),
        ({"question": "x", "chosen": [ASKED, NO], "rejected": [ASKED, YES]}, MESSAGES),
    ],
)  # fmt: skip
def test_columns_are_a_pair_of_texts_or_of_messages(record: dict[str, Any], expected: dict[str, Any]) -> None:
    assert pair(record) == expected


FORMATS: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    ("chat_template.default", {"messages": [ASKED], "chosen": NO, "rejected": YES}, MESSAGES),
    ("chat_template", {"messages": "Full?", "chosen": "No.", "rejected": [ASKED, YES]}, MESSAGES),
    ("chat_template.argilla_chat", {"prompt": "x", "chosen": [ASKED, NO], "rejected": [ASKED, YES]}, MESSAGES),
    ("chatml.default", {"question": "Full?", "chosen_response": "No.", "rejected_response": "Yes."}, CHATML),
    ("chatml.icr", {"prompt": "x", "input": "Full?", **TEXTS}, CHATML),
    ("chatml.intel", {"prompt": "x", "question": "Full?", "system": "", **TEXTS}, CHATML),
    ("chatml.prompt_pairs", {"prompt": "Full?", **TEXTS}, CHATML),
    ("chatml.ultra", {"prompt": "Full?", "chosen": [ASKED, NO], "rejected": [ASKED, YES]}, CHATML),
    ("chatml.argilla_chat", {"chosen": [ASKED, NO], "rejected": [ASKED, YES]}, CHATML),
    ("llama3.icr", {"system": "Be brief.", "input": "Full?", **TEXTS}, LLAMA3),
]


@pytest.mark.parametrize(("kind", "record", "expected"), FORMATS)
def test_a_format_of_axolotl_gives_the_pair(kind: str, record: dict[str, Any], expected: dict[str, Any]) -> None:
    assert pair(record, type=kind) == expected
    assert kind in PAIR_TYPES or kind.startswith("chat_template")


def test_columns_roles_and_formats_can_be_named() -> None:
    talk = {
        "talk": [{"who": "asker", "says": "Full?"}],
        "good": {"who": "bot", "says": "No."},
        "bad": {"who": "bot", "says": "Yes."},
    }
    names = dict(
        field_messages="talk",
        field_chosen="good",
        field_rejected="bad",
        message_property_mappings={"role": "who", "content": "says"},
        roles={"user": ("asker",), "assistant": ("bot",)},
    )
    assert pair(talk, type="chat_template.default", **names) == MESSAGES
    own = {
        "field_prompt": "q",
        "field_rejected": "bad",
        "prompt_format": "{system}[{prompt}]",
        "chosen_format": "{chosen}!",
    }
    row = {"q": "Full?", "chosen": "No", "bad": "{system}", "system": "S"}
    assert pair(row, prompt=own) == {"prompt": "S[Full?]", "chosen": "No!", "rejected": "{system}"}


@pytest.mark.parametrize(
    ("record", "kind", "told"),
    [
        ({"chosen": "No."}, None, r"data\.jsonl:1: no column 'rejected'.* Set `field_rejected`"),
        ({"messages": [ASKED, NO]}, None, r"data\.jsonl:1: rl: dpo needs pairs of answers, .*; the columns are messages\. Name"),
        ({"chosen": "No.", "rejected": [YES]}, None, r"data\.jsonl:1: one of chosen and rejected is text"),
        ({"prompt": [ASKED], **TEXTS}, None, r"data\.jsonl:1: the prompt has messages"),
        ({"question": "Full?", **TEXTS}, None, r"data\.jsonl:1: without `type`, the column 'question' is not used"),
        ({"messages": [ASKED], "chosen": NO, "rejected": YES}, None, r"the column 'messages' is not used"),
        ({"system": "Be brief.", "prompt": "Full?", **TEXTS}, None, r"the column 'system' is not used"),
        ({"chosen": 1, "rejected": 2}, None, r"data\.jsonl:1: 'chosen' is a number, not text or messages"),
        ({"chosen": [{"role": "x"}], "rejected": [YES]}, None, r"message 1 of 'chosen' of data\.jsonl:1: unknown role 'x'"),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}], "chosen": [NO], "rejected": [YES]}, None, r"'prompt' has other contents"),
        ({"prompt": "Full?", "images": ["a.png"], **TEXTS}, None, r"takes text alone, but 'images' has images"),
        ({"chosen": [ASKED, NO], "rejected": [SYSTEM, YES]}, "chat_template.argilla_chat", r"conversations differ before"),
        ({"prompt": "Full?", "chosen": [ASKED, NO, ASKED, NO], "rejected": [ASKED, YES]}, "chatml.ultra", r"\(4 messages\). Use type: chat_template\.argilla_chat"),
    ],
)  # fmt: skip
def test_a_record_that_is_no_pair_is_named(record: dict[str, Any], kind: str | None, told: str) -> None:
    with pytest.raises(DataError, match=told):
        pair(record, type=kind)


# Tokens.


def shown(rows: Rows, tokenizer: Any) -> list[str]:
    """Each row, its tokens with a label between ⟦ and ⟧."""
    texts = []
    for row in (rows[number] for number in range(len(rows))):
        text = ""
        pairs = zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True)
        assert all(label in (IGNORED, token) for token, label in pairs)
        pairs = zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True)
        for is_trained, tokens in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
            part = tokenizer.decode([token for token, _ in tokens])
            text += f"⟦{part}⟧" if is_trained else part
        texts.append(text)
    return texts


@pytest.fixture
def load(write_jsonl: Callable[..., Path], tokenizer: Any) -> Callable[..., Any]:
    def read(*records: Any, source: dict[str, Any] | None = None, **how: Any) -> Any:
        dataset = DatasetConfig(path=str(write_jsonl(*records)), **(source or {}))
        return load_pairs(tokenizer, [dataset], **{"sequence_len": 64, **how})

    return read


PROMPT = "<|im_start|>user\nFull?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("record", "kind", "rows"),
    [
        (MESSAGES, None, [PROMPT + "⟦No.<|im_end|>\n⟧", PROMPT + "⟦Yes.<|im_end|>\n⟧"]),
        ({"prompt": "Full?", **TEXTS}, None, ["Full?⟦No.<|end|>⟧", "Full?⟦Yes.<|end|>⟧"]),
        ({"input": "Full?", **TEXTS}, "chatml.icr", [PROMPT + "⟦No.<|im_end|><|end|>⟧", PROMPT + "⟦Yes.<|im_end|><|end|>⟧"]),
    ],
)  # fmt: skip
def test_the_answers_have_labels(
    load: Callable[..., Any], tokenizer: Any, record: dict[str, Any], kind: str | None, rows: list[str]
) -> None:
    train, evaluated = load(record, source={"type": kind})
    assert shown(train, tokenizer) == rows and evaluated is None
    columns = {name: [tokenizer.decode(ids) for ids in parts] for name, parts in trl_columns(train).items()}
    prompt, chosen, rejected = (columns[name][0] for name in ("prompt_ids", "chosen_ids", "rejected_ids"))
    assert [f"{prompt}⟦{answer}⟧" for answer in (chosen, rejected)] == rows


def test_long_pairs_are_dropped_cut_or_refused(load: Callable[..., Any], tokenizer: Any, caplog: Any) -> None:
    long = {"prompt": "Full?", "chosen": "No.", "rejected": "a" * 80}
    only_prompt = {"prompt": "a" * 80, **TEXTS}
    short = {"prompt": "Full?", **TEXTS}
    rows = ["Full?⟦No.<|end|>⟧", "Full?⟦Yes.<|end|>⟧"]
    assert shown(load(long, only_prompt, short)[0], tokenizer) == rows
    assert "2 of 3 pairs have an answer that is too long or empty and are dropped" in caplog.text
    cut = shown(load(long, only_prompt, short, excess_length_strategy="truncate")[0], tokenizer)
    assert cut[0] == rows[0] and cut[1].startswith("Full?⟦aaaa") and not cut[1].endswith("<|end|>⟧") and cut[2:] == rows
    with pytest.raises(DataError, match=r"longer than sequence_len \(64\)"):
        load(long, excess_length_strategy="raise")
    with pytest.raises(DataError, match=r"none of the 1 pairs has two answers within sequence_len \(64\)"):
        load(only_prompt)


def test_pairs_stay_together_when_they_are_split_off_or_deduplicated(load: Callable[..., Any], tokenizer: Any) -> None:
    records = [{"prompt": f"{n % 6}?", "chosen": f"{n % 6}+", "rejected": f"{n % 6}-"} for n in range(9)]
    fingerprints: list[str] = []
    train, evaluated = load(*records, val_set_size=2, deduplicate=True, fingerprints=fingerprints)
    found = [shown(rows, tokenizer) for rows in (train, evaluated)]
    assert [len(texts) for texts in found] == [8, 4] and len(fingerprints) == 1
    for texts in found:
        for chosen, rejected in zip(texts[::2], texts[1::2], strict=True):
            assert (chosen[0], chosen[3:5], rejected[3:5]) == (rejected[0], f"{chosen[0]}+", f"{chosen[0]}-")


def test_a_template_that_rewrites_the_prompt_is_refused(write_jsonl: Callable[..., Path], tokenizer_with: Any) -> None:
    counting = (
        "{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    source = DatasetConfig(path=str(write_jsonl(MESSAGES)))
    with pytest.raises(DataError, match=r"renders the prompt differently when an answer follows"):
        load_pairs(tokenizer_with(counting), [source], sequence_len=64)


def test_a_text_ends_with_eos_which_the_tokenizer_must_have(
    write_jsonl: Callable[..., Path], tokenizer_with: Any
) -> None:
    source = DatasetConfig(path=str(write_jsonl({"prompt": "Full?", **TEXTS})))
    with pytest.raises(ConfigError, match=r"rl: dpo: the tokenizer has no eos token"):
        load_pairs(tokenizer_with(eos=False), [source], sequence_len=64)
