"""Schedules: they parse back, every use finds its chunk in its slot, and an example is checked by hand."""

import pytest
from synthetic import Case, make_case, make_step_config, random_case, random_decision

from outsize.base.errors import PlanInvalid
from outsize.schedule.actions import Action, Kind, effect, parse_action
from outsize.schedule.placement import Placement
from outsize.schedule.schedule import Schedule, compile_schedule, held_after_forward


def random_places(number: int) -> list[tuple[Case, Placement]]:
    cases = [random_case(seed, max_layers=6) for seed in range(number)]
    return [(case, case.place(random_decision(case, seed))) for seed, case in enumerate(cases)]


def test_the_text_of_a_schedule_parses_back() -> None:
    for _, place in random_places(60):
        schedule = compile_schedule(place)
        assert Schedule.parse(str(schedule)) == schedule


def test_an_action_parses_back_and_nonsense_is_refused() -> None:
    assert parse_action(str(Action("L", 12))) == Action("L", 12)
    for word in ("X1", "F", "F-1", "F1x"):
        with pytest.raises(PlanInvalid, match="is no action such as F12"):
            parse_action(word)


def test_two_slots_and_four_blocks_by_hand() -> None:
    """Depth 1 over blocks 0..5 (stem, four layers, head), one chunk each: chunk i lives in slot i mod 2."""
    case = make_case(4)
    place = case.place(case.decide("host/host", depth=1))
    assert [place.slots.slot_of[i] for i in range(6)] == [0, 1, 0, 1, 0, 1]
    schedule = compile_schedule(place)
    # Both slots are filled at once; each is refilled as soon as its block has run.
    assert " ".join(map(str, schedule["forward"])) == "L0 L1 F0 L2 F1 L3 F2 L4 F3 L5 F4 F5"
    # Forward left 4 and 5 in the slots. Every gradient leaves when its block is done, before the slot's next load.
    assert " ".join(map(str, schedule["backward first"])) == "B5 G5 L3 B4 G4 L2 B3 G3 L1 B2 G2 L0 B1 G1 B0 G0"
    # Partial sums come through two staging slots; updates need the weights nowhere but at home.
    assert (
        " ".join(map(str, schedule["backward again"]))
        == "Q5 Q4 B5 G5 Q3 L3 B4 G4 Q2 L2 B3 G3 Q1 L1 B2 G2 Q0 L0 B1 G1 B0 G0"
    )
    assert (
        " ".join(map(str, schedule["backward first+update"]))
        == "B5 G5 U5 L3 B4 G4 U4 L2 B3 G3 U3 L1 B2 G2 U2 L0 B1 G1 U1 B0 G0 U0"
    )
    assert " ".join(map(str, schedule["update"])) == "U0 U1 U2 U3 U4 U5"


def test_homes_decide_what_an_update_moves() -> None:
    case = make_case(1)
    texts = {}
    for homes in ("gpu/gpu", "gpu/host", "host/gpu", "host/host"):
        texts[homes] = " ".join(map(str, compile_schedule(case.place(case.decide(homes)))["update"]))
    assert texts == {
        "gpu/gpu": "U0 U1 U2",
        "gpu/host": "U0 W0 U1 W1 U2 W2",
        "host/gpu": "L0 U0 W0 L1 U1 W1 L2 U2 W2",
        "host/host": "U0 U1 U2",
    }


def test_streamed_state_is_loaded_before_the_update_and_stored_after_it() -> None:
    case = make_case(1)
    streamed = compile_schedule(case.place(case.decide("host/streamed")))
    assert " ".join(map(str, streamed["update"])) == " ".join(f"L{i} Q{i} I{i} U{i} O{i} W{i}" for i in range(3))
    assert " ".join(map(str, streamed["backward first"])) == "B2 G2 L1 B1 G1 L0 B0 G0"
    resident = compile_schedule(case.place(case.decide("gpu/streamed")))
    assert " ".join(map(str, resident["update"])) == " ".join(f"Q{i} I{i} U{i} O{i}" for i in range(3))
    # A backward that updates takes the gradient where it is. Two slots are filled at once.
    assert " ".join(map(str, resident["backward first+update"])) == "I2 I1 B2 U2 O2 I0 B1 U1 O1 B0 U0 O0"
    # The host's updates are issued first: they run while state is streamed.
    mixed = compile_schedule(case.place(case.decide(["gpu/streamed", "gpu/host", "gpu/gpu"])))
    assert " ".join(map(str, mixed["update"])) == "U1 Q0 I0 U0 O0 U2 W1"


def test_state_that_one_call_streams_in_several_chunks_is_loaded_in_time() -> None:
    case = make_case(1, 4)
    place = case.place(case.decide("gpu/streamed"))
    assert len(place.state_slots.slot_bytes) == 2
    in_slot: dict[int, int] = {}
    for action in compile_schedule(place)["backward first+update"]:
        if action.kind == Kind.LOAD_STATE:
            in_slot[place.state_slots.slot_of[action.index]] = action.index
        elif action.kind in (Kind.UPDATE, Kind.STORE_STATE):
            assert in_slot[place.state_slots.slot_of[action.index]] == action.index


def test_activations_leave_after_forward_and_return_before_backward() -> None:
    case = make_case(3)
    schedule = compile_schedule(case.place(case.decide("gpu/gpu", "offload")))
    assert " ".join(map(str, schedule["forward"])) == "F0 F1 S1 F2 S2 R1 F3 S3 R2 F4 R3"
    # Two return slots: calls 3 and 2 come at once, 1 when 3 is done.
    assert " ".join(map(str, schedule["backward first"])) == "P3 P2 B4 B3 P1 B2 B1 B0"


def walk_slots(place: Placement, actions: tuple[Action, ...], holding: dict[int, int]) -> None:
    """Every use of a streamed chunk finds it in its slot; no load evicts a chunk that is used again before its next
    load.
    """
    wanted: dict[int, list[int]] = {}  # slot -> chunks in the order of their uses
    for action in actions:
        if action.kind in "FB":
            for chunk in place.layout.used_by(action.index):
                if place.streams(chunk):
                    wanted.setdefault(place.slots.slot_of[chunk], []).append(chunk)
    for action in actions:
        if action.kind == "L":
            slot = place.slots.slot_of[action.index]
            assert wanted[slot][0] == action.index, f"{action} overwrites chunk {wanted[slot][0]}, which is used first"
            assert holding.get(slot) != action.index, f"{action} loads what is there"
            holding[slot] = action.index
        if action.kind in "FB":
            for chunk in place.layout.used_by(action.index):
                if place.streams(chunk):
                    slot = place.slots.slot_of[chunk]
                    assert holding.get(slot) == chunk, (
                        f"{action} needs chunk {chunk}, slot {slot} holds {holding.get(slot)}"
                    )
                    assert wanted[slot].pop(0) == chunk


def test_every_use_of_a_streamed_chunk_finds_it_in_its_slot() -> None:
    for _, place in random_places(150):
        schedule = compile_schedule(place)
        holding: dict[int, int] = {}
        walk_slots(place, schedule["forward"], holding)
        assert holding == held_after_forward(place)
        for segment in schedule.backwards:
            walk_slots(place, segment.actions, dict(holding))


def test_every_landed_gradient_is_updated_once_a_step() -> None:
    for case, place in random_places(60):
        schedule = compile_schedule(place)
        for accumulate in (1, 3):
            for in_backward in (False, True):
                step = [action for segment in schedule.step(accumulate, in_backward) for action in segment.actions]
                assert sorted(a.index for a in step if a.kind == "U") == sorted(place.grad_complete_at)
                forwards = [a.index for a in step if a.kind == "F"]
                assert forwards == list(range(len(case.graph.calls))) * accumulate


def test_an_update_in_backward_comes_after_the_gradient_and_before_the_slot_is_reloaded() -> None:
    for _, place in random_places(60):
        actions = compile_schedule(place)["backward first+update"]
        at = {action: i for i, action in reversed(list(enumerate(actions)))}
        for chunk, call in place.grad_complete_at.items():
            update = at[Action("U", chunk)]
            assert at[Action("B", call)] < update
            if place.streams(chunk) and not place.updates_on_host(chunk):
                slot = place.slots.slot_of[chunk]
                between = actions[at[Action("B", call)] : update]
                assert not [a for a in between if a.kind == "L" and place.slots.slot_of[a.index] == slot]


def test_with_a_stride_the_host_updates_some_chunks_as_they_land_and_the_others_in_forward_order_after_the_backward() -> (
    None
):
    case = make_case(6, step_config=make_step_config(update="in_backward"))
    at_once, place = (
        case.place(case.decide("host/host", host_update_interval=host_update_interval))
        for host_update_interval in (1, 3)
    )
    actions = compile_schedule(place)["backward first+update"]
    copied = [a.index for a in actions if a.kind == "G"]
    updates = [a.index for a in actions if a.kind == "U"]
    early = copied[::3]
    assert updates == early + sorted(set(copied) - set(early)) and early == sorted(early, reverse=True)
    assert "host_gradient" not in at_once.parts(at_once.host), (
        "at host_update_interval 1 no gradient outlives its update"
    )
    assert place.parts(place.host)["host_gradient"] == sum(
        case.layout.chunks[c].nbytes for c in set(copied) - set(early)
    )


def test_deferred_updates_are_issued_with_the_last_gradient_for_the_host_and_their_copies_when_no_load_can_wait_for_them() -> (
    None
):
    """Blocks 0 to 2 stay on the device: the host has its last gradient when three of eight backwards are still
    to come.
    """
    case = make_case(6, step_config=make_step_config(update="in_backward"))
    place = case.place(case.decide(["gpu/gpu"] * 3 + ["gpu/host"] * 5, host_update_interval=2))
    text = " ".join(map(str, compile_schedule(place)["backward first+update"]))
    assert text == "B7 G7 U7 W7 B6 G6 B5 G5 U5 W5 B4 G4 B3 G3 U3 W3 U4 U6 B2 U2 B1 U1 B0 U0 W4 W6"


def test_a_stride_means_nothing_where_updates_come_after_the_step_or_on_the_device() -> None:
    after, during = make_case(4), make_case(4, step_config=make_step_config(update="in_backward"))
    for case, homes in ((after, "host/host"), (during, "host/gpu")):
        one, three = (
            case.place(case.decide(homes, host_update_interval=host_update_interval)) for host_update_interval in (1, 3)
        )
        assert str(compile_schedule(one)) == str(compile_schedule(three)) and one.host == three.host


def test_without_the_kinds_no_step_uses_the_rest_is_the_same() -> None:
    for _, place in random_places(30):
        full, part = compile_schedule(place), compile_schedule(place, only_steps=True)
        assert all(full.segments[name] == segment for name, segment in part.segments.items())
        in_backward = place.step_config.update == "in_backward"
        assert list(full.step(place.step_config.accumulate, in_backward)) == list(
            part.step(place.step_config.accumulate, in_backward)
        )


def test_actions_touch_only_buffers_that_the_placement_allocates() -> None:
    for _, place in random_places(60):
        allocated = set(place.gpu) | set(place.host)
        schedule = compile_schedule(place)
        for segment in schedule.segments.values():
            for action in segment.actions:
                touched = effect(place, action, update_in_backward=segment.updates_in_backward)
                unknown = {buffer for buffer in (*touched.reads, *touched.writes) if buffer[0] != "live"} - allocated
                assert not unknown, f"{action} touches {unknown}"


def test_gradients_arrive_apart_from_sums_that_wait_on_the_host_and_are_added() -> None:
    homes = ["gpu/gpu", "gpu/host", "host/host", "host/gpu"]
    once, thrice = (
        case.place(case.decide(homes, depth=0))
        for case in (make_case(2, step_config=make_step_config(accumulate=n)) for n in (1, 3))
    )
    schedule = compile_schedule(thrice)
    assert " ".join(map(str, schedule["backward first"])) == "B3 L2 B2 G2 B1 G1 B0"
    assert " ".join(map(str, schedule["backward again"])) == "Q2 Q1 B3 L2 B2 E2 G2 B1 E1 G1 B0"
    arrival = max(thrice.chunk(i).nbytes for i in (1, 2))
    assert thrice.parts(thrice.gpu)["arrival"] == arrival == thrice.gpu_bytes - once.gpu_bytes
    assert "E" not in str(compile_schedule(once)), "a plan for one micro-batch adds further gradients as they arrive"


def test_a_step_of_three_micro_batches_adds_up_what_is_pending() -> None:
    case = make_case(2, step_config=make_step_config(accumulate=3))
    schedule = compile_schedule(case.place(case.decide("gpu/host")))
    kinds = [[a.kind for a in s.actions].count("Q") for s in schedule.step(3, False) if s in schedule.backwards]
    assert kinds == [0, 4, 4]
