"""The batches of a pruning run: batch k of training, and those of the validation rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outsize.run.inputs import BatchOrder, token_lengths


@dataclass(frozen=True, slots=True)
class Given:
    """One batch, on the host."""

    arguments: dict[str, Any]
    """Of the model's forward, without labels."""
    valid: Tensor | None
    """(rows, tokens), True where a token is no padding; None if all are."""
    tokens: int
    """Without padding."""
    labels: Tensor | None = None


class BatchSource:
    """Batch k of some rows, for every k."""

    def __init__(self, rows: Any, order: BatchOrder, collator: Any, *, width: int | None):
        """`width`: tokens of every row after padding; None: as long as the longest of the batch."""
        self._rows, self.order, self._collator, self._width = rows, order, collator, width
        self.lengths = token_lengths(rows)

    def __call__(self, k: int) -> Given:
        batch = self.order.collate(self._rows, self._collator, k)
        lengths = torch.from_numpy(self.lengths[self.order.rows(k)])
        width = batch["input_ids"].shape[1]
        valid = None if bool((lengths == width).all()) else torch.arange(width) < lengths[:, None]
        arguments = {name: value for name, value in batch.items() if name != "labels"}
        return Given(arguments, valid, int(lengths.sum()), batch.get("labels"))

    def shape(self, k: int) -> tuple[int, int]:
        """Rows and tokens of a batch."""
        rows = self.order.rows(k)
        return len(rows), self._width or int(np.max(self.lengths[rows]))

    def tokens(self, k: int) -> int:
        """Of a batch, without padding."""
        return int(self.lengths[self.order.rows(k)].sum())


Source = Callable[[int], Given]
