"""OSFT under many plans equals `outsize.osft.AdamW` in a plain loop, which shares no code with the engine but the
products.
"""

import dataclasses
from collections.abc import Callable

import cells
import pytest
from cells import Cell
from parity import test_covering

KINDS = ("plain", "gpt2", "mixtral", "looped", "routed")
"""Of zoo.py. gpt2 has transposed weights, `looped` weights of several block calls, mixtral and `routed` unused ones."""
CELLS = [
    dataclasses.replace(cell, osft=(0.25, 0.5)[i % 2])
    for kind in KINDS
    for i, cell in enumerate(test_covering.ARRAYS[kind])
]


@pytest.mark.parametrize(
    "cell", [pytest.param(c, id=str(c), marks=[pytest.mark.full] if i % 4 else []) for i, c in enumerate(CELLS)]
)
def test_training_equals_the_plain_loop(cell: Cell, parity_cell: Callable[[object], None]) -> None:
    cells.assert_same(cells.run(cell), cells.expected(cell))
    parity_cell(cell)
