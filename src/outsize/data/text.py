"""Turns plain text into documents. The loss is on all tokens, the end of the document included."""

from collections.abc import Sequence
from typing import Any

from outsize.data.files import Record
from outsize.data.rows import Document


def text_documents(tokenizer: Any, records: Sequence[Record], *, field: str = "text") -> list[Document]:
    """One document per record, with the tokenizer's special tokens and an eos at the end. Blank text has no tokens."""
    texts = [record.get_text(field, key="field") for record in records]
    encoded = tokenizer(texts, return_attention_mask=False, return_token_type_ids=False, verbose=False)["input_ids"]
    eos = tokenizer.eos_token_id
    documents = []
    for record, text, ids in zip(records, texts, encoded, strict=True):
        if not text.strip():
            ids = []
        elif eos is not None and ids[-1:] != [eos]:
            ids = [*ids, eos]
        documents.append(Document(ids=ids, labels=ids, place=record.place))
    return documents
