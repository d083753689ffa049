"""Plan files come back as they were; what does not belong or does not add up is refused with the reason."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import Case, make_case, make_homes, random_case

from outsize.base.errors import PlanInvalid
from outsize.base.records import fingerprint
from outsize.hardware.gpu_budget import GpuBudget
from outsize.layout.chunks import pack
from outsize.model.work import SharedTensor
from outsize.planner.search import search
from outsize.schedule.check import check, load, save
from outsize.schedule.plan import Homes, Plan

HUGE = 10**15


def plan_of(case: Case, gpu: int = HUGE) -> Plan:
    return search(
        case.graph,
        case.layout,
        case.trace,
        case.spec,
        case.step_config,
        gpu=GpuBudget(total_bytes=gpu),
        host_bytes=HUGE,
    )


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(4, frozen=2)


@pytest.fixture(scope="module")
def plan(case: Case) -> Plan:
    return plan_of(case)


def with_decision(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, decision=dataclasses.replace(plan.decision, **changes))


def test_buffers_that_were_cast_are_distinguished_from_another_model(case: Case, plan: Plan) -> None:
    cast = dataclasses.replace(case.graph, buffer_bytes=case.graph.buffer_bytes + 64)
    with pytest.raises(
        PlanInvalid,
        match=rf"for {case.graph.buffer_bytes} bytes of buffers, and the model has {cast.buffer_bytes}\. model\.to",
    ):
        check(plan, cast, case.layout)


def test_found_plans_pass() -> None:
    for seed in range(30):
        case = random_case(seed)
        check(plan_of(case), case.graph, case.layout)


def test_a_plan_for_another_model_is_refused_with_the_counts_of_both(case: Case, plan: Plan) -> None:
    other = make_case(5)
    with pytest.raises(PlanInvalid, match=r"another model .*6 calls, 6 chunks.* this one .*7 calls, 7 chunks"):
        check(plan, other.graph, other.layout)


def test_a_plan_for_another_layout_is_refused() -> None:
    case = make_case(3, 2)
    plan = plan_of(case)
    with pytest.raises(PlanInvalid, match="chunk_bytes"):
        check(plan, case.graph, pack(case.graph, chunk_bytes=2 * case.layout.chunk_bytes))


def edits(plan: Plan) -> dict[str, tuple[Plan, str]]:
    decision, estimate, step_config = plan.decision, plan.estimate, plan.step_config
    mixed = make_homes("gpu", "host")
    strategies = list(decision.strategies)

    def strategy(call: int, name: str) -> Plan:
        return with_decision(plan, strategies=tuple([*strategies[:call], name, *strategies[call + 1 :]]))

    def work(call: int, **changes: Any) -> Plan:
        return dataclasses.replace(
            plan, work=tuple(dataclasses.replace(w, **changes) if v == call else w for v, w in enumerate(plan.work))
        )

    tensor = SharedTensor(call=2, role="output", number=0, num_bytes=8, allocated_in=2, freed_in=4)
    return {
        "another format": (dataclasses.replace(plan, format=99), "format 99"),
        "too few homes": (with_decision(plan, homes=decision.homes[1:]), "5 homes, and this model needs 6"),
        "too many strategies": (
            with_decision(plan, strategies=(*strategies, "keep")),
            "7 strategies, and this model needs 6",
        ),
        "too little work": (dataclasses.replace(plan, work=plan.work[1:]), "5 work entries, and this model needs 6"),
        "a negative depth": (with_decision(plan, depth=-1), "depth is -1, below 0"),
        "no micro-batch": (
            dataclasses.replace(plan, step_config=dataclasses.replace(step_config, accumulate=0)),
            "accumulate is 0, below 1",
        ),
        "a frozen chunk with an optimizer": (
            with_decision(plan, homes=(mixed, *decision.homes[1:])),
            "frozen chunk 0 .*embed.weight",
        ),
        "state on the GPU that the host updates": (
            with_decision(plan, homes=(*decision.homes[:-1], Homes(weights="gpu", state="gpu", update="host"))),
            r"chunk 5 \(lm_head.weight, …\) has its optimizer state on the GPU and its update on the host",
        ),
        "a region that recomputes": (strategy(5, "recompute"), "head is recompute, but head is not a layer"),
        "a strategy without a backward": (strategy(1, "recompute"), r"model\.layers\.0 has no backward"),
        "an offload that sends nothing": (
            strategy(3, "offload"),
            r"sent_bytes of model\.layers\.2 is 0, but its strategy offload sends some",
        ),
        "a keep that sends": (
            work(3, sent_bytes=5),
            r"sent_bytes of model\.layers\.2 is 5, but its strategy keep sends none",
        ),
        "a tensor of a call that is not there": (
            dataclasses.replace(plan, shared=(dataclasses.replace(tensor, held_by=((9, ("keep",)),)),)),
            "calls 0 to",
        ),
        "a tensor that dies after the end": (
            dataclasses.replace(plan, shared=(dataclasses.replace(tensor, freed_in=9),)),
            "freed_in",
        ),
        "seconds that are none": (work(3, forward_seconds=float("nan")), r"seconds of model\.layers\.2 are"),
        "more GPU memory than the budget": (
            dataclasses.replace(plan, gpu_budget_bytes=estimate.gpu_bytes - 1),
            "GPU budget",
        ),
        "more host memory than the budget": (dataclasses.replace(plan, host_budget_bytes=-1), "host budget"),
        "homes that were edited": (
            with_decision(plan, homes=(*decision.homes[:-1], make_homes("host", "host"))),
            "memory, but its decision takes",
        ),
    }


EDITS = list(edits(plan_of(make_case(4, frozen=2))))


@pytest.mark.parametrize("edit", EDITS)
def test_it_refuses(edit: str, case: Case, plan: Plan) -> None:
    check(plan, case.graph, case.layout)
    changed, reason = edits(plan)[edit]
    with pytest.raises(PlanInvalid, match=reason):
        check(changed, case.graph, case.layout)


def test_a_saved_plan_comes_back_as_it_was(tmp_path: Path) -> None:
    for seed in range(10):
        plan = plan_of(random_case(seed))
        save(plan, tmp_path / "plan.json")
        again = load(tmp_path / "plan.json")
        assert again == plan and fingerprint(again) == fingerprint(plan)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"], "nothing is left beside it"


def test_a_truncated_file_is_refused_by_name(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "plan.json"
    save(plan, path)
    text = path.read_text()
    for end in (0, 1, len(text) // 2, len(text) - 3):
        path.write_text(text[:end])
        with pytest.raises(PlanInvalid, match=r"plan\.json.*truncated"):
            load(path)


def test_a_foreign_file_is_refused_by_name(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "other.json"
    for content, reason in (
        (b'{"model": 1}', "missing"),
        (b"[1, 2]", "mapping"),
        (b"\xff\xfe\x00\x81", "not UTF-8 text"),
    ):
        path.write_bytes(content)
        with pytest.raises(PlanInvalid, match=rf"other\.json.*{reason}"):
            load(path)
    save(plan, path)
    data = json.loads(path.read_text())
    data["decision"]["strategies"][0] = "teleport"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanInvalid, match=r"strategies\.0: .teleport. is not one of"):
        load(path)
    with pytest.raises(PlanInvalid, match="does not exist"):
        load(tmp_path / "nothing.json")


def test_a_failed_save_leaves_the_file_that_was_there(tmp_path: Path, plan: Plan) -> None:
    path = tmp_path / "plan.json"
    save(plan, path)
    before = path.read_text()
    with pytest.raises(TypeError):
        save(dataclasses.replace(plan, inputs={"x": object()}), path)  # type: ignore[dict-item]
    assert path.read_text() == before and len(list(tmp_path.iterdir())) == 1
