"""The records: their keys are those of docs/config.md, and they are read without torch."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

from outsize.base.records import fields_by_key
from outsize.config.keys import TABLE
from outsize.config.run import DatasetConfig, RunConfig
from outsize.config.source import load_yaml
from tools import axolotl_table

DOCS = (Path(__file__).parents[3] / "docs" / "config.md").read_text()
SOUND = RunConfig(base_model="m", datasets=(DatasetConfig(path="d"),))


@pytest.mark.parametrize(("record", "title"), [(RunConfig, "Keys"), (DatasetConfig, "A dataset")])
def test_the_docs_list_every_key_with_its_default(record: type, title: str) -> None:
    section = DOCS.split(f"\n## {title}\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| `(\w+)` \| (\S+) \|", section, flags=re.MULTILINE)
    defaults = {field.name: field.default for field in dataclasses.fields(record)}
    assert [key for key, _ in listed] == list(fields_by_key(record))
    for key, written in listed:
        default = defaults[fields_by_key(record)[key][0]]
        if written == "required":
            assert default is dataclasses.MISSING, key
        else:
            value, _ = load_yaml(written.strip("`"), where=key)
            assert (tuple(value) if isinstance(value, list) else value) == default, key


def test_a_key_in_the_table_is_none_of_ours_or_converted_and_renamed_ones_are_ours() -> None:
    ours = set(fields_by_key(RunConfig))
    assert all(row.action == "converted" for key, row in TABLE.items() if key in ours)
    assert {row.text for row in TABLE.values() if row.action == "renamed"} <= ours


def test_the_page_on_axolotl_is_generated_from_the_table() -> None:
    assert axolotl_table.PAGE.read_text() == axolotl_table.page(), "run python -m tools.axolotl_table"


@pytest.mark.parametrize(
    ("changes", "evaluates"),
    [
        ({}, "no"),
        ({"val_set_size": 0.1}, "epoch"),
        ({"val_set_size": 5, "eval_steps": 10}, "steps"),
        ({"test_datasets": SOUND.datasets, "eval_strategy": "no"}, "no"),
    ],
)
def test_when_to_evaluate_follows_from_what_is_given(changes: dict, evaluates: str) -> None:
    assert dataclasses.replace(SOUND, **changes).evaluates == evaluates


def test_a_config_is_read_without_torch() -> None:
    code = "import sys, outsize.config.read; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
