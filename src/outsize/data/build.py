"""From the datasets a user names to rows ready for a batch: read, tokenize, set validation aside, cut to length, pack.
All before the first step.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, islice, pairwise
from typing import Any

from outsize.base.errors import ConfigError, DataError, tell
from outsize.base.log import log
from outsize.data.chat import chat_documents, check_tokenizer, is_chat
from outsize.data.files import Record
from outsize.data.packing import PackedRows, pack
from outsize.data.rows import Document, Excess, Rows, check_lengths, cut, split_off, trainable
from outsize.data.sources import Source, read
from outsize.data.text import text_documents
from outsize.progress import counted

_RECORDS_AT_ONCE = 256
"""Tokenized in one call, which fast tokenizers spread over threads."""


def load_rows(
    tokenizer: Any,
    datasets: Sequence[Source],
    *,
    sequence_len: int,
    pad_id: int,
    excess_length_strategy: Excess = "split",
    sample_packing: bool = False,
    val_set_size: float = 0,
    seed: int = 42,
    train_on_inputs: bool = False,
    fingerprints: list[str] | None = None,
) -> tuple[Rows | PackedRows, Rows | PackedRows | None]:
    """Rows to train on, and rows to validate on if `val_set_size` is not zero. The same for the same files, tokenizer
    and arguments.

    `pad_id` fills up packed rows; `collate.pad_id_of` gives it. `fingerprints` is filled with one of each dataset's
    content as tokens.
    """
    if sequence_len < 2:
        raise ConfigError(
            tell(
                "sequence_len is 2 or more",
                f"it is {sequence_len}",
                "Raise it: a token is predicted from the one before",
            )
        )
    # All are opened before any is tokenized: a wrong path or column at the end of the list is told at once.
    opened = [_open(source, tokenizer, train_on_inputs) for source in datasets]
    sizes = [0] * len(opened)

    def of(number: int) -> Iterator[Document]:
        for document in opened[number]:
            sizes[number] += 1
            yield document

    everything = Rows.of(counted(chain.from_iterable(map(of, range(len(opened)))), "tokenizing"))
    if fingerprints is not None:
        ends = list(accumulate(sizes, initial=0))
        fingerprints += [everything.fingerprint(*edges) for edges in pairwise(ends)]
    documents = _with_something_to_train(everything, "documents")
    check_lengths(documents, sequence_len=sequence_len, strategy=excess_length_strategy)
    train, validation = split_off(documents, val_set_size=val_set_size, seed=seed)

    def finish(rows: Rows, what: str) -> Rows | PackedRows:
        fitting = _with_something_to_train(
            cut(rows, sequence_len=sequence_len, strategy=excess_length_strategy), f"pieces of the {what} data"
        )
        return pack(fitting, sequence_len=sequence_len, pad_id=pad_id) if sample_packing else fitting

    return finish(train, "training"), None if validation is None else finish(validation, "validation")


def _open(source: Source, tokenizer: Any, train_on_inputs: bool) -> Iterator[Document]:
    records = read(source)
    first = next(records)  # there is one, or reading has raised
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


def _kind_of(first: Record, source: Source) -> str:
    if is_chat(first, source.field_messages):
        return "chat_template"
    if source.field in first.fields:
        return "completion"
    expected = f"{first.place} has messages in {source.field_messages!r} or text in {source.field!r}"
    do = "Name the right column with `field_messages` or `field` of this dataset"
    raise DataError(tell(expected, f"its columns are {', '.join(first.fields) or 'none'}", do))


def _with_something_to_train(rows: Rows, what: str) -> Rows:
    kept = trainable(rows)
    if not len(kept):
        found = (
            f"none of the {len(rows)} {what} has one (all labels are -100)"
            if len(rows)
            else f"there are no {what} left"
        )
        do = (
            "Look for assistant messages in the data, set train_on_inputs: true, raise sequence_len, or choose "
            "another excess_length_strategy"
        )
        raise DataError(tell("the datasets have tokens to train on", found, do))
    if len(kept) < len(rows):
        log.warning("%d of %d %s have no token to train on and are left out", len(rows) - len(kept), len(rows), what)
    return kept
