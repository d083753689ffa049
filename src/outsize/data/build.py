"""Turns datasets into rows for batches, before the first step: read, tokenize, split off validation, cut, pack."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, islice, pairwise
from typing import Any

from outsize.base.errors import ConfigError, DataError
from outsize.base.log import log
from outsize.config.run import DatasetConfig
from outsize.data.files import Record
from outsize.data.formats import open_format, prompt_of
from outsize.data.packing import PackedRows, pack
from outsize.data.rows import Document, Excess, Rows, check_lengths, cut, split_off, trainable
from outsize.data.sources import read
from outsize.data.vision import Vision
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
    prompts: list[str | None] | None = None,
    vision: Vision | None = None,
) -> tuple[Rows | PackedRows, Rows | PackedRows | None]:
    """Rows to train on, and rows to validate on if `val_set_size` is not zero. Deterministic.

    `pad_id` fills up packed rows (see `collate.pad_id_of`). `fingerprints` gets one entry per dataset, of its tokens.
    `prompts` gets what is written before a trained answer (`Format.prompt`), once.
    `vision`: if the data have images; rows then have what the processor needs.
    """
    if sequence_len < 2:
        raise ConfigError(
            f"sequence_len {sequence_len} is too small: a token is predicted from the one before. Use 2 or more."
        )
    # All are opened before any is tokenized, so that a wrong path or column in the last one is found first.
    found = [] if prompts is None else prompts
    opened = [_open(source, tokenizer, train_on_inputs, vision, found) for source in datasets]
    sizes, seen = [0] * len(opened), set[int]()

    def of(number: int) -> Iterator[Document]:
        for document in opened[number]:
            images = document.media.images if document.media is not None else ()
            if deduplicate and (content := hash((*document.ids, None, *document.labels, *images))) in seen:
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


def _open(
    source: DatasetConfig, tokenizer: Any, train_on_inputs: bool, vision: Vision | None, prompts: list[str | None]
) -> Iterator[Document]:
    records = read(source)
    first = next(records)  # reading raises if there is none
    tokenize = open_format(first, source, tokenizer, train_on_inputs, vision)
    prompts += [prompt] if (prompt := prompt_of(first, source)) not in prompts else []
    return _documents(chain([first], records), tokenize)


def _documents(records: Iterator[Record], tokenize: Callable[[list[Record]], list[Document]]) -> Iterator[Document]:
    while batch := list(islice(records, _RECORDS_AT_ONCE)):
        yield from tokenize(batch)


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
