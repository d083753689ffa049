"""Answers are searches with one thing changed: recipes are pins, worth is another machine, the least is where a search
begins to succeed.
"""

from dataclasses import replace

import pytest
from synthetic import make_case, make_step_config

from outsize.base.errors import PlanInfeasible
from outsize.hardware.gpu_budget import GpuBudget
from outsize.planner.explain import Explanation, Problem, explain, what_if

HUGE = 10**12


def problem(gpu_bytes: int = HUGE, host_bytes: int = HUGE, num_layers: int = 6) -> Problem:
    case = make_case(num_layers, 2, step_config=make_step_config(update="in_backward"))
    return Problem(
        graph=case.graph,
        layout=case.layout,
        trace=case.trace,
        spec=case.spec,
        step_config=case.step_config,
        gpu=GpuBudget(total_bytes=gpu_bytes),
        host_bytes=host_bytes,
    )


@pytest.fixture(scope="module")
def tight() -> Problem:
    """Half of what the plain run takes."""
    return problem(problem().solve().estimate.gpu_bytes // 2)


@pytest.fixture(scope="module")
def explained(tight: Problem) -> Explanation:
    return explain(tight, tight.solve())


def test_no_recipe_beats_the_plan_and_those_that_do_not_fit_say_what_they_need(explained: Explanation) -> None:
    chosen = explained.plan.estimate.step_seconds
    by_name = {answer.name: answer for answer in explained.recipes}
    assert all(a.step_seconds is None or a.step_seconds >= 0.99 * chosen for a in explained.recipes)
    assert (
        by_name["everything on the GPU"].step_seconds is None
        and "does not fit" in by_name["everything on the GPU"].note
    )
    assert by_name["weights and optimizer on the host, layers recomputed"].step_seconds is not None


def test_a_better_machine_is_never_slower_and_the_best_upgrade_is_to_the_bottleneck(explained: Explanation) -> None:
    chosen = explained.plan.estimate.step_seconds
    seconds = {answer.name: answer.step_seconds for answer in explained.hardware_upgrades}
    assert all(s is not None and s <= 1.01 * chosen for s in seconds.values())
    busy = explained.plan.estimate.busy_seconds
    binding = max(busy, key=lambda lane: busy[lane])
    words = {"compute": "GPU compute", "h2d": "copies", "d2h": "copies", "host": "CPU updates"}[binding]
    faster = {name: s for name, s in seconds.items() if "twice" in name}
    assert words in min(faster, key=lambda name: faster[name] or 0.0)


def test_the_least_is_where_a_search_begins_to_succeed(tight: Problem, explained: Explanation) -> None:
    assert explained.least_gpu_bytes is not None and explained.least_host_bytes is not None
    replace(tight, gpu=GpuBudget(total_bytes=explained.least_gpu_bytes)).solve()
    replace(tight, host_bytes=explained.least_host_bytes).solve()
    for smaller in (
        replace(tight, gpu=GpuBudget(total_bytes=explained.least_gpu_bytes - 1)),
        replace(tight, host_bytes=explained.least_host_bytes - 1),
    ):
        with pytest.raises(PlanInfeasible):
            smaller.solve()


def test_where_everything_fits_and_there_is_no_host_the_plain_recipe_is_the_plan() -> None:
    roomy = problem(host_bytes=0)
    found = explain(roomy, roomy.solve())
    assert found.recipes[0].step_seconds == found.plan.estimate.step_seconds
    assert str(found).endswith("0 B host with this GPU")


def test_it_reads_as_a_table_and_what_if_as_two_lines(tight: Problem, explained: Explanation) -> None:
    lines = str(explained).splitlines()
    assert [line[:9].strip() for line in lines] == ["chosen", "recipes", "", "", "", "upgrades", "", "", "", "minimum"]
    more, least = what_if(tight, explained.plan, "rtx3090").splitlines()
    assert more.startswith("more    4.00 GiB more GPU memory: ") and least.endswith(
        "smallest machine of the catalog: rtx3090"
    )
    assert "no machine" in what_if(tight, explained.plan, None)
