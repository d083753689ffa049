"""Every kind of model under a pairwise covering array of everything that a plan or a loop may choose.

Traps among them: tied weights streamed (C13, C12), a block that runs several times and is checkpointed each time (A16,
kind `looped`), swap beside streamed weights (B6), accumulation with clipping and with declared backwards (D9), bf16
weights with exact masters (D19), frozen neighbours of trained parameters (C2), depth 0, which is the least number of
slots (C7).
"""

import itertools
from collections.abc import Callable
from typing import Any

import cells
import pytest
import zoo
from cells import Cell
from parity.covering import covering

STEPS = 3
"""The first has no moments, the second has, the third is like all that follow."""
NUM_CELLS = 13
FACTORS: dict[str, tuple[Any, ...]] = {
    "strategy": ("keep", "recompute", "offload", "swap"),
    "weights": ("gpu", "host"),
    "optimizer": ("gpu", "host", "streamed"),
    "clip": (False, True),
    "accumulate": (1, 3),
    "dtype": ("fp32", "bf16"),
    "tied": (False, True),
    "frozen": ("none", "scattered", "prefix"),
    "depth": (0, 1, 2),
    "update": ("after_step", "declared", "in_backward"),
    "fp32_grads": (False, True),
}
FIXED = {
    "llama": {"tied": (True,)},
    "llama-untied": {"tied": (False,)},
    "bert": {"tied": (False,)},
    "llama-classes": {"tied": (False,)},
    "modernbert": {"tied": (False,)},
    # Swap has room for what the layer saved in prepare's batch, to the byte; what this one saves depends on where its
    # tokens go, and more is an error.
    "routed": {"strategy": ("keep", "recompute", "offload")},
    "mixed": {"dtype": ("bf16",)},  # whatever is asked: both dtypes in one model are the point of this kind
}


def factors_of(kind: str) -> dict[str, tuple[Any, ...]]:
    return FACTORS | FIXED.get(kind, {})


def array(kind: str) -> list[Cell]:
    return [Cell(kind=kind, **row) for row in covering(factors_of(kind), seed=zoo.NAMES.index(kind))]


ARRAYS = {kind: array(kind) for kind in zoo.NAMES}


def params(some: list[Cell]) -> list[Any]:
    """The first cell whose weights and optimizer are streamed is in `make smoke` too."""
    first = next(cell for cell in some if (cell.weights, cell.optimizer) == ("host", "host"))
    return [pytest.param(cell, id=str(cell), marks=[pytest.mark.smoke] if cell is first else []) for cell in some]


@pytest.mark.parametrize("cell", [param for some in ARRAYS.values() for param in params(some)])
def test_training_equals_the_plain_loop(cell: Cell, parity_cell: Callable[[object], None]) -> None:
    cells.assert_same(cells.run(cell, steps=STEPS), cells.expected(cell, steps=STEPS))
    parity_cell(cell)


@pytest.mark.parametrize("kind", zoo.NAMES)
def test_array_covers_every_legal_pair(kind: str) -> None:
    """A plan that keeps no gradient cannot clip (AdamW refuses it). A loop may declare anything: where it clips, that
    changes nothing.
    """
    for (one, values), (other, others) in itertools.combinations(factors_of(kind).items(), 2):
        for a, b in itertools.product(values, others):
            if {one: a, other: b} != {"clip": True, "update": "in_backward"}:
                assert any(getattr(cell, one) == a and getattr(cell, other) == b for cell in ARRAYS[kind]), (
                    one,
                    a,
                    other,
                    b,
                )
    assert len(set(ARRAYS[kind])) == len(ARRAYS[kind]) == NUM_CELLS
