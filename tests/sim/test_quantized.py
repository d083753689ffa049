"""Quantized bases under byte budgets, from the least that does to everything resident: the observed peak is the
estimate to the byte, with the memory that bitsandbytes' operators allocate inside.
"""

import functools

import cells
import pytest
import quantized
from quantized import Quantized

import outsize
from outsize.base.errors import PlanInfeasible
from outsize.base.records import to_json
from outsize.model.discover import find_layers
from outsize.model.work import Work
from outsize.profile.counted import counted_trace
from outsize.runtime.engine import Engine

pytest.importorskip("bitsandbytes")

STEPS = 2
NUM_BUDGETS = 6
NF4, TORCHAO = Quantized(quantization="nf4-double"), Quantized(quantization="torchao-int8")


def prepare(case: Quantized, num_bytes: int) -> Engine:
    return outsize.prepare(
        case.model(), quantized.batch(), device=quantized.machine(num_bytes), optimizer=case.spec, chunk_bytes="16KiB"
    )


@functools.cache
def ends(case: Quantized) -> tuple[int, int]:
    """The smallest budget, and what the fastest plan takes."""
    with pytest.raises(PlanInfeasible) as raised:
        prepare(case, 1)
    with cells.closing(prepare(case, cells.GiB)) as engine:
        assert {homes.weights for homes in engine.plan.decision.homes} == {"gpu"}
        return raised.value.needed_bytes, engine.plan.estimate.gpu_bytes


@pytest.mark.parametrize(
    ("case", "number"),
    [*((NF4, number) for number in range(NUM_BUDGETS)), *((TORCHAO, number) for number in (0, 3))],
    ids=lambda value: getattr(value, "quantization", value),
)
def test_every_budget_matches_its_prediction_to_the_byte(case: Quantized, number: int) -> None:
    least, most = ends(case)
    budget = least + (most - least) * number // (NUM_BUDGETS - 1)
    with cells.closing(prepare(case, budget)) as engine:
        assert number > 0 or engine.plan.estimate.gpu_bytes == least
        assert (number == 0) <= any(homes.weights == "host" for homes in engine.plan.decision.homes)
        found = cells.train(engine.model, engine.optimizer, case.batches(), steps=STEPS, accumulate=1, engine=engine)
        assert engine.report().gpu_peak_bytes == engine.plan.estimate.gpu_bytes <= budget
    outcome = cells.plain(case.model(), case.batches(), spec=case.spec, steps=STEPS) if number == 0 else None
    assert outcome is None or (found.losses, found.norms) == (outcome.losses, outcome.norms)


def test_the_smallest_budget_is_the_smallest() -> None:
    least, most = ends(NF4)
    assert least < 0.7 * most
    with pytest.raises(PlanInfeasible) as raised:
        prepare(NF4, least - 1)
    assert raised.value.needed_bytes == least


@pytest.mark.parametrize("case", [NF4, TORCHAO], ids=lambda case: case.quantization)
def test_layers_are_counted_on_shapes_as_on_values(case: Quantized) -> None:
    """For long rows, whose bytes are counted without weights."""
    graph, trace = quantized.traced(case)
    model = case.model()
    counted = counted_trace(model, quantized.batch(), find_layers(model), quantized.machine(), None)
    assert counted is not None
    layers = [call for call, block in enumerate(graph.calls) if graph.blocks[block].kind == "layer"]
    assert len(layers) == 4
    for found, wanted in ((counted.calls[call], trace.calls[call]) for call in layers):
        assert {name: num_bytes(work) for name, work in found.items()} == {n: num_bytes(w) for n, w in wanted.items()}


def num_bytes(work: Work) -> dict[str, int]:
    return {name: value for name, value in to_json(work).items() if name.endswith("_bytes")}
