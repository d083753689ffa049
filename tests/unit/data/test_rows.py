"""Rows: documents as spans of flat arrays. Cutting them loses no token, and validation never sees a part of a document
that is trained on.
"""

import logging
from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.base.errors import ConfigError, DataError
from outsize.data.rows import IGNORED, Document, Rows, check_lengths, cut, split_off, trainable


def rows_of(*lengths: int) -> Rows:
    """Documents of these lengths; all tokens together are 0, 1, 2, …"""
    ends = np.cumsum(lengths).tolist()
    spans = [list(range(end - length, end)) for end, length in zip(ends, lengths, strict=True)]
    return Rows.of(Document(ids=ids, labels=ids, place=f"data.jsonl:{line}") for line, ids in enumerate(spans, start=1))


def tokens(rows: Rows) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in rows]


def test_a_row_is_its_document() -> None:
    rows = Rows.of([Document(ids=[1, 2], labels=[IGNORED, 2], place="a"), Document(ids=[3], labels=[3], place="b")])
    assert len(rows) == 2 and rows.num_tokens == 3 and rows.place(1) == "b"
    assert rows[0]["labels"].tolist() == [IGNORED, 2] and rows[1]["input_ids"].tolist() == [3]
    assert rows.ids.dtype == rows.labels.dtype == np.int32


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.integers(1, 7))
def test_a_split_loses_no_token_and_leaves_no_row_too_long(lengths: list[int], sequence_len: int) -> None:
    rows = rows_of(*lengths)
    pieces = cut(rows, sequence_len=sequence_len, strategy="split")
    assert list(chain.from_iterable(tokens(pieces))) == list(range(sum(lengths)))
    assert max(pieces.lengths) <= sequence_len
    for index in range(len(pieces)):
        document = int(pieces.documents[index])
        assert set(tokens(pieces)[index]) <= set(tokens(rows)[document]) and pieces.place(index) == rows.place(document)


def test_truncate_keeps_the_beginning_and_drop_keeps_the_short() -> None:
    rows = rows_of(2, 5, 3)
    assert tokens(cut(rows, sequence_len=3, strategy="truncate")) == [[0, 1], [2, 3, 4], [7, 8, 9]]
    assert tokens(cut(rows, sequence_len=3, strategy="drop")) == [[0, 1], [7, 8, 9]]


@pytest.mark.parametrize(
    ("strategy", "done"), [("split", "split into several rows"), ("truncate", "cut off"), ("drop", "dropped")]
)
def test_documents_that_are_too_long_are_reported_once(
    caplog: pytest.LogCaptureFixture, strategy: str, done: str
) -> None:
    with caplog.at_level(logging.WARNING, "outsize"):
        check_lengths(rows_of(2, 5, 9, 3), sequence_len=4, strategy=strategy)  # type: ignore[arg-type]
    (message,) = caplog.messages
    assert "2 of 4 documents are longer than sequence_len (4), the longest with 9 tokens at data.jsonl:3" in message
    assert done in message and f"excess_length_strategy: {strategy}" in message


def test_documents_that_are_too_long_are_refused_where_that_is_requested() -> None:
    with pytest.raises(DataError, match=r"1 of 2 .* 9 tokens at data\.jsonl:2 .*\. Raise sequence_len"):
        check_lengths(rows_of(2, 9), sequence_len=4, strategy="raise")


def test_nothing_is_reported_when_all_fit(caplog: pytest.LogCaptureFixture) -> None:
    check_lengths(rows_of(2, 4), sequence_len=4, strategy="raise")
    assert not caplog.messages


@pytest.mark.parametrize(("size", "count"), [(0.25, 5), (3, 3), (0.001, 1)])
def test_validation_is_a_share_or_a_count_of_whole_documents(size: float, count: int) -> None:
    rows = rows_of(*range(1, 21))
    train, validation = split_off(rows, val_set_size=size, seed=0)
    assert validation is not None and len(validation) == count
    assert sorted(tokens(train) + tokens(validation)) == tokens(rows)
    again, other = (split_off(rows, val_set_size=size, seed=seed)[1] for seed in (0, 1))
    assert again is not None and other is not None
    assert tokens(again) == tokens(validation) != tokens(other)


def test_no_validation_is_none() -> None:
    rows = rows_of(2, 3)
    assert split_off(rows, val_set_size=0, seed=0) == (rows, None)


@pytest.mark.parametrize("size", [-1, 1.5, 2, 3, 0.9])
def test_validation_leaves_something_to_train_on(size: float) -> None:
    with pytest.raises(ConfigError, match=f"val_set_size {size} does not split 2 documents"):
        split_off(rows_of(2, 3), val_set_size=size, seed=0)


def test_rows_that_no_loss_comes_from_are_left_out() -> None:
    labels = [[IGNORED, 2], [IGNORED, IGNORED], [1], [1, IGNORED], []]
    rows = Rows.of(Document(ids=[1, 2][: len(some)], labels=some, place="a") for some in labels)
    assert [row["labels"].tolist() for row in trainable(rows)] == [[IGNORED, 2]]
