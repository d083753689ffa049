"""The ledger of activations against sums made by hand, one rule at a time."""

import dataclasses
from typing import Any

import pytest
from synthetic import NOTHING, Case, make_case, random_case, random_decision

from outsize.model.work import SharedTensor, Work
from outsize.planner.memory import HighWater, high_water, ledger
from outsize.schedule.schedule import Schedule, compile_schedule


def work(**bytes_of: int) -> Work:
    return dataclasses.replace(NOTHING, **bytes_of)  # type: ignore[arg-type]


def measure(
    case: Case, works: list[Work], held: int = 0, shared: tuple[SharedTensor, ...] = (), strategies: str = "keep"
) -> HighWater:
    """The high-water above what is always allocated."""
    place = dataclasses.replace(case.place(case.decide(strategies=strategies)), work=tuple(works), shared=shared)
    found = high_water(place, compile_schedule(place), held)
    return HighWater(gpu_bytes=found.gpu_bytes - place.gpu_bytes, peak_at=found.peak_at)


@pytest.fixture
def case() -> Case:
    return make_case(2)  # calls: stem, two layers, head


def test_what_is_always_there_is_a_peak_of_its_own(case: Case) -> None:
    assert measure(case, [NOTHING] * 4) == HighWater(gpu_bytes=0, peak_at="rest")


def test_a_visit_peaks_above_what_earlier_visits_left(case: Case) -> None:
    left = work(forward_delta_bytes=100, forward_peak_bytes=150)
    assert measure(case, [left, left, left, left]) == HighWater(gpu_bytes=450, peak_at="F3")


def test_backward_starts_from_what_forward_left_and_gives_it_back(case: Case) -> None:
    left = work(forward_delta_bytes=100, forward_peak_bytes=100, backward_peak_bytes=30, backward_delta_bytes=-100)
    assert measure(case, [left] * 4) == HighWater(gpu_bytes=430, peak_at="B3")
    # A later backward with a high peak of its own, after three calls' bytes are gone.
    assert measure(case, [dataclasses.replace(left, backward_peak_bytes=900), left, left, left]) == HighWater(
        gpu_bytes=1000, peak_at="B0"
    )


def test_the_outputs_of_the_last_step_are_held_in_forward_and_gone_in_backward(case: Case) -> None:
    costs = [work(forward_peak_bytes=100, backward_peak_bytes=120)] * 4
    assert measure(case, costs, held=50) == HighWater(gpu_bytes=150, peak_at="F0")
    assert measure(case, costs, held=10) == HighWater(gpu_bytes=120, peak_at="B3")


def test_sent_activations_count_until_the_visit_after_the_next_opens(case: Case) -> None:
    """`R v` stands behind `F v+1`: the copy has that long."""
    sent = work(forward_delta_bytes=100, forward_peak_bytes=100, sent_bytes=100, released_bytes=100)
    plain = work(forward_peak_bytes=10)
    place = dataclasses.replace(case.place(case.decide()), work=(plain, sent, plain, plain))
    assert "F1 S1 F2 R1 F3" in str(compile_schedule(place))
    assert measure(case, [plain, sent, plain, plain]) == HighWater(gpu_bytes=110, peak_at="F2")
    assert measure(case, [plain, sent, plain, dataclasses.replace(plain, forward_peak_bytes=109)]) == HighWater(
        gpu_bytes=110, peak_at="F2"
    )


def tensor(**facts: Any) -> SharedTensor:
    """100 bytes that the first layer (call 1) returns."""
    return SharedTensor(
        **({"call": 1, "role": "output", "number": 0, "num_bytes": 100, "allocated_in": 1, "freed_in": 3} | facts)
    )


def test_what_is_freed_in_a_forward_is_gone_before_the_peak(case: Case) -> None:
    made, plain = work(forward_peak_bytes=100), work(forward_peak_bytes=10)
    assert measure(case, [plain, made, plain, plain], shared=(tensor(),)) == HighWater(gpu_bytes=110, peak_at="F2")
    assert measure(case, [plain, made, plain, work(forward_peak_bytes=110)], shared=(tensor(),)) == HighWater(
        gpu_bytes=110, peak_at="F2"
    )
    assert measure(case, [plain, made, plain, work(forward_peak_bytes=111)], shared=(tensor(),)) == HighWater(
        gpu_bytes=111, peak_at="F3"
    )


def test_what_is_freed_as_the_forward_returns_is_there_at_all_peaks_of_the_forward(case: Case) -> None:
    made, head = work(forward_peak_bytes=100), work(forward_peak_bytes=10, backward_peak_bytes=105)
    assert measure(case, [NOTHING, made, NOTHING, head], shared=(tensor(freed_in=4),)) == HighWater(
        gpu_bytes=110, peak_at="F3"
    )
    assert measure(case, [NOTHING, made, NOTHING, head], shared=(tensor(freed_in=-1),)) == HighWater(
        gpu_bytes=205, peak_at="B3"
    )


def test_a_shared_tensor_is_freed_once_with_the_first_layer_that_keeps_it(case: Case) -> None:
    """Born in the stem's work, taken by both layers; who keeps it depends on the strategies, so its death is in
    nobody's work.
    """
    stem, layer = (
        work(forward_delta_bytes=100, forward_peak_bytes=100),
        work(forward_peak_bytes=10, backward_peak_bytes=30),
    )
    works = [
        dataclasses.replace(stem, backward_peak_bytes=125),
        layer,
        layer,
        dataclasses.replace(layer, forward_peak_bytes=20),
    ]
    mask = tensor(role="argument", allocated_in=-1, held_by=((1, ("keep",)), (2, ("keep",))))
    # Kept: alive in the backward of both layers, gone when the stem's begins.
    assert measure(case, works, shared=(mask,)) == HighWater(gpu_bytes=130, peak_at="B3")
    # Not kept: gone before the head reaches its forward peak.
    assert measure(case, works, shared=(mask,), strategies="recompute") == HighWater(gpu_bytes=125, peak_at="B0")
    assert (
        measure(case, works, shared=(dataclasses.replace(mask, freed_in=-1),), strategies="recompute").gpu_bytes == 225
    ), "never dies: counted to the end"


@pytest.mark.parametrize("maker", ["keep", "recompute"])
@pytest.mark.parametrize("taker", ["keep", "recompute", "offload"])
def test_an_output_is_freed_by_the_later_of_two_backwards(case: Case, maker: str, taker: str) -> None:
    """The layer that makes it keeps it with one strategy, the one that takes it with two."""
    output = tensor(held_by=((1, ("keep",)), (2, ("keep", "recompute"))), sent_by=((2, ("offload",)),), freed_in=3)
    sends = work(sent_bytes=100 if taker == "offload" else 0)
    place = dataclasses.replace(
        case.place(case.decide(strategies=["keep", maker, taker, "keep"])),
        work=(NOTHING, NOTHING, sends, NOTHING),
        shared=(output,),
    )
    schedule = compile_schedule(place)
    entries = {str(e.action): e for e in ledger(schedule, place, 0)}
    is_released = maker == "recompute" and taker == "offload"
    assert entries["F1"].closes == entries["F3"].opens == 100 and entries["B1"].closes == 0
    assert entries["B3"].opens == (0 if is_released else 100)
    assert entries["B2"].closes == (100 if maker == "keep" else 0)
    if taker == "offload":
        assert entries["R2"].closes == (0 if is_released else 100)


def test_what_is_freed_early_in_a_backward_is_gone_before_its_peak(case: Case) -> None:
    works = [NOTHING, work(forward_peak_bytes=100), work(backward_peak_bytes=50), NOTHING]
    kept = tensor(held_by=((2, ("keep",)),))
    assert measure(case, works, shared=(kept,)) == HighWater(gpu_bytes=150, peak_at="B2")
    assert measure(case, works, shared=(dataclasses.replace(kept, freed_early_in=((2, ("keep",)),)),)) == HighWater(
        gpu_bytes=100, peak_at="F1"
    )
    # Another call holds it longer.
    longer = tensor(held_by=((1, ("keep",)), (2, ("keep",))), freed_early_in=((2, ("keep",)),))
    assert measure(case, works, shared=(longer,)) == HighWater(gpu_bytes=150, peak_at="B2")


def test_what_is_sent_lives_until_the_release_or_as_long_as_a_frame_holds_it(case: Case) -> None:
    sends = work(sent_bytes=100)
    for freed_in, closes in ((2, 0), (3, 100)):
        output = tensor(sent_by=((1, ("keep",)),), freed_in=freed_in)
        place = dataclasses.replace(
            case.place(case.decide()), work=(NOTHING, sends, NOTHING, NOTHING), shared=(output,)
        )
        schedule = compile_schedule(place)
        entries = {str(e.action): e for e in ledger(schedule, place, 0)}
        assert (
            entries["F2"].opens == entries["R1"].opens == 100
            and entries["R1"].closes == closes
            and entries["F3"].opens == 0
        )


def test_a_tensor_that_one_strategy_makes_is_there_with_that_strategy_alone(case: Case) -> None:
    """A graph that nothing uses, and that dies with the next layer."""
    graph, plain = tensor(role="saved", only_under=("keep",), freed_in=3), work(forward_peak_bytes=10)
    assert measure(case, [plain] * 4, shared=(graph,)).gpu_bytes == 110
    assert measure(case, [plain] * 4, shared=(graph,), strategies="recompute").gpu_bytes == 10


def test_a_region_allocates_what_it_does_after_the_strategy_of_the_layer_before_it(case: Case) -> None:
    head = work(forward_peak_bytes=10)
    trace = dataclasses.replace(
        case.trace, calls=(*case.trace.calls[:-1], {"keep": head, "after swap": work(forward_peak_bytes=20)})
    )
    assert trace.strategies(3) == ("keep",)
    assert [
        trace.works(("keep", "swap", last, "keep"))[3].forward_peak_bytes
        for last in ("keep", "recompute", "offload", "swap")
    ] == [10, 10, 10, 20]


def test_all_kinds_of_backward_have_the_same_peak() -> None:
    """Updates and copies allocate nothing, so which backward is walked does not matter."""
    for seed in range(30):
        case = random_case(seed)
        place = case.place(random_decision(case, seed))
        schedule = compile_schedule(place)
        peaks = {
            high_water(place, Schedule({s.name: s for s in (schedule.segments["forward"], backward)}), 64)
            for backward in schedule.backwards
        }
        assert len(peaks) == 1


def test_homes_change_what_is_allocated_and_nothing_else() -> None:
    """Trap G8: each byte has one owner."""
    case = make_case(3, 2)
    rests = set()
    for homes in ("gpu/gpu", "gpu/host", "host/gpu", "host/host"):
        place = case.place(case.decide(homes, "recompute", depth=1))
        rests.add(high_water(place, compile_schedule(place), case.trace.held_bytes).gpu_bytes - place.gpu_bytes)
    assert len(rests) == 1
