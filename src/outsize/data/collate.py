"""Collates rows into batches, and builds the batch that the memory plan is for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outsize.base.log import log
from outsize.data.packing import boundaries, lay_out
from outsize.data.rows import IGNORED, Ints, Row


@dataclass(frozen=True, slots=True)
class Collator:
    """Stacks packed rows. Pads others on the right, to the longest of the batch or to `pad_to` tokens."""

    pad_id: int
    pad_to: int | None = None
    gives_boundaries: bool = False
    """Whether batches of packed rows have the arguments of model/packed_attention.py."""
    least_documents: int = 0
    """Which these have at least, some without tokens."""

    def __call__(self, rows: Sequence[Row]) -> dict[str, Any]:
        if "position_ids" in rows[0]:
            batch: dict[str, Any] = {name: _tensor([row[name] for row in rows]) for name in rows[0]}
            if self.gives_boundaries:
                batch |= boundaries(batch["position_ids"].numpy(), least_documents=self.least_documents)
            return batch
        lengths = [len(row["input_ids"]) for row in rows]
        width = max(lengths) if self.pad_to is None else self.pad_to
        assert max(lengths) <= width, "no row is longer than pad_to"
        return {
            "input_ids": _tensor([_padded(row["input_ids"], width, self.pad_id) for row in rows]),
            "attention_mask": _tensor([_padded(np.ones(length, dtype=np.int32), width, 0) for length in lengths]),
            "labels": _tensor([_padded(row["labels"], width, IGNORED) for row in rows]),
        }


def _padded(tokens: Ints, width: int, filling: int) -> Ints:
    return np.pad(tokens, (0, width - len(tokens)), constant_values=filling)


def _tensor(rows: Sequence[Ints]) -> Tensor:
    return torch.from_numpy(np.stack(rows).astype(np.int64))  # (rows, tokens)


def pad_id_of(tokenizer: Any) -> int:
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    if tokenizer.eos_token_id is None:
        return 0  # any id will do: padding is masked and has no label
    log.info("the tokenizer has no pad token: padding is %s, its eos token", tokenizer.eos_token)
    return int(tokenizer.eos_token_id)


def widest_batch(
    collator: Collator,
    *,
    rows: int,
    tokens: int,
    vocab_size: int,
    documents: Sequence[int] | None = None,
    most_documents: int = 0,
) -> dict[str, Any]:
    """The batch of `rows` × `tokens` that needs the most memory. Deterministic.

    Masks need memory, and transformers builds none for a batch that needs none. So if batches may have padding, the
    last row is one token shorter.

    Args:
        documents: lengths of the documents in every row, at least two. None: rows are not packed.
        most_documents: of a row of the data. Kernels reserve memory per document.
    """
    ids = (np.arange(rows * tokens, dtype=np.int64) % vocab_size).astype(np.int32).reshape(rows, tokens)
    if documents is not None:
        made = [
            lay_out(
                [_all_trained(part) for part in np.split(row, np.cumsum(documents)[:-1])],
                sequence_len=tokens,
                pad_id=collator.pad_id,
            )
            for row in ids
        ]
    else:
        made = [_all_trained(row) for row in ids]
        if tokens > 1 and (rows > 1 or collator.pad_to is not None):
            made[-1] = _all_trained(ids[-1][:-1])
    return replace(collator, least_documents=max(most_documents, collator.least_documents))(made)


def _all_trained(ids: Ints) -> Row:
    return {"input_ids": ids, "labels": ids}
