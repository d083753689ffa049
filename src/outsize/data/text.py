"""Tokenizes texts into documents. Spans of characters say where the loss is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outsize.base.errors import ConfigError
from outsize.data.files import Record
from outsize.data.rows import IGNORED, Document

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    text: str
    trained: bool
    """Whether the loss includes it."""


def check_offsets(tokenizer: Any) -> None:
    if not tokenizer.is_fast:
        raise ConfigError(
            f"{type(tokenizer).__name__} does not report character offsets of tokens. Use a fast tokenizer, or set "
            "train_on_inputs: true."
        )


def text_documents(tokenizer: Any, records: Sequence[Record], *, field: str = "text") -> list[Document]:
    """One document per record, with the tokenizer's special tokens and an eos at the end. Blank text has no tokens."""
    texts = [record.get_text(field, key="field") for record in records]
    encoded = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)["input_ids"]
    documents = []
    for record, text, ids in zip(records, texts, encoded, strict=True):
        ended = _with_eos(tokenizer, ids) if text.strip() else []
        documents.append(Document(ids=ended, labels=ended, place=record.place))
    return documents


def segment_documents(
    tokenizer: Any,
    records: Sequence[Record],
    segments: Sequence[Sequence[Segment]],
    *,
    special_tokens: bool,
    train_on_inputs: bool,
) -> list[Document]:
    """One document per record. `special_tokens`: with the tokenizer's own, and an eos that is trained at the end."""
    texts, spans = [], []
    for parts in segments:
        text, trained = "", []
        for part in parts:
            text += part.text
            if part.trained:
                trained.append((len(text) - len(part.text), len(text)))
        texts.append(text)
        spans.append(trained)
    documents = span_documents(
        tokenizer, records, texts, None if train_on_inputs else spans, special_tokens=special_tokens
    )
    if not special_tokens:
        return documents
    return [
        document
        if (ids := _with_eos(tokenizer, document.ids)) is document.ids
        else Document(ids=ids, labels=[*document.labels, ids[-1]], place=document.place)
        for document in documents
    ]


def span_documents(
    tokenizer: Any,
    records: Sequence[Record],
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]] | None,
    *,
    special_tokens: bool = False,
) -> list[Document]:
    """One document per record. The loss is on the tokens within `spans`; None: on all.

    Each text is tokenized as a whole: in parts it would have other tokens at the boundaries than at inference.
    """
    encoded = tokenizer(
        list(texts),
        add_special_tokens=special_tokens,
        return_offsets_mapping=spans is not None,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    documents = []
    for index, (record, ids) in enumerate(zip(records, encoded["input_ids"], strict=True)):
        labels = ids if spans is None else labels_in(ids, encoded["offset_mapping"][index], texts[index], spans[index])
        documents.append(Document(ids=ids, labels=labels, place=record.place))
    return documents


def labels_in(ids: list[int], offsets: list[Span], text: str, spans: Sequence[Span]) -> list[int]:
    """Labels of the tokens within spans, which are in order.

    A token that begins before a span is not trained, unless only one space is outside: ` Not` of `ASSISTANT: Not`.
    """
    labels = [IGNORED] * len(ids)
    token = 0
    for start, end in spans:
        # Trimmed offsets make a token of spaces empty, at the end of the spaces: at `start` it is part of the prompt.
        while token < len(ids) and (_begins_before(offsets[token], start, text) or offsets[token] == (start, start)):
            token += 1
        while token < len(ids) and offsets[token][1] <= end:
            labels[token] = ids[token]
            token += 1
    return labels


def _begins_before(offset: Span, start: int, text: str) -> bool:
    return offset[0] < start and not (offset[0] == start - 1 and offset[1] > start and text[offset[0]] == " ")


def _with_eos(tokenizer: Any, ids: list[int]) -> list[int]:
    eos = tokenizer.eos_token_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]
