"""One trace for two batches: under every plan it takes at least the memory of each, and not much more than the
larger.
"""

import random

import pytest
import zoo
from synthetic import make_homes, make_step_config

from outsize.device.choose import choose_device
from outsize.layout.chunks import pack
from outsize.model.discover import find_layers
from outsize.model.graph import BlockGraph
from outsize.planner.memory import high_water
from outsize.profile.merge import merged, with_reserve
from outsize.profile.trace import ModelTrace
from outsize.profile.tracer import Tracer
from outsize.schedule.placement import Placement
from outsize.schedule.plan import Decision
from outsize.schedule.schedule import compile_schedule


def traced(kind: str, rows: int, tokens: int) -> tuple[BlockGraph, ModelTrace]:
    model = zoo.make(kind)
    return Tracer(
        model, zoo.batch(kind, size=rows, tokens=tokens), find_layers(model), choose_device("sim:64MiB")
    ).trace()


def needed(graph: BlockGraph, trace: ModelTrace, strategies: list[str], sized: ModelTrace) -> int:
    """What a step takes; buffers that exist for the whole run are as large as another trace needs them."""
    layout = pack(graph, 16 * 1024)
    decision = Decision(
        homes=tuple(make_homes("gpu", "gpu") for _ in layout.chunks), strategies=tuple(strategies), depth=1
    )  # type: ignore[arg-type]
    step_config = make_step_config()

    def place(of: ModelTrace) -> Placement:
        return Placement(
            graph, layout, decision, step_config, tuple(of.work(v, s) for v, s in enumerate(strategies)), of.shared
        )  # type: ignore[arg-type]

    other = place(trace)
    level = high_water(other, compile_schedule(other), trace.held_bytes).gpu_bytes
    return level - other.gpu_bytes + place(sized).gpu_bytes


@pytest.mark.parametrize("kind", ["gemma2", "t5"])
def test_a_merged_trace_needs_what_the_dearest_of_both_needs(kind: str) -> None:
    graph, wide = traced(kind, 6, 8)
    _, long = traced(kind, 2, 24)
    both = merged(wide, long)
    assert both is not None and both.inputs == wide.inputs
    for seed in range(20):
        rng = random.Random(seed)
        strategies = [rng.choice(both.strategies(v)) for v in range(len(graph.calls))]
        most = max(needed(graph, one, strategies, both) for one in (wide, long))
        found = needed(graph, both, strategies, both)
        assert most <= found <= 1.25 * most
        assert needed(graph, with_reserve(both, 4096), strategies, both) == found + 4096


def test_another_way_through_the_model_cannot_be_merged() -> None:
    _, text = traced("llama", 2, 8)
    _, other = traced("gpt2", 2, 8)
    assert merged(text, other) is None
