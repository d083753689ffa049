"""The table of a plan: short, aligned, and true."""

import dataclasses

import pytest
from synthetic import Case, make_case, random_case

from outsize.hardware.gpu_budget import GpuBudget
from outsize.hardware.spec import ProcessOverhead
from outsize.planner.search import search
from outsize.planner.simulate import simulate
from outsize.schedule.plan import Decision, Plan
from outsize.schedule.render import render, summary
from outsize.schedule.schedule import compile_schedule

HUGE = 10**15


def plan_of(case: Case, decision: Decision | None = None) -> Plan:
    plan = search(
        case.graph,
        case.layout,
        case.trace,
        case.spec,
        case.step_config,
        gpu=GpuBudget(total_bytes=HUGE),
        host_bytes=HUGE,
    )
    if decision is None:
        return plan
    place = case.place(decision)
    estimate = simulate(place, compile_schedule(place), case.spec, held_bytes=case.trace.held_bytes)
    budgets = {"gpu_budget_bytes": 2 * estimate.gpu_bytes, "host_budget_bytes": 4 * estimate.host_bytes}
    return dataclasses.replace(plan, decision=decision, work=place.work, estimate=estimate, **budgets)


@pytest.fixture
def case() -> Case:
    return make_case(12, numel=2**20)


def row(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(name + " "))


def test_equal_visits_share_one_row(case: Case) -> None:
    strategies = ["keep", *["offload"] * 4, *["keep"] * 9]
    plan = plan_of(case, case.decide("host/host", strategies, depth=1))
    text = render(plan, case.graph, case.layout)
    assert " ".join(row(text, "model.layers.0-3").split()[1:]) == "offload weights host, optimizer host 4 × 2.00 MiB"
    assert row(text, "model.layers.4-11").split()[1] == "keep"
    assert row(text, "stem") and row(text, "head")


def test_tiles_are_named_by_kind_of_module(case: Case) -> None:
    plan = plan_of(case)
    assert "tiles" not in render(plan, case.graph, case.layout)
    tiled = ("layers.0.mlp", "layers.0.norm", "layers.1.mlp", "layers.1.norm", "norm")
    text = render(dataclasses.replace(plan, tile_tokens=8192, tiled=tiled), case.graph, case.layout)
    assert "tiles of 8192 tokens in 5 modules: mlp, norm\n" in text


def test_a_block_whose_chunks_live_apart_says_so() -> None:
    case = make_case(3, 4, numel=2**20)
    homes = ["host/host"] * len(case.layout.chunks)
    first = case.layout.used_by(2)[0]
    homes[first] = "gpu/host"
    text = render(plan_of(case, case.decide(homes, depth=0)), case.graph, case.layout)
    assert "weights 1 gpu + 3 host, optimizer host" in row(text, "model.layers.1")


def test_streamed_state_is_named(case: Case) -> None:
    homes = ["gpu/streamed", *["gpu/host"] * (len(case.layout.chunks) - 1)]
    text = render(plan_of(case, case.decide(homes)), case.graph, case.layout)
    assert "weights gpu, optimizer streamed" in row(text, "stem")


def test_what_the_process_has_on_the_host_besides_is_reported_where_it_was_measured(case: Case) -> None:
    plan = plan_of(case)
    own = "and 1.50 GiB that Python, its libraries and the driver have there"
    assert own in render(
        dataclasses.replace(plan, process_overhead=ProcessOverhead(host_bytes=3 * 2**29)), case.graph, case.layout
    )
    assert "driver" not in render(plan, case.graph, case.layout)


def test_frozen_and_tied_weights_are_named() -> None:
    frozen = make_case(3, frozen=2)
    assert "weights gpu, frozen" in row(render(plan_of(frozen), frozen.graph, frozen.layout), "stem")
    tied = make_case(3, tied=True)
    assert row(render(plan_of(tied), tied.graph, tied.layout), "head").endswith("tied")


def test_memory_is_shown_against_its_budget(case: Case) -> None:
    plan = plan_of(case, case.decide("host/host", "recompute", depth=1))
    lines = render(plan, case.graph, case.layout).splitlines()
    gpu = next(i for i, line in enumerate(lines) if line.startswith("GPU "))
    assert lines[gpu].count("█") == 20 and "(50%)" in lines[gpu], "half of the budget, half of the bar"
    assert "slots" in lines[gpu + 1] and "activations" in lines[gpu + 1]
    host = next(i for i, line in enumerate(lines) if line.startswith("host "))
    assert lines[host].count("█") == 10 and "optimizer" in lines[host + 1] and "weights" in lines[host + 1]


def test_the_bottleneck_is_a_lane_or_the_dependencies(case: Case) -> None:
    plain = render(plan_of(case, case.decide("gpu/gpu")), case.graph, case.layout)
    assert "bottleneck GPU compute, 100% of the step" in plain
    slow = dataclasses.replace(case, spec=dataclasses.replace(case.spec, host_adam_params_per_second=1e6))
    assert "bottleneck CPU updates" in render(plan_of(slow, slow.decide("gpu/host")), case.graph, case.layout)
    waiting = plan_of(case, case.decide("host/gpu", depth=0))
    busy = dict.fromkeys(waiting.estimate.busy_seconds, waiting.estimate.step_seconds / 2)
    waiting = dataclasses.replace(waiting, estimate=dataclasses.replace(waiting.estimate, busy_seconds=busy))
    assert "bottleneck dependencies" in render(waiting, case.graph, case.layout)
    plan = plan_of(case, case.decide("gpu/gpu"))
    starved = dataclasses.replace(
        plan, estimate=dataclasses.replace(plan.estimate, launch_bound_seconds=plan.estimate.step_seconds / 4)
    )
    assert "100% of the step (25% of it launch-bound" in render(starved, case.graph, case.layout)


def test_tokens_per_second_count_all_micro_batches(case: Case) -> None:
    plan = plan_of(case)
    plan = dataclasses.replace(
        plan,
        estimate=dataclasses.replace(plan.estimate, step_seconds=2.0),
        step_config=dataclasses.replace(plan.step_config, accumulate=4),
    )
    assert "step  2 s predicted, 256 tokens/s" in render(plan, case.graph, case.layout)
    other = dataclasses.replace(plan, inputs={"pixels": (1, 3, 8, 8)})
    assert "tokens/s" not in render(other, case.graph, case.layout)


def test_every_number_says_where_it_comes_from(case: Case) -> None:
    """Trap I8."""
    plan = plan_of(case)
    text = " ".join(render(plan, case.graph, case.layout).split())
    assert plan.provenance in text and plan.search in text


def test_it_is_narrow_and_summary_is_one_line() -> None:
    for seed in range(30):
        case = random_case(seed, max_layers=6)
        plan = plan_of(case)
        assert all(
            len(line) <= 104 and line == line.rstrip() for line in render(plan, case.graph, case.layout).splitlines()
        )
        assert "\n" not in summary(plan) and "a step" in summary(plan)
