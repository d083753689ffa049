"""Packing: several whole documents per row of fixed length, so that no compute goes to padding.

Positions restart at zero with each document, and there is no attention mask. What keeps the documents of a row apart is
model/packed_attention.py, which takes their `boundaries`, or else masks that transformers builds. It builds them only
without a key-value cache (`use_cache: false`), and for some models never; `keeps_documents_apart` tests both.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from outsize.base.log import log
from outsize.data.rows import IGNORED, Row, Rows

_TRIAL_TOKENS = 8
_ROUNDING = 0.01
"""A difference below this fraction of that of a row with mixed documents is rounding."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """A map dataset of torch. Rows are assembled on access."""

    documents: Rows
    rows: tuple[NDArray[np.int64], ...]
    """Per row, the documents in it."""
    sequence_len: int
    pad_id: int

    def __len__(self) -> int:
        return len(self.rows)

    def lengths_of(self, row: int) -> NDArray[np.int64]:
        """Tokens of each document of a row. The padding counts as one more."""
        lengths = self.documents.lengths[self.rows[row]]
        left = self.sequence_len - lengths.sum()
        return np.append(lengths, left) if left else lengths

    def average_row(self) -> NDArray[np.int64]:
        """Lengths of the documents in the row whose attention takes what the average row's takes."""
        costs = np.array([(self.lengths_of(row).astype(np.float64) ** 2).sum() for row in range(len(self))])
        return self.lengths_of(int(np.abs(costs - costs.mean()).argmin()))

    @property
    def most_documents(self) -> int:
        """Of a row at most, its padding included."""
        return max(map(len, self.rows)) + 1

    def __getitem__(self, index: int) -> Row:
        return lay_out(
            [self.documents[document] for document in self.rows[index]],
            sequence_len=self.sequence_len,
            pad_id=self.pad_id,
        )


def pack(documents: Rows, *, sequence_len: int, pad_id: int) -> PackedRows:
    rows = best_fit(documents.lengths, sequence_len)
    packed = PackedRows(documents=documents, rows=rows, sequence_len=sequence_len, pad_id=pad_id)
    if rows:
        share = documents.num_tokens / (len(rows) * sequence_len)
        log.info(
            "packed %d documents into %d rows of %d tokens, %.1f %% of them filled",
            len(documents),
            len(rows),
            sequence_len,
            100 * share,
        )
    return packed


def best_fit(lengths: NDArray[np.int64], sequence_len: int) -> tuple[NDArray[np.int64], ...]:
    """Best-fit decreasing: the longest document first, each into the fullest row that still has room for it.

    Of equally long documents the first comes first; of equally full rows the one that became so last is taken."""
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(sequence_len + 1)]  # rows, by how many tokens still fit
    some = 0  # bit r: there is a row with room r; so the fullest row with enough room is found by the lowest bit
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        assert 0 < length <= sequence_len, "cut before packing"
        if fitting := some >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                some ^= 1 << room
        else:
            room, row = sequence_len, len(rows)
            rows.append([])
        rows[row].append(document)
        with_room[room - length].append(row)
        some |= 1 << (room - length)
    return tuple(np.array(row, dtype=np.int64) for row in rows)


def lay_out(documents: Sequence[Row], *, sequence_len: int, pad_id: int) -> Row:
    """One row of exactly `sequence_len` tokens. The padding counts as one more document."""
    ids = np.full(sequence_len, pad_id, dtype=np.int32)
    labels = np.full(sequence_len, IGNORED, dtype=np.int32)
    positions = np.zeros(sequence_len, dtype=np.int32)
    start = 0
    for document in documents:
        end = start + len(document["input_ids"])
        ids[start:end] = document["input_ids"]
        labels[start + 1 : end] = document["labels"][
            1:
        ]  # the first token would be predicted from the previous document
        positions[start:end] = np.arange(end - start)
        start = end
    positions[start:] = np.arange(sequence_len - start)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def boundaries(positions: NDArray[Any], *, least_documents: int = 0) -> dict[str, Any]:
    """Arguments of an attention function that knows documents by their offsets, from positions (rows, tokens).

    `document_offsets` (rows, documents + 1): where each document of a row begins, then the end of the row, repeated in
    rows with fewer documents and up to `least_documents`. `longest_document`: tokens.
    """
    starts = positions == 0
    offsets = np.full(
        (len(positions), max(starts.sum(1).max(), least_documents) + 1), positions.shape[1], dtype=np.int32
    )
    for row, found in enumerate(starts):
        at = np.flatnonzero(found)
        offsets[row, : len(at)] = at
    return {"document_offsets": torch.from_numpy(offsets), "longest_document": int(np.diff(offsets).max())}


def keeps_documents_apart(model: nn.Module, vocab_size: int, *, rows: int = 2, takes_boundaries: bool = False) -> bool:
    """Whether the second of two packed documents is independent of the first. Tested with a batch of `rows`: some
    attention kernels keep documents apart in batches of one row only.

    Usually an independent second document has the same bits. With experts it does not: the first document changes how
    many rows an expert's matrix product has, and so the rounding. A difference is therefore compared with that of a row
    that is one document.
    """
    takes = inspect.signature(model.forward).parameters.values()
    if not any(parameter.name == "position_ids" or parameter.kind == parameter.VAR_KEYWORD for parameter in takes):
        return False
    count = _TRIAL_TOKENS
    ids = torch.arange(rows * 2 * count).reshape(rows, 2 * count) % vocab_size  # (rows, tokens)
    changed = ids.clone()
    changed[:, :count] = (changed[:, :count] + 1 + vocab_size // 2) % vocab_size
    restarting = torch.arange(count).repeat(2).expand(rows, -1)
    running = torch.arange(2 * count).expand(rows, -1)
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        extra = boundaries(restarting.numpy()) if takes_boundaries else {}
        apart = [_second_logits(model, tokens, restarting, **extra) for tokens in (ids, changed)]
        if torch.equal(*apart):
            return True
        extra = boundaries(running.numpy()) if takes_boundaries else {}
        mixed = [_second_logits(model, tokens, running, **extra) for tokens in (ids, changed)]
        return _distance(*apart) < _ROUNDING * _distance(*mixed)
    finally:
        for module, training in modes.items():
            module.training = training


@torch.no_grad()
def _second_logits(model: nn.Module, ids: Tensor, positions: Tensor, **others: Any) -> Tensor:
    device = next((parameter.device for parameter in model.parameters()), ids.device)
    given = {"input_ids": ids, "position_ids": positions, **others}
    placed = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in given.items()}
    logits: Tensor = model(**placed).logits  # (rows, tokens, vocab)
    return logits[:, _TRIAL_TOKENS:]


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm())
