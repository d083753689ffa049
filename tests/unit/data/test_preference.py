"""Preference pairs: what a row becomes for TRL's DPOTrainer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize.base.errors import DataError
from outsize.config.run import DatasetConfig
from outsize.data.preference import preference_rows

ASKED = {"role": "user", "content": "Full?"}
NO, YES = ({"role": "assistant", "content": text} for text in ("No.", "Yes."))


@pytest.fixture
def rows(write_jsonl: Callable[..., Path]) -> Callable[..., list[dict[str, Any]]]:
    return lambda *records, **source: preference_rows(DatasetConfig(path=str(write_jsonl(*records)), **source))


@pytest.mark.parametrize(
    ("record", "row"),
    [
        pytest.param(
            {"id": 7, "prompt": "Full?", "chosen": "No.", "rejected": "Yes."},
            {"prompt": "Full?", "chosen": "No.", "rejected": "Yes."},
            id="texts",
        ),
        pytest.param(
            {"prompt": None, "chosen": "Full? No.", "rejected": "Full? Yes."},
            {"chosen": "Full? No.", "rejected": "Full? Yes."},
            id="texts without a prompt",
        ),
        pytest.param(
            {"prompt": [ASKED], "chosen": [NO], "rejected": [YES]},
            {"prompt": [ASKED], "chosen": [NO], "rejected": [YES]},
            id="messages",
        ),
        pytest.param(
            {"prompt": "Full?", "chosen": [ASKED, NO], "rejected": [ASKED, YES]},
            {"chosen": [ASKED, NO], "rejected": [ASKED, YES]},
            id="the prompt twice",
        ),
        pytest.param(
            {"prompt": "Full?", "chosen": NO, "rejected": {"from": "gpt", "value": "Yes."}},
            {"prompt": [ASKED], "chosen": [NO], "rejected": [YES]},
            id="one message each",
        ),
    ],
)
def test_a_pair_is_texts_or_messages(rows: Callable[..., Any], record: dict[str, Any], row: dict[str, Any]) -> None:
    assert rows(record) == [row]


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"chosen": "No."}, r"data\.jsonl:1: no column 'rejected'"),
        ({"chosen": "No.", "rejected": [YES]}, r"data\.jsonl:1: one of chosen and rejected is text"),
        ({"prompt": [ASKED], "chosen": "No.", "rejected": "Yes."}, r"data\.jsonl:1: the prompt has messages"),
        ({"chosen": 1, "rejected": 2}, r"data\.jsonl:1: 'chosen' is a number, not text or messages"),
        ({"chosen": [{"role": "x"}], "rejected": [YES]}, r"message 1 of 'chosen' of .*data\.jsonl:1: unknown role 'x'"),
    ],
)
def test_a_row_that_is_no_pair_is_named(rows: Callable[..., Any], record: dict[str, Any], told: str) -> None:
    with pytest.raises(DataError, match=told):
        rows(record)
