"""Experts that a batch sends no token to: they have no gradient, so they are not updated, do not decay and take no
step. Whatever the plan.
"""

from collections.abc import Callable

import cells
import pytest
import torch
import zoo
from cells import Cell

CELLS = [
    Cell(kind="routed", weights=weights, optimizer=optimizer, strategy=strategy, update=update, dtype=dtype)
    for weights, optimizer, strategy, update, dtype in (
        ("gpu", "gpu", "keep", "after_step", "fp32"),
        ("host", "host", "recompute", "in_backward", "bf16"),
        ("host", "gpu", "swap", "declared", "fp32"),
        ("gpu", "host", "offload", "after_step", "bf16"),
    )
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_an_expert_without_tokens_stays_as_it_was(cell: Cell, parity_cell: Callable[[object], None]) -> None:
    before = {name: value.detach().clone() for name, value in cell.model().named_parameters()}
    batch = zoo.batch("routed", seed=2)  # leaves out the third
    with cells.closing(cells.prepare(cell)) as engine:
        found = cells.train(
            engine.model,
            engine.optimizer,
            [batch],
            steps=2,
            accumulate=1,
            engine=engine,
            declare=cell.update != "after_step",
        )
    for name, value in found.weights.items():
        assert torch.equal(value, before[name]) == (".experts.2." in name), name
    idle = {name: float(state["step"]) for name, state in found.state.items() if ".experts.2." in name}
    assert all(step == 0 for step in idle.values())
    cells.assert_same(found, cells.plain(cell.model(), [batch], spec=cell.spec, steps=2))
    parity_cell(cell)


def test_all_experts_of_the_zoo_train_at_some_time() -> None:
    """One batch leaves out one, the next another."""
    outcome = cells.expected(Cell(kind="routed"), steps=5)
    steps = {name: float(state["step"]) for name, state in outcome.state.items() if ".experts." in name}
    assert set(steps.values()) == {3.0, 4.0, 5.0} or set(steps.values()) == {3.0, 5.0}
