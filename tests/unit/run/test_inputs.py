"""Batch k is a function of the rows, the seed and k."""

from pathlib import Path

import folders
import numpy as np
import pytest

from outsize.config.read import read_config
from outsize.run.inputs import PLACE, BatchOrder, OrderedRows, load_inputs, token_lengths


def test_every_epoch_has_every_row_once_in_an_order_of_its_own() -> None:
    order = BatchOrder(num_rows=10, rows_per_batch=4, seed=3)
    flat = [row for k in range(5) for row in order.rows(k)]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10)) and flat[:10] != flat[10:]
    assert order.rows(3) == BatchOrder(num_rows=10, rows_per_batch=4, seed=3).rows(3)
    assert order.rows(0) != BatchOrder(num_rows=10, rows_per_batch=4, seed=4).rows(0)
    sequential = BatchOrder(num_rows=10, rows_per_batch=4, seed=3, is_sequential=True)
    assert sequential.rows(2) == [8, 9, 0, 1]


def test_ordered_rows_are_those_of_the_batches() -> None:
    order = BatchOrder(num_rows=10, rows_per_batch=4, seed=3)
    rows = OrderedRows([{"input_ids": row} for row in range(10)], order, 6)
    items = list(rows)
    assert len(items) == len(rows) == 24 and [item[PLACE] for item in items] == list(range(24))
    assert [item["input_ids"] for item in items] == [row for k in range(6) for row in order.rows(k)]


@pytest.mark.parametrize("tokens", [1, 17, 55, 56, 119, 300])
@pytest.mark.parametrize("multiple", [1, 3])
def test_the_number_of_batches_is_the_smallest_with_enough_tokens(tokens: int, multiple: int) -> None:
    order, lengths = BatchOrder(num_rows=10, rows_per_batch=2, seed=0), np.arange(1, 11)
    found = order.num_batches(lengths, tokens, multiple=multiple)
    seen = [sum(int(lengths[order.rows(k)].sum()) for k in range(count)) for count in (found - multiple, found)]
    assert found % multiple == 0 and seen[0] < tokens <= seen[1]


def test_lengths_of_packed_rows_do_not_count_padding(tmp_path: Path) -> None:
    plain = load_inputs(read_config(folders.write_run(tmp_path, sequence_len=96)))
    packed = load_inputs(read_config(tmp_path / "run.yaml", ["sample_packing=true"]))
    assert token_lengths(packed.train).sum() == token_lengths(plain.train).sum() == plain.train.num_tokens
    assert len(packed.train) < len(plain.train) and token_lengths(packed.train).max() <= 96
