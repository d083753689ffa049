"""Tokenized documents as rows in a few flat arrays, with splitting, truncating and validation splits.

A row is a span of the flat arrays. Selecting, splitting and truncating rows copies no tokens, and a million documents
are only a handful of objects for the garbage collector and worker processes. Each row keeps its origin, for messages.
"""

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from outsize.base.errors import ConfigError, DataError
from outsize.base.log import log

IGNORED = -100
"""The label of a token without loss; torch's default."""

Ints = NDArray[np.int32]
Row = dict[str, Any]
"""`input_ids` and `labels`. In a run with images also `media` and `place`."""
Excess = Literal["split", "truncate", "drop", "raise"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Media:
    """What the model's processor makes a row from."""

    text: str
    """Rendered, with one token per image."""
    images: tuple[str, ...]
    """Paths."""
    digests: tuple[str, ...]
    """Of the images' content."""
    elements: int
    """Numbers that the images take in a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One record, tokenized."""

    ids: list[int]
    labels: list[int]
    """As long as `ids`; the model shifts them."""
    place: str
    media: Media | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """A map dataset of torch: `len(rows)`, `rows[i]`. The arrays of a row are views; do not write into them."""

    ids: Ints
    labels: Ints
    bounds: NDArray[np.int64]  # (rows, 2)
    """First token and the one after the last, per row."""
    documents: NDArray[np.int64]  # (rows,)
    """Per row, the document it is from: an index into `places`."""
    places: tuple[str, ...]
    media: tuple[Media, ...] = ()
    """Per document. Empty: none has images."""

    @classmethod
    def of(cls, documents: Iterable[Document]) -> "Rows":
        ids, labels, ends, places = array("i"), array("i"), array("q", [0]), []
        media: list[Media] = []
        for document in documents:
            assert len(document.ids) == len(document.labels), document.place
            ids.extend(document.ids)
            labels.extend(document.labels)
            ends.append(len(ids))
            places.append(document.place)
            if document.media is not None:
                media.append(document.media)
        assert not media or len(media) == len(places), "all documents of a run have media, or none has"
        edges = np.array(ends, dtype=np.int64)
        bounds = np.stack([edges[:-1], edges[1:]], axis=1)
        flat = (np.frombuffer(tokens, dtype=np.int32) if tokens else np.zeros(0, np.int32) for tokens in (ids, labels))
        return cls(
            ids=next(flat),
            labels=next(flat),
            bounds=bounds,
            documents=np.arange(len(places)),
            places=tuple(places),
            media=tuple(media),
        )

    def __len__(self) -> int:
        return len(self.bounds)

    def __getitem__(self, index: int) -> Row:
        start, end = self.bounds[index]
        row: Row = {"input_ids": self.ids[start:end], "labels": self.labels[start:end]}
        return {**row, "media": self.media[self.documents[index]], "place": self.place(index)} if self.media else row

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.bounds[:, 1] - self.bounds[:, 0]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def fingerprint(self, start: int, end: int) -> str:
        """A hash of the tokens, labels, lengths and images of rows `start` to `end`, in order.

        Only for rows as `of` makes them, which are contiguous. Takes 1 s for 90 million tokens.
        """
        bounds = self.bounds[start:end]
        first, last = (int(bounds[0, 0]), int(bounds[-1, 1])) if len(bounds) else (0, 0)
        digest = hashlib.blake2b(digest_size=16)
        for values in (bounds - first, self.ids[first:last], self.labels[first:last]):
            digest.update(np.ascontiguousarray(values).reshape(-1).data)
        if any(media.images for media in self.media[start:end]):
            digest.update(repr([media.digests for media in self.media[start:end]]).encode())
        return digest.hexdigest()

    def place(self, index: int) -> str:
        return self.places[self.documents[index]]

    def take(self, indices: NDArray[np.int64]) -> "Rows":
        return replace(self, bounds=self.bounds[indices], documents=self.documents[indices])


def trainable(rows: Rows) -> Rows:
    """Drop rows without loss. A batch of such rows only would have a NaN loss (the mean of nothing).

    The first token is never predicted, so a row of one token has no loss either.
    """
    predicts = [bool((rows.labels[start + 1 : end] != IGNORED).any()) for start, end in rows.bounds]
    return rows.take(np.flatnonzero(predicts))


def split_off(rows: Rows, *, val_set_size: float, seed: int) -> tuple[Rows, Rows | None]:
    """Training and validation rows, each in the order of `rows`. `val_set_size` is a share below one, or a count.

    Splits whole documents, before they are cut: otherwise the end of a document could be validated by a model that was
    trained on its beginning.
    """
    if val_set_size == 0:
        return rows, None
    is_share = 0 < val_set_size < 1
    count = max(1, round(val_set_size * len(rows))) if is_share else int(val_set_size)
    if not 0 < count < len(rows) or (count != val_set_size and not is_share):
        raise ConfigError(
            f"val_set_size {val_set_size} does not split {len(rows)} documents. Use a fraction below 1, or a number of "
            "documents that leaves some for training."
        )
    order = np.random.default_rng(seed).permutation(len(rows))
    return rows.take(np.sort(order[count:])), rows.take(np.sort(order[:count]))


def check_lengths(rows: Rows, *, sequence_len: int, strategy: Excess) -> None:
    """Log once, or raise, if documents are longer than `sequence_len`. `cut` then applies the strategy."""
    lengths = rows.lengths
    num_long = int((lengths > sequence_len).sum())
    if not num_long:
        return
    longest = int(lengths.argmax())
    where = f"the longest with {lengths[longest]} tokens at {rows.place(longest)}"
    found = f"{num_long} of {len(rows)} documents are longer than sequence_len ({sequence_len}), {where}"
    if rows.media and strategy in ("split", "truncate"):
        raise DataError(
            f"{found}: rows with images are not cut (excess_length_strategy: {strategy}). Raise sequence_len, set "
            "excess_length_strategy: drop, or make the images smaller (image_size)."
        )
    if strategy == "raise":
        raise DataError(
            f"{found} (excess_length_strategy: raise). Raise sequence_len, shorten them, or set excess_length_strategy "
            "to split, truncate or drop."
        )
    done = {"split": "each is split into several rows", "truncate": "the rest is cut off", "drop": "they are dropped"}[
        strategy
    ]
    log.warning("%s: %s (excess_length_strategy: %s)", found, done, strategy)


def cut(rows: Rows, *, sequence_len: int, strategy: Excess) -> Rows:
    """No row longer than `sequence_len`."""
    starts, ends = rows.bounds[:, 0], rows.bounds[:, 1]
    if strategy == "drop":
        return rows.take(np.flatnonzero(rows.lengths <= sequence_len))
    if strategy == "truncate":
        return replace(rows, bounds=np.stack([starts, np.minimum(ends, starts + sequence_len)], axis=1))
    num_pieces = np.maximum(1, -(-rows.lengths // sequence_len))
    owner = np.repeat(np.arange(len(rows)), num_pieces)
    nth = np.arange(len(owner)) - np.repeat(num_pieces.cumsum() - num_pieces, num_pieces)
    piece_starts = starts[owner] + nth * sequence_len
    return replace(
        rows,
        bounds=np.stack([piece_starts, np.minimum(ends[owner], piece_starts + sequence_len)], axis=1),
        documents=rows.documents[owner],
    )
