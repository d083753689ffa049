"""From files to rows: the parts in their order, and what no part alone can tell."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outsize.base.errors import ConfigError, DataError
from outsize.config.run import DatasetConfig
from outsize.data.build import load_rows
from outsize.data.packing import PackedRows
from outsize.data.rows import IGNORED, Rows

QUESTION, ANSWER = {"role": "user", "content": "Is the sea full?"}, {"role": "assistant", "content": "Not yet."}
TEXTS = [{"text": f"The sun rises and the sun sets, {number} times."} for number in range(20)]


def load(tokenizer: Any, *paths: Path, sequence_len: int = 64, **options: Any) -> tuple[Any, Any]:
    return load_rows(
        tokenizer,
        [DatasetConfig(path=str(path)) for path in paths],
        sequence_len=sequence_len,
        pad_id=tokenizer.pad_token_id,
        **options,
    )


def test_the_first_record_says_what_kind_a_dataset_is(tokenizer: Any, write_jsonl: Callable[..., Path]) -> None:
    chat = write_jsonl({"messages": [QUESTION, ANSWER]}, name="chat.jsonl")
    share = write_jsonl(
        {"conversations": [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "No."}]}, name="share.jsonl"
    )
    text = write_jsonl({"text": "The sun rises."}, name="text.jsonl")
    rows, validation = load(tokenizer, chat, share, text)
    assert isinstance(rows, Rows) and validation is None
    trained = [tokenizer.decode(row["labels"][row["labels"] != IGNORED]) for row in rows]
    assert trained == ["Not yet.<|im_end|>\n", "No.<|im_end|>\n", "The sun rises.<|end|>"]


def test_a_type_that_is_given_is_not_guessed(tokenizer: Any, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl({"messages": [QUESTION, ANSWER], "text": "The sun."})
    rows, _ = load_rows(tokenizer, [DatasetConfig(path=str(path), type="completion")], sequence_len=64, pad_id=0)
    assert tokenizer.decode(rows[0]["input_ids"]) == "The sun.<|end|>"


def test_packed_rows_and_validation_hold_all_documents_between_them(
    tokenizer: Any, write_jsonl: Callable[..., Path]
) -> None:
    path = write_jsonl(*TEXTS)
    everything, _ = load(tokenizer, path)
    train, validation = load(tokenizer, path, sample_packing=True, val_set_size=0.2, seed=3)
    assert isinstance(train, PackedRows) and isinstance(validation, PackedRows)
    assert (len(train.documents), len(validation.documents)) == (16, 4)
    parts = [row["input_ids"].tolist() for packed in (train, validation) for row in packed.documents]
    assert sorted(parts) == sorted(row["input_ids"].tolist() for row in everything)
    assert all(len(row["input_ids"]) == 64 for row in train)
    again, _ = load(tokenizer, path, sample_packing=True, val_set_size=0.2, seed=3)
    assert all(np.array_equal(one["input_ids"], other["input_ids"]) for one, other in zip(train, again, strict=True))


def test_long_documents_are_reported_once_for_training_and_validation_together(
    tokenizer: Any, write_jsonl: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "outsize"):
        train, validation = load(tokenizer, write_jsonl(*TEXTS), sequence_len=8, val_set_size=2)
    assert [message for message in caplog.messages if "longer than sequence_len (8)" in message] == caplog.messages[:1]
    assert max(train.lengths) <= 8 and max(validation.lengths) <= 8


def test_what_no_loss_comes_from_is_left_out_and_reported(
    tokenizer: Any, write_jsonl: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl({"messages": [QUESTION]}, {"messages": [QUESTION, ANSWER]})
    rows, _ = load(tokenizer, path)
    assert len(rows) == 1 and caplog.messages == ["1 of 2 documents have no tokens to train on and are dropped"]
    long = [{"role": "user", "content": "Is the sea full? " * 20}, ANSWER]
    rows, _ = load(tokenizer, write_jsonl({"messages": long}), sequence_len=16)
    assert (
        len(rows) == 1
        and "pieces of the training data have no tokens to train on and are dropped" in caplog.messages[-1]
    )


def test_data_without_a_token_to_train_on_is_refused(tokenizer: Any, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl({"messages": [QUESTION]}, {"messages": [QUESTION]})
    with pytest.raises(DataError, match=r"none of the 2 documents has any \(all labels are -100\)\. .*train_on_inputs"):
        load(tokenizer, path)
    assert len(load(tokenizer, path, train_on_inputs=True)[0]) == 2


def test_a_strategy_that_leaves_nothing_is_refused(tokenizer: Any, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl(*TEXTS)
    with pytest.raises(
        DataError, match=r"no pieces of the training data are left\. .*sequence_len.*excess_length_strategy"
    ):
        load(tokenizer, path, sequence_len=4, excess_length_strategy="drop")


def test_columns_that_fit_no_kind_are_named(tokenizer: Any, write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl({"x": "1", "y": "2"})
    with pytest.raises(DataError, match=r"data\.jsonl:1: its columns \(x, y\) fit no format\. Add .*`field: …`"):
        load(tokenizer, path)


def test_a_record_that_lacks_the_column_is_named_wherever_it_is(
    tokenizer: Any, write_jsonl: Callable[..., Path]
) -> None:
    path = write_jsonl(*TEXTS, {"body": "x"})
    with pytest.raises(DataError, match=r"data\.jsonl:21: no column 'text'; its columns are body"):
        load(tokenizer, path)


def test_the_last_dataset_is_opened_before_the_first_is_tokenized(
    tokenizer: Any, tokenizer_with: Callable[..., Any], write_jsonl: Callable[..., Path]
) -> None:
    broken = write_jsonl({"text": 3}, name="broken.jsonl")
    with pytest.raises(ConfigError, match=r"missing\.jsonl"):
        load(tokenizer, broken, broken.with_name("missing.jsonl"))
    with pytest.raises(ConfigError, match="chat_template_jinja"):
        load(tokenizer_with(None), broken, write_jsonl({"messages": [QUESTION, ANSWER]}))


def test_a_sequence_of_one_token_predicts_nothing(tokenizer: Any, write_jsonl: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match="sequence_len 1 is too small"):
        load(tokenizer, write_jsonl(*TEXTS), sequence_len=1)
