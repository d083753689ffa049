"""Packing: every token once, no row too long; and a real model computes each document of a row as if it were alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from outsize.data.collate import Collator
from outsize.data.packing import PackedRows, best_fit, keeps_documents_apart, pack
from outsize.data.rows import IGNORED, Document, Rows
from outsize.model.packed_attention import VARLEN, register

PAD = 99


def rows_of(lengths: list[int]) -> Rows:
    ends = np.cumsum(lengths).tolist()
    spans = [list(range(100 + end - length, 100 + end)) for end, length in zip(ends, lengths, strict=True)]
    return Rows.of(Document(ids=ids, labels=[-id for id in ids], place="data.jsonl:1") for ids in spans)


cases = st.integers(1, 12).flatmap(
    lambda longest: st.tuples(st.lists(st.integers(1, longest), min_size=1, max_size=30), st.integers(longest, 14))
)


@given(cases)
def test_every_token_is_in_exactly_one_row_and_documents_stay_whole(case: tuple[list[int], int]) -> None:
    lengths, sequence_len = case
    rows = rows_of(lengths)
    packed = pack(rows, sequence_len=sequence_len, pad_id=PAD)
    found = []
    for row in packed:
        assert {name: len(values) for name, values in row.items()} == dict.fromkeys(
            ("input_ids", "labels", "position_ids"), sequence_len
        )
        starts = np.flatnonzero(row["position_ids"] == 0)
        for ids, labels, positions in zip(
            *(np.split(row[name], starts[1:]) for name in ("input_ids", "labels", "position_ids")), strict=True
        ):
            assert positions.tolist() == list(range(len(ids))), "positions restart with each document"
            if ids[0] == PAD:
                assert set(ids) == {PAD} and set(labels) == {IGNORED}, (
                    "filling is a document of its own, without labels"
                )
                continue
            assert labels.tolist() == [IGNORED, *(-ids[1:]).tolist()], "a first token has no label"
            found.append(ids.tolist())
    assert sorted(found) == [row["input_ids"].tolist() for row in rows]


@given(cases)
def test_rows_are_nearly_as_few_as_can_be(case: tuple[list[int], int]) -> None:
    """No two rows would fit into one: so more than half of all tokens are no filling."""
    lengths, sequence_len = case
    fill = sorted(sum(lengths[document] for document in row) for row in best_fit(np.array(lengths), sequence_len))
    assert len(fill) < 2 or fill[0] + fill[1] > sequence_len


def test_the_fullest_row_with_room_is_taken() -> None:
    assert [row.tolist() for row in best_fit(np.array([2, 6, 3, 7, 1]), 10)] == [[3, 2], [1, 0, 4]]


def test_the_average_row_and_the_most_documents_of_a_row() -> None:
    packed = pack(rows_of([8, 7, 2, 4, 4]), sequence_len=10, pad_id=PAD)
    assert [sorted(packed.lengths_of(row).tolist()) for row in range(3)] == [[2, 8], [3, 7], [2, 4, 4]]
    assert sorted(packed.average_row().tolist()) == [3, 7], "68, 58 and 36 squared tokens: 54 on average"
    assert packed.most_documents == 4, "three and padding"


# --- real models


def llama(attention: str = "sdpa", **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=160,
    )
    return LlamaForCausalLM._from_config(
        LlamaConfig(**shape, **{"use_cache": False, **options}), attn_implementation=attention
    ).eval()


def two_packed_rows() -> tuple[Rows, PackedRows]:
    rows = rows_of([5, 7, 9, 3, 4])
    packed = pack(rows, sequence_len=16, pad_id=PAD)
    assert len(packed) == 2
    return rows, packed


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_a_packed_document_has_the_logits_it_has_alone(attention: str) -> None:
    model = llama(attention)
    rows, packed = two_packed_rows()
    batch = Collator(PAD)([packed[0], packed[1]])
    assert "attention_mask" not in batch
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
    for index, documents in enumerate(packed.rows):
        start = 0
        for document in documents:
            ids = torch.from_numpy(rows[document]["input_ids"]).long()
            alone = model(input_ids=ids[None]).logits[0]
            torch.testing.assert_close(logits[index, start : start + len(ids)], alone, rtol=0, atol=1e-5)
            start += len(ids)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_another_first_document_leaves_the_second_exactly_as_it_was(attention: str) -> None:
    model = llama(attention)
    rows, packed = two_packed_rows()
    batch = Collator(PAD)([packed[0], packed[1]])
    changed = batch["input_ids"].clone()
    firsts = [int(rows.lengths[documents[0]]) for documents in packed.rows]
    for index, length in enumerate(firsts):
        changed[index, :length] = 7
    before, after = (
        model(input_ids=ids, position_ids=batch["position_ids"]).logits for ids in (batch["input_ids"], changed)
    )
    for index, length in enumerate(firsts):
        assert torch.equal(before[index, length:], after[index, length:])
        assert not torch.equal(before[index, :length], after[index, :length])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_llama_keeps_documents_apart_and_stays_in_the_mode_it_was_in(attention: str) -> None:
    model = llama(attention).train()
    model.model.norm.eval()
    assert keeps_documents_apart(model, 160)
    assert model.training and not model.model.norm.training


@pytest.mark.parametrize("rows", [1, 3])
def test_attention_without_masks_keeps_documents_apart(rows: int) -> None:
    register()
    assert keeps_documents_apart(llama(VARLEN), 160, rows=rows, takes_boundaries=True)


def test_with_a_cache_documents_are_not_kept_apart() -> None:
    """transformers looks for packed rows only where no cache is filled."""
    assert not keeps_documents_apart(llama(use_cache=True), 160)


def test_experts_that_only_round_otherwise_keep_documents_apart() -> None:
    torch.manual_seed(0)
    shape = dict(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=1000,
    )
    model = MixtralForCausalLM._from_config(MixtralConfig(**shape, num_local_experts=8, use_cache=False))
    assert keeps_documents_apart(model, 1000)


class RunningMean(nn.Module):
    """Each token sees the mean of all before it, whatever the positions say."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)

    def forward(self, input_ids: Tensor, **ignored: Tensor) -> SimpleNamespace:
        sums = self.embed(input_ids).cumsum(1)
        return SimpleNamespace(logits=self.head(sums / torch.arange(1, sums.shape[1] + 1)[:, None]))


class NoPositions(RunningMean):
    def forward(self, input_ids: Tensor) -> SimpleNamespace:  # type: ignore[override]
        return super().forward(input_ids)


@pytest.mark.parametrize("kind", [RunningMean, NoPositions])
def test_a_model_that_ignores_positions_does_not_keep_documents_apart(kind: type[nn.Module]) -> None:
    assert not keeps_documents_apart(kind(), 50)
