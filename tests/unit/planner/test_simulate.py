"""Time: lanes, waits and steady state, on schedules small enough to add up by hand."""

import dataclasses
import random

import pytest
from synthetic import Case, make_case, make_step_config, random_case, random_decision

from outsize.hardware.lanes import LEAD_SECONDS, LaunchClock, copy_seconds, slowed, update_seconds
from outsize.model.work import Work
from outsize.planner.memory import high_water
from outsize.planner.simulate import Walk, simulate, step_seconds
from outsize.schedule.plan import Estimate
from outsize.schedule.schedule import compile_schedule


def estimate(case: Case, homes: str, strategy: str = "keep", depth: int = 0, host_update_interval: int = 1) -> Estimate:
    place = case.place(case.decide(homes, strategy, depth, host_update_interval))
    return simulate(place, compile_schedule(place), case.spec, held_bytes=case.trace.held_bytes)


def test_the_plain_run_takes_its_compute_and_its_updates() -> None:
    case = make_case(3)
    works = [case.trace.work(v, "keep") for v in range(5)]
    compute = sum(w.forward_seconds + w.backward_seconds for w in works)
    updates = sum(update_seconds(case.spec, "compute", 26 * chunk.numel) for chunk in case.layout.chunks)
    found = estimate(case, "gpu/gpu")
    assert found.step_seconds == pytest.approx(compute + updates)
    assert found.busy_seconds == pytest.approx({"compute": compute + updates, "h2d": 0, "d2h": 0, "host": 0})


def test_streaming_without_depth_waits_for_every_load() -> None:
    """One slot: load, compute, load, compute. In forward nothing overlaps."""
    case = make_case(3, frozen=4)  # only the head trains: backward is the head's alone
    place = case.place(case.decide("host/host", depth=0))
    walk = Walk(place, case.spec)
    end = 0.0
    for action in compile_schedule(place)["forward"]:
        end = walk.run(action)
    loads = sum(copy_seconds(case.spec, "h2d", chunk.nbytes) for chunk in case.layout.chunks)
    assert end == pytest.approx(loads + sum(case.trace.work(v, "keep").forward_seconds for v in range(5)))


def test_depth_hides_loads_behind_compute() -> None:
    case = make_case(8)
    shallow, deep = estimate(case, "host/gpu", depth=0), estimate(case, "host/gpu", depth=2)
    assert deep.step_seconds < shallow.step_seconds
    assert deep.gpu_bytes > shallow.gpu_bytes


def test_no_step_is_faster_than_its_busiest_lane() -> None:
    for seed in range(60):
        case = random_case(seed)
        place = case.place(random_decision(case, seed))
        seconds, busy, _ = step_seconds(place, compile_schedule(place), case.spec)
        assert seconds >= max(busy.values()) * (1 - 1e-9)


def test_the_quick_walk_gives_the_floats_of_the_walk_through_hazards() -> None:
    """Trap G6: one account of time. Waits that follow from others cannot move a start."""
    for seed in range(150):
        case = random_case(seed, max_layers=5)
        place = case.place(random_decision(case, seed + 1))
        schedule = compile_schedule(place)
        walk = Walk(place, case.spec)
        ends = [walk.run_step(schedule) for _ in range(3)]
        assert step_seconds(place, schedule, case.spec)[0] == ends[2] - ends[1]


def issued_by_a_thread(
    case: Case,
    seed: int = 0,
    *,
    forward: float = 0.0,
    backward: float = 0.0,
    launch_slowdown: float = 1.0,
    waits: bool = False,
) -> Case:
    """The same with a thread that takes time to issue; with a `seed`, random times."""
    rng = random.Random(seed)

    def timed(work: Work) -> Work:
        if not seed:
            return dataclasses.replace(
                work, forward_launch_seconds=forward, backward_launch_seconds=backward, forward_syncs_host=waits
            )
        seconds = {
            f"{way}_launch_seconds": rng.choice((0.5, 1.0, 2.0)) * getattr(work, f"{way}_seconds")
            for way in ("forward", "backward")
        }
        return dataclasses.replace(
            work, **seconds, forward_syncs_host=rng.random() < 0.3, backward_syncs_host=rng.random() < 0.2
        )

    calls = tuple({strategy: timed(work) for strategy, work in call.items()} for call in case.trace.calls)
    spec = dataclasses.replace(case.spec, launch_slowdown=rng.uniform(1.0, 2.0) if seed else launch_slowdown)
    return dataclasses.replace(case, trace=dataclasses.replace(case.trace, calls=calls), spec=spec)


def test_both_walks_know_the_thread_that_issues() -> None:
    longer = 0
    for seed in range(1, 150):
        plain = random_case(seed, max_layers=5)
        case = issued_by_a_thread(plain, seed)
        decision = random_decision(case, seed + 1)
        place = case.place(decision)
        schedule = compile_schedule(place)
        walk = Walk(place, case.spec)
        ends = []
        for step in range(3):
            before = dict(walk.clock.busy)
            ends.append(walk.run_step(schedule))
            if step == 2:
                took = {lane: seconds - before[lane] for lane, seconds in walk.clock.busy.items()}
        seconds, busy, starved = step_seconds(place, schedule, case.spec)
        assert seconds == ends[2] - ends[1] and busy == pytest.approx(took)
        ahead = step_seconds(plain.place(decision), schedule, plain.spec)
        assert busy["compute"] - starved == pytest.approx(ahead[1]["compute"]) and starved >= ahead[2] == 0.0
        longer += seconds > ahead[0]
    assert longer > 100


def test_a_thread_that_is_faster_than_the_device_costs_nothing_and_a_slower_one_is_the_step() -> None:
    case = make_case(6)
    work = case.trace.work(1, "keep")
    case = dataclasses.replace(case, spec=dataclasses.replace(case.spec, launch_seconds=0.0))
    fast = issued_by_a_thread(case, forward=0.9 * work.forward_seconds, backward=0.9 * work.backward_seconds)
    slow = issued_by_a_thread(case, forward=2 * work.forward_seconds, backward=2 * work.backward_seconds)
    assert estimate(fast, "gpu/gpu").step_seconds == pytest.approx(estimate(case, "gpu/gpu").step_seconds)
    assert estimate(slow, "gpu/gpu").step_seconds == pytest.approx(
        8 * 2 * (work.forward_seconds + work.backward_seconds)
    )


def test_what_the_gpu_waits_for_python_is_distinguished_from_computing() -> None:
    case = make_case(6)
    work = case.trace.work(1, "keep")
    slow = issued_by_a_thread(case, forward=2 * work.forward_seconds, backward=2 * work.backward_seconds)
    found, plain = estimate(slow, "gpu/gpu"), estimate(case, "gpu/gpu")
    assert plain.launch_bound_seconds == 0.0 < found.launch_bound_seconds
    assert found.busy_seconds["compute"] - found.launch_bound_seconds == pytest.approx(plain.busy_seconds["compute"])


def test_a_lead_of_the_backward_carries_over_until_the_thread_waits() -> None:
    """Backwards are issued in no time, forwards in twice what they compute: behind a wait in the forward, or at the end
    of a step that reads its norm, nothing of the lead is left."""
    for update in ("in_backward", "after_step"):
        case = make_case(6, step_config=make_step_config(update=update))
        case = dataclasses.replace(case, spec=dataclasses.replace(case.spec, launch_seconds=0.0))
        forward = case.trace.work(1, "keep").forward_seconds
        ahead, waiting = (issued_by_a_thread(case, forward=2 * forward, waits=waits) for waits in (False, True))
        computed = estimate(case, "gpu/gpu").step_seconds
        assert estimate(waiting, "gpu/gpu").step_seconds == pytest.approx(computed + 8 * forward)
        if update == "in_backward":
            assert estimate(ahead, "gpu/gpu").step_seconds == pytest.approx(computed)
        else:
            assert computed < estimate(ahead, "gpu/gpu").step_seconds <= computed + 8 * forward


def test_the_thread_gets_ahead_no_further_than_the_device_queues() -> None:
    """Layers of a second, and a head that is issued in no time and computes for an hour: of that hour, a tenth of a
    second is a lead.
    """
    clock = LaunchClock(1.0)
    clock.issue("compute", 3600.0, (), 0.0, waits=False)
    end = clock.issue("compute", 1.0, (), 2.0, waits=False)
    assert end == pytest.approx(3600 - LEAD_SECONDS + 2.0)


def test_the_thread_is_held_up_by_what_the_host_has_not_updated_yet() -> None:
    """A copy that waits for an update is handed over, and the copies behind it; what computes with it cannot be."""
    clock = LaunchClock(1.0)
    update = clock.issue("host", 5.0, (), 0.1, waits=False), clock.visible_at
    assert clock.issued == pytest.approx(0.1)
    copy = clock.issue("h2d", 1.0, [update], 0.1, waits=False), clock.visible_at
    other = clock.issue("h2d", 1.0, (), 0.1, waits=False), clock.visible_at
    assert (
        copy == pytest.approx((6.0, 5.0)) and other == pytest.approx((7.0, 5.0)) and clock.issued == pytest.approx(0.3)
    )
    clock.issue("compute", 1.0, [other], 0.1, waits=False)
    assert clock.issued == pytest.approx(6.9 + 0.1), (
        "told at 5, and no more than the queue's depth before it starts at 7"
    )
    clock = LaunchClock(1.0)
    late = clock.issue("h2d", 9.0, (), 0.1, waits=False), clock.visible_at
    clock.issue("compute", 1.0, [late], 0.1, waits=False)
    assert late[1] == 0.0, "what the device does, the device waits for"


@pytest.mark.parametrize(
    ("issue", "computing", "busy", "taken"),
    [
        (2.0, 0.0, 9.0, 3.0),
        (2.0, 0.0, -1.0, 2.0),
        (2.0, 0.0, 1.5, 2.5),
        (2.0, 0.0, 3.0, 3.0),
        (2.0, 2.5, 9.0, 2.0),
        (2.0, 1.0, 9.0, 2.5),
    ],
)
def test_issuing_is_slower_while_the_host_is_at_work_and_waiting_is_not(
    issue: float, computing: float, busy: float, taken: float
) -> None:
    assert slowed(issue, computing, busy, 1.5) == pytest.approx(taken)


def test_a_host_that_updates_slows_the_thread_that_issues() -> None:
    case = make_case(8, step_config=make_step_config(update="in_backward"))
    work = case.trace.work(1, "keep")
    beside = [
        estimate(
            issued_by_a_thread(
                case, forward=work.forward_seconds, backward=work.backward_seconds, launch_slowdown=slower
            ),
            homes,
        ).busy_seconds["compute"]
        for homes in ("gpu/host", "gpu/gpu")
        for slower in (1.0, 1.5)
    ]
    assert beside[1] > 1.05 * beside[0] and beside[3] == beside[2]


def test_three_steps_reach_the_steady_state() -> None:
    for seed in range(60):
        case = random_case(seed)
        place = case.place(random_decision(case, seed))
        schedule = compile_schedule(place)
        walk = Walk(place, case.spec)
        ends = [walk.run_step(schedule) for _ in range(8)]
        assert ends[7] - ends[6] == pytest.approx(step_seconds(place, schedule, case.spec)[0], rel=0.02)


def test_updates_after_the_step_overlap_the_next_forward() -> None:
    """The optimizer is never a barrier: with the host's updates as long as the compute, the step is shorter than their
    sum.
    """
    case = make_case(8)
    compute = sum(
        case.trace.work(v, "keep").forward_seconds + case.trace.work(v, "keep").backward_seconds for v in range(10)
    )
    params = sum(chunk.numel for chunk in case.layout.chunks)
    case = dataclasses.replace(
        case, spec=dataclasses.replace(case.spec, host_adam_params_per_second=params / compute, launch_seconds=0.0)
    )
    found = estimate(case, "gpu/host")
    assert found.step_seconds < 0.95 * (compute + found.busy_seconds["host"])


def test_updates_in_backward_are_faster_than_after_the_step() -> None:
    after = make_case(8)
    during = dataclasses.replace(after, step_config=make_step_config(update="in_backward"))
    assert estimate(during, "host/host", depth=1).step_seconds < estimate(after, "host/host", depth=1).step_seconds


def test_a_slow_host_gains_from_updates_that_follow_the_backward_in_forward_order() -> None:
    """Each update takes three times a layer's backward. Queued as they land, the first layers', which the next forward
    waits for, come last.
    """
    case = make_case(12, step_config=make_step_config(update="in_backward"))
    backward = case.trace.work(1, "keep").backward_seconds
    slow = dataclasses.replace(
        case.spec, host_adam_params_per_second=case.layout.chunks[1].numel / (3 * backward), launch_seconds=0.0
    )
    case = dataclasses.replace(case, spec=slow)
    seconds = {
        host_update_interval: estimate(
            case, "host/host", depth=1, host_update_interval=host_update_interval
        ).step_seconds
        for host_update_interval in (1, 3)
    }
    host = estimate(case, "host/host", depth=1).busy_seconds["host"]
    assert seconds[3] < 0.9 * seconds[1] and seconds[3] < 1.15 * host


def test_micro_batches_add_compute_and_additions_but_no_updates() -> None:
    once, thrice = make_case(4), make_case(4, step_config=make_step_config(accumulate=3))
    one, three = estimate(once, "host/host", depth=1).busy_seconds, estimate(thrice, "host/host", depth=1).busy_seconds
    assert three["host"] == one["host"]
    spec, chunks = once.spec, once.layout.chunks
    # 8 bytes of an element in bf16 move, and 26 in an AdamW update, whose rate is known.
    adds = [spec.launch_seconds + c.numel * 8 / 26 / spec.gpu_adam_params_per_second for c in chunks]
    assert three["compute"] == pytest.approx(3 * one["compute"] + 2 * sum(adds))
    assert three["h2d"] > 3 * one["h2d"], "partial sums come back as well"


def test_a_frozen_chunk_sends_nothing() -> None:
    """Trap G15: D2H charged for frozen chunks."""
    assert estimate(make_case(3, frozen=5), "host/host").busy_seconds["d2h"] == 0
    assert estimate(make_case(3), "host/host").busy_seconds["d2h"] > 0


def test_time_and_space_of_swap_count_the_same_bytes() -> None:
    """Trap G15: swap priced too cheap."""
    case = make_case(3)
    place = case.place(case.decide("gpu/gpu", "swap"))
    sent = sum(place.work[v].sent_bytes for v in place.sending_calls)
    found = estimate(case, "gpu/gpu", "swap")
    assert found.host_parts["arena"] == sent
    assert found.busy_seconds["d2h"] == pytest.approx(
        sent / case.spec.d2h_bytes_per_second + 3 * case.spec.launch_seconds
    )


def test_the_estimate_says_where_its_bytes_are() -> None:
    case = make_case(3, 2)
    place = case.place(case.decide("host/host", "offload", depth=1))
    found = estimate(case, "host/host", "offload", depth=1)
    peak = high_water(place, compile_schedule(place), case.trace.held_bytes)
    assert (found.gpu_bytes, found.peak_at, found.host_bytes) == (peak.gpu_bytes, peak.peak_at, place.host_bytes)
    assert sum(found.gpu_parts.values()) == place.gpu_bytes
    assert sum(found.host_parts.values()) == place.host_bytes
