"""What is trained under the chat templates of Axolotl and TRL, token by token."""

import re
from collections.abc import Callable
from typing import Any

import other_templates
import pytest

from outsize.base.errors import DataError
from outsize.config.run import DatasetConfig
from outsize.data.chat import Chats
from outsize.data.files import Record
from outsize.data.preference import pair_documents
from outsize.data.rows import IGNORED

ANSWERS = ("The sun sets.", "It rises é 😀 ", "Not yet, the sea.")
QUESTIONS = ("Is it full?", "And [the] sun? ", "Rivers?")
CASES = [(package, name) for package, names in other_templates.TRAINED.items() for name in names]


@pytest.fixture(scope="module", autouse=True)
def _extracted() -> None:
    other_templates.extract()


def conversation(turns: int, *, system: bool) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": "Be brief."}] if system else []
    for question, answer in list(zip(QUESTIONS, ANSWERS, strict=True))[:turns]:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages


def expected_labels(ids: list[int], offsets: list[tuple[int, int]], text: str, turns: list[str]) -> list[int]:
    """A token is trained if all its characters are in one of the turns, which follow each other in the text. They end
    at the end of the answers, so they are searched from there.
    """
    trained = [False] * len(text)
    at = 0
    for turn in turns:
        start = text.index(turn, at)
        at = start + len(turn)
        trained[start:at] = [True] * len(turn)
    return [
        token if end > start and all(trained[start:end]) else IGNORED
        for token, (start, end) in zip(ids, offsets, strict=True)
    ]


@pytest.mark.full
@pytest.mark.parametrize(("package", "name"), CASES)
def test_the_assistants_turns_are_trained(tokenizer_with: Callable[..., Any], package: str, name: str) -> None:
    tokenizer = tokenizer_with(other_templates.path_of(package, name).read_text())
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    forms = other_templates.TRAINED[package][name]
    earlier, last = (forms, forms) if isinstance(forms, str) else forms
    chats = Chats(tokenizer=tokenizer, source=DatasetConfig(path="-"))
    for turns in (1, 3):
        for system in (False, True):
            record = Record(fields={"messages": conversation(turns, system=system)}, place="data.jsonl:7")
            if system and name in other_templates.NO_SYSTEM:
                with pytest.raises(DataError, match=r"System role not supported.*set drop_system_message: true"):
                    chats.documents([record])
                continue
            (document,) = chats.documents([record])
            text = tokenizer.decode(document.ids)
            encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            assert encoded["input_ids"] == document.ids
            expected = [
                re.sub(r"\*|~", lambda kind, answer=answer: answer if kind[0] == "*" else answer.strip(), form)
                for form, answer in zip([*[earlier] * (turns - 1), last], ANSWERS, strict=False)
            ]
            assert document.labels == expected_labels(document.ids, encoded["offset_mapping"], text, expected)


NO_PAIRS_WITH_SYSTEM = ("mistral_v2v3", "mistral_v3_tekken", "pixtral")
"""Templates that render a system message only where no answer follows."""


@pytest.mark.full
@pytest.mark.parametrize(("package", "name"), CASES)
def test_the_answers_of_pairs_are_trained(tokenizer_with: Callable[..., Any], package: str, name: str) -> None:
    tokenizer = tokenizer_with(other_templates.path_of(package, name).read_text())
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    documents = pair_documents(tokenizer, DatasetConfig(path="-"))
    for turns in (1, 3):
        for system in (False, True):
            if system and name in other_templates.NO_SYSTEM:
                continue
            messages = conversation(turns, system=system)
            answers = {"chosen": messages[-1:], "rejected": [{"role": "assistant", "content": "Never."}]}
            record = Record(fields={"prompt": messages[:-1], **answers}, place="data.jsonl:7")
            if system and name in NO_PAIRS_WITH_SYSTEM:
                with pytest.raises(DataError, match="renders the prompt differently when an answer follows"):
                    documents([record])
                continue
            for document, answer in zip(documents([record]), (ANSWERS[turns - 1], "Never."), strict=True):
                begin = document.labels.index(next(label for label in document.labels if label != IGNORED))
                assert document.labels[begin:] == document.ids[begin:]
                trained = tokenizer.decode(document.ids[begin:])
                assert answer.strip() in trained and QUESTIONS[turns - 1].strip() not in trained
