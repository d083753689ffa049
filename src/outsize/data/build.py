"""Turns datasets into rows for batches, before the first step: read, tokenize, split off validation, cut, pack."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from typing import Any

from outsize.base.errors import ConfigError, DataError
from outsize.base.log import log
from outsize.config.run import DatasetConfig
from outsize.data.chat import chat_documents, check_tokenizer, is_chat
from outsize.data.files import Record
from outsize.data.packing import PackedRows, pack
from outsize.data.rows import Document, Excess, Rows, check_lengths, cut, split_off, trainable
from outsize.data.sources import read
from outsize.data.text import text_documents
from outsize.progress import counted

_RECORDS_AT_ONCE = 256
"""Tokenized in one call, which fast tokenizers spread over threads."""


def load_rows(
    tokenizer: Any,
    datasets: Sequence[DatasetConfig],
    *,
    sequence_len: int,
    pad_id: int,
    excess_length_strategy: Excess = "split",
    sample_packing: bool = False,
    val_set_size: float = 0,
    seed: int = 42,
    train_on_inputs: bool = False,
    deduplicate: bool = False,
    fingerprints: list[str] | None = None,
) -> tuple[Rows | PackedRows, Rows | PackedRows | None]:
    """Rows to train on, and rows to validate on if `val_set_size` is not zero. Deterministic.

    `pad_id` fills up packed rows (see `collate.pad_id_of`). `fingerprints` gets one entry per dataset, of its tokens.
    """
    if sequence_len < 2:
        raise ConfigError(
            f"sequence_len {sequence_len} is too small: a token is predicted from the one before. Use 2 or more."
        )
    # All are opened before any is tokenized, so that a wrong path or column in the last one is found first.
    opened = [_open(source, tokenizer, train_on_inputs) for source in datasets]
    sizes, seen = [0] * len(opened), set[int]()

    def of(number: int) -> Iterator[Document]:
        for document in opened[number]:
            if deduplicate and (content := hash((*document.ids, None, *document.labels))) in seen:
                continue
            seen.update([content] if deduplicate else [])
            sizes[number] += 1
            yield document

    everything = Rows.of(counted(chain.from_iterable(map(of, range(len(opened)))), "tokenizing"))
    if fingerprints is not None:
        ends = list(accumulate(sizes, initial=0))
        fingerprints += [everything.fingerprint(*edges) for edges in pairwise(ends)]
    documents = _require_trainable(everything, "documents")
    check_lengths(documents, sequence_len=sequence_len, strategy=excess_length_strategy)
    train, validation = split_off(documents, val_set_size=val_set_size, seed=seed)

    def finish(rows: Rows, what: str) -> Rows | PackedRows:
        fitting = _require_trainable(
            cut(rows, sequence_len=sequence_len, strategy=excess_length_strategy), f"pieces of the {what} data"
        )
        return pack(fitting, sequence_len=sequence_len, pad_id=pad_id) if sample_packing else fitting

    return finish(train, "training"), None if validation is None else finish(validation, "validation")


def _open(source: DatasetConfig, tokenizer: Any, train_on_inputs: bool) -> Iterator[Document]:
    records = read(source)
    first = next(records)  # reading raises if there is none
    kind = source.type or _kind_of(first, source)
    if kind == "chat_template":
        check_tokenizer(tokenizer, needs_offsets=not train_on_inputs)
        tokenize = partial(
            chat_documents, tokenizer, field_messages=source.field_messages, train_on_inputs=train_on_inputs
        )
    else:
        tokenize = partial(text_documents, tokenizer, field=source.field)
    return _documents(chain([first], records), tokenize)


def _documents(records: Iterator[Record], tokenize: Callable[[list[Record]], list[Document]]) -> Iterator[Document]:
    while batch := list(islice(records, _RECORDS_AT_ONCE)):
        yield from tokenize(batch)


def _kind_of(first: Record, source: DatasetConfig) -> str:
    if is_chat(first, source.field_messages):
        return "chat_template"
    if source.field in first.fields:
        return "completion"
    raise DataError(
        f"{first.place}: neither messages in {source.field_messages!r} nor text in {source.field!r}; its columns are "
        f"{', '.join(first.fields) or 'none'}. Set `field_messages` or `field` of this dataset."
    )


def _require_trainable(rows: Rows, what: str) -> Rows:
    kept = trainable(rows)
    if not len(kept):
        found = f"none of the {len(rows)} {what} has any (all labels are -100)" if len(rows) else f"no {what} are left"
        raise DataError(
            f"datasets: no tokens to train on: {found}. Check for assistant messages, set train_on_inputs: true, "
            "raise sequence_len, or choose another excess_length_strategy."
        )
    if len(kept) < len(rows):
        log.warning("%d of %d %s have no tokens to train on and are dropped", len(rows) - len(kept), len(rows), what)
    return kept
