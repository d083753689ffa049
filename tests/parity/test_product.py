"""The full product of strategies, homes, clipping, accumulation and dtypes on tied Llama and T5. `make test` runs
Llama's, which are the cheapest cells there are; T5's run in `make test-all`.
"""

import itertools
from collections.abc import Callable

import cells
import pytest
from cells import Cell

FULL = [
    Cell(
        kind=kind,
        strategy=strategy,
        weights=weights,
        optimizer=optimizer,
        clip=clip,
        accumulate=accumulate,
        dtype=dtype,
        tied=True,
    )
    for kind, strategy, weights, optimizer, clip, accumulate, dtype in itertools.product(
        ("llama", "t5"),
        ("keep", "recompute", "offload", "swap"),
        ("gpu", "host"),
        ("gpu", "host"),
        (True, False),
        (1, 3),
        ("bf16", "fp32"),
    )
]


@pytest.mark.parametrize(
    "cell", [pytest.param(cell, id=str(cell), marks=[pytest.mark.full] if cell.kind == "t5" else []) for cell in FULL]
)
def test_five_steps_equal_the_plain_loop(cell: Cell, parity_cell: Callable[[object], None]) -> None:
    cells.assert_same(cells.run(cell), cells.expected(cell))
    parity_cell(cell)
