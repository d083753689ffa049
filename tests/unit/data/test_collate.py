"""Batches: padding that no loss and no attention sees, and the batch that none is larger than."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from outsize.data.collate import Collator, pad_id_of, widest_batch
from outsize.data.packing import lay_out
from outsize.data.rows import IGNORED, Row


def row(*ids: int) -> Row:
    return {"input_ids": np.array(ids, dtype=np.int32), "labels": np.array(ids, dtype=np.int32)}


@pytest.mark.parametrize(("pad_to", "more"), [(None, 0), (5, 2)])
def test_rows_are_padded_on_the_right(pad_to: int | None, more: int) -> None:
    batch = Collator(9, pad_to)([row(1, 2, 3), row(4)])
    assert batch["input_ids"].tolist() == [[1, 2, 3] + [9] * more, [4, 9, 9] + [9] * more]
    assert batch["attention_mask"].tolist() == [[1, 1, 1] + [0] * more, [1, 0, 0] + [0] * more]
    assert batch["labels"].tolist() == [[1, 2, 3] + [IGNORED] * more, [4, IGNORED, IGNORED] + [IGNORED] * more]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_packed_rows_are_stacked_as_they_are() -> None:
    rows = [
        lay_out([row(1, 2), row(3)], sequence_len=4, pad_id=9),
        lay_out([row(4, 5, 6, 7)], sequence_len=4, pad_id=9),
    ]
    batch = Collator(9, 4)(rows)
    assert {name: tensor.tolist() for name, tensor in batch.items()} == {
        "input_ids": [[1, 2, 3, 9], [4, 5, 6, 7]],
        "labels": [[IGNORED, 2, IGNORED, IGNORED], [IGNORED, 5, 6, 7]],
        "position_ids": [[0, 1, 0, 0], [0, 1, 2, 3]],
    }


def test_padding_is_the_pad_token_or_eos_with_a_word_or_zero(
    tokenizer_with: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "outsize"):
        full = tokenizer_with()
        assert pad_id_of(full) == full.convert_tokens_to_ids("<|pad|>") != 0
        assert not caplog.messages
        assert pad_id_of(tokenizer_with(pad=False, eos=False)) == 0
        assert not caplog.messages
        bare = tokenizer_with(pad=False)
        assert pad_id_of(bare) == bare.eos_token_id
        assert caplog.messages == ["the tokenizer has no pad token: padding is <|end|>, its eos token"]


def test_packed_batches_give_the_boundaries_of_their_documents_if_attention_takes_them() -> None:
    rows = [
        lay_out([row(1, 2), row(3)], sequence_len=5, pad_id=9),
        lay_out([row(4, 5, 6, 7, 8)], sequence_len=5, pad_id=9),
    ]
    batch = Collator(9, gives_boundaries=True)(rows)
    assert batch["document_offsets"].tolist() == [[0, 2, 3, 5], [0, 5, 5, 5]]
    assert batch["document_offsets"].dtype == torch.int32
    assert batch["longest_document"] == 5


def test_the_widest_packed_batch_has_the_given_documents_in_each_row_and_offsets_of_the_most() -> None:
    batch = widest_batch(Collator(0), rows=2, tokens=5, vocab_size=7, documents=[3, 2])
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]] * 2
    assert batch["input_ids"].tolist() == [[0, 1, 2, 3, 4], [5, 6, 0, 1, 2]]
    collator = Collator(0, gives_boundaries=True)
    batch = widest_batch(collator, rows=2, tokens=5, vocab_size=7, documents=[3, 2], most_documents=4)
    assert batch["document_offsets"].tolist() == [[0, 3, 5, 5, 5]] * 2 and batch["longest_document"] == 3


@pytest.mark.parametrize(("rows", "pad_to", "padding"), [(1, None, 0), (2, None, 1), (1, 4, 1), (3, 4, 1)])
def test_the_widest_unpacked_batch_has_padding_where_batches_may_have_it(
    rows: int, pad_to: int | None, padding: int
) -> None:
    batch = widest_batch(Collator(0, pad_to), rows=rows, tokens=4, vocab_size=100)
    assert {tuple(tensor.shape) for tensor in batch.values()} == {(rows, 4)}
    assert int((batch["attention_mask"] == 0).sum()) == padding == 1 - int(batch["attention_mask"][-1, -1])
