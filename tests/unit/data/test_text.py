"""A text becomes its tokens, with one eos at the end, all of them trained."""

from collections.abc import Callable
from typing import Any

from outsize.data.files import Record
from outsize.data.text import text_documents


def records(*texts: str) -> list[Record]:
    return [Record(fields={"text": text}, place=f"data.jsonl:{number}") for number, text in enumerate(texts, start=1)]


def test_a_document_ends_in_exactly_one_eos(tokenizer: Any) -> None:
    one, two = text_documents(tokenizer, records("The sun", "The sun<|end|>"))
    assert tokenizer.decode(one.ids) == tokenizer.decode(two.ids) == "The sun<|end|>"
    assert one.labels == one.ids and [one.place, two.place] == ["data.jsonl:1", "data.jsonl:2"]


def test_without_an_eos_token_nothing_is_appended(tokenizer_with: Callable[..., Any]) -> None:
    tokenizer = tokenizer_with(eos=False)
    (document,) = text_documents(tokenizer, records("The sun"))
    assert tokenizer.decode(document.ids) == "The sun"


def test_blank_text_has_no_tokens(tokenizer: Any) -> None:
    assert [document.ids for document in text_documents(tokenizer, records("", " \n"))] == [[], []]
