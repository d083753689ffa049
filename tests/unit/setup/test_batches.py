"""Batches at another size: fewer rows take the same way through a model, or there are none."""

import torch
import zoo

from outsize.setup.batches import num_rows, pad_to_shape, take_rows


def test_fewer_rows_of_a_batch_still_have_a_mask_that_masks_and_leave_the_batch_alone() -> None:
    batch = zoo.batch("bert", size=4)
    cut = take_rows(batch, 2)
    assert cut is not None and num_rows(cut) == 2 and cut["labels"].shape == (2,)
    assert torch.equal(cut["input_ids"], batch["input_ids"][:2]) and not cut["attention_mask"].all()
    assert batch["attention_mask"][:2].all(), "the mask of these rows masks nothing in the batch itself"
    full = take_rows({**batch, "attention_mask": torch.ones_like(batch["input_ids"])}, 3)
    assert full is not None and full["attention_mask"].all()


def test_what_is_not_rows_alone_is_not_cut() -> None:
    ids = torch.ones(4, 8, dtype=torch.int64)
    count = torch.tensor(7)
    cut = take_rows({"input_ids": ids, "num_items_in_batch": count, "use_cache": False}, 2)
    assert cut is not None and cut["num_items_in_batch"] is count and cut["use_cache"] is False
    assert take_rows({"input_ids": ids, "cu_seqlens": torch.arange(6)}, 2) is None
    assert take_rows(zoo.batch("llava", size=4), 2) is None
    assert take_rows((ids, ids), 2) is None and num_rows((ids, ids)) is None


def test_a_grown_batch_can_be_cut_again() -> None:
    batch = zoo.batch("llama", size=2, tokens=8)
    large = pad_to_shape({**batch, "attention_mask": torch.ones_like(batch["input_ids"])}, (6, 12))
    assert {tuple(value.shape) for value in large.values()} == {(6, 12)} and not large["attention_mask"].all()
    small = take_rows(large, 3)
    assert small is not None and not small["attention_mask"].all()
