"""Whole runs under a byte budget for what is no plain decoder: images, two stacks, classes and tags, experts, layers of
several kinds.
"""

import functools
import random

import cells
import pytest
import torch
import zoo
from cells import Cell
from parity.test_mixed_plans import random_decision
from sim.test_sweep import (
    CHUNK_BYTES,
    T5_GAP_BYTES,
    GiB,
    any_cell,
    ends,
    everything_resident,
    machine,
    prepare,
    train_and_compare,
)
from turns import in_turn

import outsize
from outsize.base.errors import PlanInfeasible

SWEPT = [
    Cell(kind="qwen2.5-vl", clip=True),
    Cell(kind="llava", frozen="prefix", accumulate=2),
    Cell(kind="t5", clip=True),
    Cell(kind="modernbert", update="in_backward"),
    Cell(kind="mixtral", dtype="bf16", update="declared"),
    Cell(kind="qwen3-next"),
]
NUM_BUDGETS = 2
ONE_OF_THREE = [cell if i % 3 == 0 else pytest.param(cell, marks=pytest.mark.full) for i, cell in enumerate(SWEPT)]
"""What depends little on the kind of model: one with images and one with layers of several kinds by default."""
GAP_BYTES = {"t5": T5_GAP_BYTES + 512, "qwen2.5-vl": 16, "qwen3-vl": 16, "routed": 256}
"""By how much an estimate may be too high. A tensor that layers share and that dies behind the peak of a region counts
twice there if a layer keeps it: where images begin (Qwen3-VL), which expert a token goes to (routed)."""


def budget(cell: Cell, number: int) -> int:
    least, most = ends(cell)
    return least + (most - least) * number // NUM_BUDGETS


@pytest.mark.parametrize(
    ("cell", "number"),
    [
        pytest.param(
            cell, number, marks=pytest.mark.full if number and i % 2 else (), id=f"{cell}-{number}"
        )  # the smallest budget of each
        for i, cell in enumerate(SWEPT)
        for number in range(NUM_BUDGETS)
    ],
)
def test_every_budget_matches_its_prediction(cell: Cell, number: int) -> None:
    with cells.closing(prepare(cell, machine(budget(cell, number)))) as engine:
        assert 0 <= train_and_compare(cell, engine) <= GAP_BYTES.get(cell.kind, 0)


@pytest.mark.parametrize("cell", ONE_OF_THREE, ids=str)
def test_everything_resident_matches_its_prediction_too(cell: Cell) -> None:
    with cells.closing(prepare(cell, machine(ends(cell)[1]), everything_resident(cell))) as engine:
        assert 0 <= train_and_compare(cell, engine) <= GAP_BYTES.get(cell.kind, 0)


@pytest.mark.parametrize("cell", ONE_OF_THREE, ids=str)
def test_below_the_smallest_budget_the_error_names_it(cell: Cell) -> None:
    least, most = ends(cell)
    assert least < most / 2
    with pytest.raises(PlanInfeasible) as raised:
        prepare(cell, f"sim:{least - 1}B")
    assert (raised.value.resource, raised.value.allowed_bytes, raised.value.needed_bytes) == ("gpu", least - 1, least)


@pytest.mark.parametrize("seed", in_turn(range(3), every=3))
def test_random_mixed_plan_of_a_model_whose_vision_features_enter_deep_layers(seed: int) -> None:
    cell, rng = any_cell("qwen3-vl", seed)
    decide = functools.partial(random_decision, rng=rng)
    with cells.closing(
        cells.prepare(cell, machine(GiB), decision=decide, chunk_bytes=CHUNK_BYTES, budget=None)
    ) as engine:
        assert 0 <= train_and_compare(cell, engine) <= GAP_BYTES["qwen3-vl"]


@pytest.mark.parametrize("seed", in_turn(range(3)))
def test_experts_that_tokens_are_sent_to_one_by_one_match_the_prediction_for_the_batch_that_was_planned_for(
    seed: int,
) -> None:
    """What another routing takes is another number: how many tokens come to an expert is in no shape."""
    cell = Cell(kind="routed", dtype=("fp32", "bf16")[seed % 2])
    decide = functools.partial(random_decision, rng=random.Random(seed))
    with cells.closing(
        cells.prepare(cell, machine(GiB), decision=decide, chunk_bytes=CHUNK_BYTES, budget=None)
    ) as engine:
        same = [zoo.batch("routed")]
        found = cells.train(engine.model, engine.optimizer, same, steps=3, accumulate=1, engine=engine)
        assert 0 <= engine.plan.estimate.gpu_bytes - engine.report().gpu_peak_bytes <= GAP_BYTES["routed"]
    cells.assert_same(found, cells.plain(cell.model(), same, spec=cell.spec, steps=3))


@pytest.mark.parametrize("kind", ["llama", "qwen2.5-vl", "llava"])
def test_a_plan_for_the_largest_batch_has_room_for_shorter_ones(kind: str) -> None:
    """Rows are repeated with their images, tokens are text."""
    model, small = zoo.make(kind), zoo.batch(kind, size=1)
    with cells.closing(
        outsize.prepare(model, small, device=machine(GiB), max_shape=(2, 24), chunk_bytes=CHUNK_BYTES)
    ) as engine:
        assert engine.plan.inputs["input_ids"] == (2, 24)
        before = engine.plan
        for batch in (small, zoo.batch(kind, size=2, tokens=16), zoo.batch(kind, size=2, tokens=24)):
            if (
                kind == "qwen2.5-vl" and batch["input_ids"].shape[0] == 2
            ):  # the zoo gives two rows three images, and one row two
                batch = {
                    name: torch.cat([value] * 2)
                    for name, value in zoo.batch(kind, size=1, tokens=batch["input_ids"].shape[1]).items()
                }
            model(**batch).loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        assert engine.plan is before, "none of them is larger"
        assert engine.report().gpu_peak_bytes <= before.estimate.gpu_bytes
