"""The inputs of a run: tokenizer, rows, and batch k as a function of the rows, the seed and k."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outsize.config.run import RunConfig
from outsize.data.build import load_rows
from outsize.data.collate import pad_id_of
from outsize.data.packing import PackedRows
from outsize.data.preference import load_pairs
from outsize.data.rows import Row, Rows
from outsize.data.vision import Vision
from outsize.run.tokenizer import load_tokenizer

Order = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    tokenizer: Any
    pad_id: int
    train: Any
    """`Rows` or `PackedRows`. With `rl: dpo`, two rows a pair."""
    evaluated: Any
    """The same, or None."""
    fingerprints: list[str] = field(default_factory=list)
    """Of the tokens of each dataset."""
    eval_fingerprints: list[str] = field(default_factory=list)
    """Of each of `test_datasets`."""
    prompts: list[str | None] = field(default_factory=list)
    """What is written before a trained answer, once each."""

    @property
    def parts(self) -> list[Any]:
        return [self.train] if self.evaluated is None else [self.train, self.evaluated]


def load_inputs(config: RunConfig, vision: Vision | None = None) -> Inputs:
    tokenizer = load_tokenizer(config, vision.processor if vision is not None else None)
    pad_id = pad_id_of(tokenizer)
    fingerprints: list[str] = []
    eval_fingerprints: list[str] = []
    prompts: list[str | None] = []
    load: Any = load_rows if config.rl is None else load_pairs
    settings: dict[str, Any] = dict(
        sequence_len=config.sequence_len,
        excess_length_strategy=config.excess_length_strategy,
        seed=data_seed(config),
        deduplicate=config.dataset_exact_deduplication,
    )
    if config.rl is None:
        settings |= dict(
            pad_id=pad_id, sample_packing=config.sample_packing, train_on_inputs=config.train_on_inputs, vision=vision
        )
    train, evaluated = load(
        tokenizer,
        config.datasets,
        val_set_size=config.val_set_size,
        fingerprints=fingerprints,
        prompts=prompts,
        **settings,
    )
    if config.test_datasets:
        evaluated, _ = load(tokenizer, config.test_datasets, fingerprints=eval_fingerprints, **settings)
    return Inputs(
        tokenizer=tokenizer,
        pad_id=pad_id,
        train=train,
        evaluated=evaluated,
        fingerprints=fingerprints,
        eval_fingerprints=eval_fingerprints,
        prompts=prompts,
    )


def data_seed(config: RunConfig) -> int:
    return config.seed if config.data_seed is None else config.data_seed


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchOrder:
    """Which rows batch k has, for every k: epoch after epoch, each in an order of its own. Batch k depends on k alone,
    so a resumed run has nothing to count or skip. A batch may reach over the end of an epoch.
    """

    num_rows: int
    rows_per_batch: int
    seed: int
    is_sequential: bool = False
    """Rows are in the order of the data in every epoch."""

    def rows(self, k: int) -> list[int]:
        first = k * self.rows_per_batch
        return [self.row(place) for place in range(first, first + self.rows_per_batch)]

    def row(self, place: int) -> int:
        """The row at a place of all batches, one after another."""
        epoch, at = divmod(place, self.num_rows)
        return at if self.is_sequential else int(_order(self.num_rows, self.seed, epoch)[at])

    def collate(self, rows: Any, collator: Any, k: int) -> dict[str, Any]:
        batch: dict[str, Any] = collator([rows[row] for row in self.rows(k)])
        return batch

    def num_batches(self, lengths: Sequence[int] | Order, tokens: int, *, multiple: int = 1) -> int:
        """The smallest number of batches with at least `tokens` tokens, a multiple of `multiple`. `lengths`: tokens of
        each row, without padding.
        """
        lengths = np.asarray(lengths, dtype=np.int64)
        whole, left = divmod(tokens, int(lengths.sum()))
        count = whole * self.num_rows
        if left:
            order = np.arange(self.num_rows) if self.is_sequential else _order(self.num_rows, self.seed, whole)
            count += int(np.searchsorted(lengths[order].cumsum(), left)) + 1
        per_step = self.rows_per_batch * multiple
        return -(-count // per_step) * multiple


@lru_cache(maxsize=2)
def _order(num_rows: int, seed: int, epoch: int) -> Order:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def token_lengths(rows: Rows | PackedRows) -> Order:
    """Tokens of each row, without padding."""
    if isinstance(rows, PackedRows):
        return np.array([int(rows.documents.lengths[row].sum()) for row in rows.rows], dtype=np.int64)
    return rows.lengths


PLACE = "place_in_order"
"""The key of a row's place in `OrderedRows`."""


@dataclass(frozen=True, slots=True)
class OrderedRows:
    """The rows of the first batches of an order, one after another: a map dataset for a loader that does not shuffle.
    Each row has its place beside its tokens.
    """

    rows: Any
    order: BatchOrder
    num_batches: int

    def __len__(self) -> int:
        return self.num_batches * self.order.rows_per_batch

    def __getitem__(self, place: int) -> Row:
        if not 0 <= place < len(self):
            raise IndexError(place)
        return {**self.rows[self.order.row(place)], PLACE: place}
