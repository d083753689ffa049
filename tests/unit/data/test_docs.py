"""The examples of docs/data.md: each row becomes the document that is shown."""

import json
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import vision_folders
import yaml

from outsize.config.read import parse_config
from outsize.config.run import DatasetConfig
from outsize.data.build import load_rows
from outsize.data.preference import load_pairs
from outsize.data.rows import IGNORED
from outsize.data.vision import Vision

_ALL = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
DOCS, PAIRS = _ALL.split("## Preference pairs")
_EXAMPLE = re.compile(r"```yaml\n(.*?)```\n\n```json\n(.*?)```\n\n```text\n(.*?)\n```", re.DOTALL)
EXAMPLES = _EXAMPLE.findall(DOCS)


def test_every_example_is_found() -> None:
    again = 1  # the row with an image in a column
    assert len(EXAMPLES) == DOCS.count("```yaml") == DOCS.count("```json") - again == DOCS.count("```text") > 7


@pytest.mark.parametrize(("keys", "row", "shown"), [one for one in EXAMPLES if "cat.png" not in one[1]])
def test_a_row_becomes_the_document(tokenizer: Any, tmp_path: Path, keys: str, row: str, shown: str) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(json.loads(row)))
    given = {"base_model": "m", "datasets": [{"path": str(tmp_path / "data.jsonl"), **yaml.safe_load(keys)}]}
    ((document,), _) = load_rows(tokenizer, parse_config(given, "docs").datasets, sequence_len=512, pad_id=0)
    assert marked(tokenizer, document) == shown


def test_a_pair_becomes_the_two_documents(tokenizer: Any, tmp_path: Path) -> None:
    ((keys, row, shown),) = _EXAMPLE.findall(PAIRS)
    (tmp_path / "data.jsonl").write_text(json.dumps(json.loads(row)))
    given = {
        "base_model": "m",
        "rl": "dpo",
        "datasets": [{"path": str(tmp_path / "data.jsonl"), **yaml.safe_load(keys)}],
    }
    (documents, _) = load_pairs(tokenizer, parse_config(given, "docs").datasets, sequence_len=512)
    assert "\n".join(marked(tokenizer, documents[number]) for number in (0, 1)) == shown


def marked(tokenizer: Any, document: Any) -> str:
    """Its text, with ⟦ and ⟧ around what is trained."""
    pairs = zip(document["input_ids"].tolist(), document["labels"].tolist(), strict=True)
    text = ""
    for is_trained, tokens in groupby(pairs, key=lambda pair: pair[1] != IGNORED):
        part = tokenizer.decode([token for token, _ in tokens])
        text += f"⟦{part}⟧" if is_trained else part
    return text


def test_a_row_with_an_image_becomes_the_document_with_the_image_in_a_part_or_a_column(tmp_path: Path) -> None:
    (shown,) = [text for _, row, text in EXAMPLES if "cat.png" in row]
    vision_folders.picture(16, 16).save(tmp_path / "cat.png")
    vision = Vision(processor=vision_folders.processor_of("qwen"))
    tokenizer = vision.processor.tokenizer
    tokenizer.chat_template = vision_folders.QWEN
    rows = [row for row in re.findall(r"```json\n(.*?)```", DOCS, re.DOTALL) if "cat.png" in row]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(json.loads(row)) + "\n" for row in rows))
    source = DatasetConfig(path=str(tmp_path / "data.jsonl"), type="chat_template")
    documents, _ = load_rows(tokenizer, [source], sequence_len=512, pad_id=0, vision=vision)
    assert len(documents) == 2 and all(marked(tokenizer, document) == shown for document in documents)
