"""The table of what GPUs can train: the README has the rows of docs/hardware.md, which are those that plans predict."""

import logging

import pytest

from tools.doc_blocks import ROOT
from tools.hardware_table import FULL, GPUS, LORA, cell


def rows_of(page: str) -> list[list[str]]:
    """The cells behind the first column."""
    lines = [line for line in (ROOT / page).read_text().splitlines() if " GiB (" in line and line.startswith("| ")]
    return [[text.strip().replace(" of RAM", " RAM") for text in line.split("|")[2:-1]] for line in lines]


def test_the_readme_has_the_rows_of_the_page() -> None:
    assert rows_of("README.md") == rows_of("docs/hardware.md")
    assert [len(row) for row in rows_of("README.md")] == [len(FULL) + len(LORA)] * len(GPUS)


@pytest.mark.full
@pytest.mark.parametrize(("row", "column"), [(0, 2), (1, 1), (2, 4)])
def test_the_page_has_what_plans_predict(row: int, column: int) -> None:
    machine, gib, ram = GPUS[row]
    logging.disable(logging.WARNING)
    try:
        predicted = cell([*FULL, *LORA][column], machine, gib, ram, lora=column >= len(FULL))
    finally:
        logging.disable(logging.NOTSET)
    assert rows_of("docs/hardware.md")[row][column] == predicted.replace(" of RAM", " RAM")
