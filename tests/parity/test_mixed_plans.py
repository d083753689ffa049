"""Plans in which every layer and every chunk has its own way: random decisions, all equal to one plain loop and so to
each other.

That different plans give the same bits says little if they compile to the same schedule, so it is asserted that they
differ: in the strategy of a layer, in the home of a chunk, in the number of slots.
"""

import functools
import itertools
import random
from collections.abc import Callable, Sequence

import cells
import pytest
import zoo
from cells import Cell
from synthetic import make_homes

from outsize.layout.chunks import ChunkLayout, pack
from outsize.model.graph import BlockGraph
from outsize.profile.trace import ModelTrace
from outsize.schedule.placement import Placement
from outsize.schedule.plan import Decision
from outsize.schedule.schedule import compile_schedule

NUM_PLANS = 3
STEPS = 2
"""The second begins where the first one ended, and has moments."""
CHUNK_BYTES = 4 * 1024
CELLS = [
    Cell(
        kind=kind,
        dtype=("bf16", "fp32")[i % 2],
        clip=bool(i % 3),
        accumulate=(3, 1, 2)[i % 3],
        update=("declared", "after_step")[i % 2],
    )
    for i, kind in enumerate(zoo.NAMES)
]


def random_decision(graph: BlockGraph, layout: ChunkLayout, trace: ModelTrace, *, rng: random.Random) -> Decision:
    """Each layer its own strategy, each chunk its own homes."""
    homes = []
    for chunk in layout.chunks:
        weights = rng.choice(("gpu", "host"))
        homes.append(make_homes(weights, rng.choice(("gpu", "host", "streamed")), chunk.is_updated))
    strategies = tuple(rng.choice(trace.strategies(call)) for call in range(len(graph.calls)))
    return Decision(homes=tuple(homes), strategies=strategies, depth=rng.randrange(4))


def _place(cell: Cell, layout: ChunkLayout, decision: Decision) -> Placement:
    graph, trace = cell.traced()
    work = trace.works(decision.strategies)
    return Placement(graph, layout, decision, cell.spec.step_config(cell.accumulate), work, trace.shared)


def _differ(one: Placement, other: Placement) -> bool:
    return (
        one.decision.strategies != other.decision.strategies
        and one.decision.homes != other.decision.homes
        and len(one.slots.slot_bytes) != len(other.slots.slot_bytes)
    )


@functools.cache
def plans(cell: Cell) -> Sequence[Placement]:
    """The first ones in a row of random decisions that differ from all before them."""
    graph, trace = cell.traced()
    layout = pack(graph, CHUNK_BYTES)
    rng = random.Random(zoo.NAMES.index(cell.kind))
    found: list[Placement] = []
    for _ in range(1000):
        place = _place(cell, layout, random_decision(graph, layout, trace, rng=rng))
        if all(_differ(place, other) for other in found):
            found.append(place)
        if len(found) == NUM_PLANS:
            return found
    raise AssertionError(f"{cell.kind} has no {NUM_PLANS} plans that differ in everything")


@pytest.mark.parametrize("number", range(NUM_PLANS))
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.kind)
def test_mixed_plan_equals_the_plain_loop(cell: Cell, number: int, parity_cell: Callable[[object], None]) -> None:
    decision = plans(cell)[number].decision
    found = cells.run(cell, steps=STEPS, decision=decision, chunk_bytes=CHUNK_BYTES)
    cells.assert_same(found, cells.expected(cell, steps=STEPS))
    parity_cell((cell.kind, number))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.kind)
def test_compared_plans_differ_in_strategy_home_and_slot_count(cell: Cell) -> None:
    for one, other in itertools.combinations(plans(cell), 2):
        assert one.decision.strategies != other.decision.strategies
        assert one.decision.homes != other.decision.homes
        assert len(one.slots.slot_bytes) != len(other.slots.slot_bytes)
        assert str(compile_schedule(one)) != str(compile_schedule(other))
    layers = [v for v, block in enumerate(cell.traced()[0].calls) if cell.traced()[0].blocks[block].kind == "layer"]
    assert len(layers) == 1 or any(len({place.decision.strategies[v] for v in layers}) > 1 for place in plans(cell)), (
        "some plan mixes strategies"
    )
    assert all(len({str(homes) for homes in place.decision.homes}) > 1 for place in plans(cell)), (
        "every plan mixes homes"
    )
