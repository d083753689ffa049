"""When an update comes does not change it: all strides of one plan, on a simulated device that finds races, give the
plain loop's bits.
"""

from collections.abc import Callable

import cells
import pytest
from cells import Cell
from turns import by_turns

CELLS = [
    Cell(kind="llama", dtype="bf16", weights="host", optimizer="host", update="in_backward", strategy="recompute"),
    Cell(kind="t5", dtype="fp32", weights="gpu", optimizer="host", update="in_backward"),
    Cell(kind="gpt2", dtype="bf16", weights="host", optimizer="host", update="in_backward", accumulate=2),
]


@pytest.mark.parametrize(("cell", "host_update_interval"), by_turns(CELLS, [1, 2, 3, 100]), ids=str)
def test_every_stride_equals_the_plain_loop(
    cell: Cell, host_update_interval: int, parity_cell: Callable[[object], None]
) -> None:
    how = dict(
        strategy=cell.strategy,
        weights=cell.weights,
        optimizer=cell.optimizer,
        depth=cell.depth,
        host_update_interval=host_update_interval,
    )
    cells.assert_same(
        cells.run(cell, "sim:16GiB", decision=lambda *planned: cells.uniform(*planned, **how), chunk_bytes=4096),
        cells.expected(cell),
    )
    parity_cell((cell, host_update_interval))
