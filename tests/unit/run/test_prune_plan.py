"""The memory plan of a pruning run: groups, rounds, and what is said when it does not fit."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outsize.base.errors import PlanInfeasible
from outsize.hardware.gpu_budget import GpuBudget
from outsize.run.prune_plan import Budget, LayerCost, PrunePlan, VariantCost, plan
from outsize.transfer.batch_cache import BatchSpec

SPEC = BatchSpec((1, 50), torch.bfloat16)  # 100 bytes
VARIANTS = tuple(
    VariantCost(
        name=name, state_bytes=state, weight_bytes=state // 7, saved_bytes=state, active_bytes=active, seconds=2.0,
        step_seconds=1.0,
    )
    for name, state, active in (("a", 700, 90), ("b", 1400, 40), ("c", 700, 300))
)  # fmt: skip
COST = LayerCost(
    layers=(0, 2), weight_bytes=500, teacher_bytes=160, importance_bytes=50, teacher_seconds=1.0, variants=VARIANTS
)
FIXED = 1000
MINIMUM = FIXED + 200 + 500 + 1400 + 160 - 100
"""b is the largest: two slots, the layer, b, and the teacher's forward without an output on its way to the host."""


def planned(gpu: int = 10**6, host: int = 10**6, disk: int = 0, **settings: Any) -> PrunePlan:
    return planned_of(COST, gpu, host, disk, **settings)


def planned_of(cost: LayerCost, gpu: int = 10**6, host: int = 10**6, disk: int = 0, **settings: Any) -> PrunePlan:
    given: dict[str, Any] = dict(
        fixed_bytes=FIXED, fixed_host_bytes=0, train=[SPEC] * 12, validation=[SPEC] * 2, calibration=[], accumulate=3,
        num_layers=4, keeps_best=False,
    )  # fmt: skip
    output = settings.pop("output", 10**6)
    budget = Budget(gpu=GpuBudget(total_bytes=gpu), host_bytes=host, disk_bytes=disk, output_bytes=output)
    return plan([cost], budget, **{**given, **settings})


def test_all_variants_together_if_they_fit() -> None:
    made = planned()
    assert made.groups == {0: (("a", "b", "c"),), 2: (("a", "b", "c"),)} and made.num_groups == 1
    assert made.gpu_bytes == FIXED + 200 + 500 + 2800 + 300
    assert planned(gpu=made.gpu_bytes).groups == made.groups
    assert planned(gpu=made.gpu_bytes - 1).groups[0] == (("a", "b"), ("c",))


def test_the_minimum_is_named_and_is_enough() -> None:
    with pytest.raises(PlanInfeasible, match=r"gpu_memory .* is too small.* at least") as caught:
        planned(gpu=MINIMUM - 1)
    assert (caught.value.resource, caught.value.needed_bytes) == ("gpu", MINIMUM)
    made = planned(gpu=MINIMUM)
    assert made.groups[2] == (("a",), ("b",), ("c",)) and made.gpu_bytes == MINIMUM


def test_hidden_states_go_to_host_memory_then_to_a_file_then_come_in_rounds() -> None:
    layer = 500 + 400  # as it is read, and all variants as they are made
    assert planned(host=layer + 1400).rounds == (range(12),) and not planned(host=layer + 1400).in_file
    in_file = planned(host=layer + 1399, disk=1400)
    assert in_file.in_file and in_file.rounds == (range(12),) and in_file.disk_bytes > planned().disk_bytes
    rounds = planned(host=layer + 1399)
    assert rounds.rounds == (range(6), range(6, 12)) and not rounds.in_file
    assert planned(host=layer + 500).rounds == tuple(range(at, at + 3) for at in range(0, 12, 3))
    with pytest.raises(PlanInfeasible, match=r"host_memory .* at least") as caught:
        planned(host=layer + 499)
    assert caught.value.needed_bytes == layer + 500
    with pytest.raises(PlanInfeasible, match="importance_tokens"):
        planned(host=layer + 700, calibration=[SPEC] * 8)


def test_between_rounds_the_states_of_all_variants_are_on_disk() -> None:
    weights = 2 * sum(variant.weight_bytes for variant in VARIANTS)
    assert planned().disk_bytes == weights + 2800
    assert planned(host=900 + 1399).disk_bytes == weights + 2 * 2800


def test_hidden_states_for_distillation_are_kept_in_one_round_and_if_there_is_space() -> None:
    kept: dict[str, Any] = dict(kept=[SPEC] * 8, num_after=1)
    one, without = planned(**kept), planned()
    assert (one.kept_bytes, one.disk_bytes) == (800, without.disk_bytes + 800)
    assert one.seconds - without.seconds == pytest.approx(12 * 1.0)
    assert planned(**kept, output=one.disk_bytes).kept_bytes == 800
    assert planned(**kept, output=one.disk_bytes - 1).kept_bytes == 0
    rounds = planned(host=900 + 1399, **kept)
    assert len(rounds.rounds) == 2 and rounds.kept_bytes == 0
    # The last layer passes its hidden states on too.
    last = replace(COST, layers=(3,), variants=VARIANTS[:2])
    more = planned_of(last, **kept).gpu_bytes - planned_of(last).gpu_bytes
    assert more == SPEC.num_bytes


def test_hours_count_a_teacher_pass_per_group() -> None:
    one, three = planned(), planned(gpu=MINIMUM)
    variants = 3 * (2.0 + 1.0 / 3)
    assert one.seconds == pytest.approx(12 * (2 * (1.0 + variants) + 2 * 1.0))
    assert three.seconds - one.seconds == pytest.approx(12 * 2 * 2 * 1.0)
    timed = planned_of(replace(COST, load_seconds=5.0, make_seconds=7.0))
    assert timed.seconds - one.seconds == pytest.approx(4 * 5.0 + 2 * 7.0)
    unknown = replace(COST, teacher_seconds=0.0)
    assert unknown.teacher_seconds == 0.0
