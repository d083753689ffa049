"""Derived waits: enough to order every conflict, and not one too many. By brute force over small lists of actions."""

import itertools
import random

from synthetic import random_case, random_decision

from outsize.hardware.lanes import LANES, Lane
from outsize.schedule.actions import effect
from outsize.schedule.buffers import Buffer
from outsize.schedule.hazards import Hazards, Token
from outsize.schedule.schedule import compile_schedule

Access = tuple[Lane, frozenset[Buffer], frozenset[Buffer]]


def derive(actions: list[Access]) -> list[set[int]]:
    """Per action, the earlier actions it waits for."""
    hazards = Hazards()
    number: dict[Token, int] = {}
    waits = []
    for i, (lane, reads, writes) in enumerate(actions):
        waits.append({number[token] for token in hazards.before(lane, reads, writes)})
        number[hazards.after(lane, reads, writes)] = i
    return waits


def ordered_before(actions: list[Access], waits: list[set[int]]) -> list[set[int]]:
    """Per action, all that surely ended before it starts: its lane's order and its waits, transitively."""
    before: list[set[int]] = []
    last_of: dict[Lane, int] = {}
    for i, (lane, _, _) in enumerate(actions):
        direct = set(waits[i]) | ({last_of[lane]} if lane in last_of else set())
        before.append(direct.union(*(before[j] for j in direct)))
        last_of[lane] = i
    return before


def conflicts(actions: list[Access]) -> list[tuple[int, int]]:
    pairs = []
    for (i, (_, reads_i, writes_i)), (j, (_, reads_j, writes_j)) in itertools.combinations(enumerate(actions), 2):
        if writes_i & (reads_j | writes_j) or reads_i & writes_j:
            pairs.append((i, j))
    return pairs


def random_actions(seed: int) -> list[Access]:
    rng = random.Random(seed)
    buffers = [("b", i) for i in range(rng.randint(1, 5))]

    def some(most: int) -> frozenset[Buffer]:
        return frozenset(rng.sample(buffers, min(len(buffers), rng.randint(0, most))))

    return [(rng.choice(LANES), some(2), some(1)) for _ in range(rng.randint(2, 16))]


def is_enough(actions: list[Access], waits: list[set[int]]) -> bool:
    before = ordered_before(actions, waits)
    return all(i in before[j] for i, j in conflicts(actions))


def test_waits_order_every_conflicting_pair() -> None:
    for seed in range(500):
        actions = random_actions(seed)
        assert is_enough(actions, derive(actions)), seed


def test_no_wait_is_redundant() -> None:
    """Without any single one of them, some conflicting pair is unordered."""
    for seed in range(500):
        actions = random_actions(seed)
        waits = derive(actions)
        for i, found in enumerate(waits):
            for wait in found:
                fewer = [w - {wait} if j == i else w for j, w in enumerate(waits)]
                assert not is_enough(actions, fewer), (seed, i, wait)


def test_waits_are_never_for_the_own_lane() -> None:
    for seed in range(100):
        actions = random_actions(seed)
        assert all(actions[wait][0] != actions[i][0] for i, waits in enumerate(derive(actions)) for wait in waits)


def test_both_hold_on_real_schedules() -> None:
    """Two steps in a row, so that updates overlap the next forward."""
    for seed in range(12):
        case = random_case(seed, max_layers=2)
        place = case.place(random_decision(case, seed))
        schedule = compile_schedule(place)
        in_backward = place.step_config.update == "in_backward"
        actions: list[Access] = []
        for _ in range(2):
            for segment in schedule.step(place.step_config.accumulate, in_backward):
                touched = [
                    effect(place, action, update_in_backward=segment.updates_in_backward) for action in segment.actions
                ]
                actions += [(lane, frozenset(reads), frozenset(writes)) for lane, reads, writes in touched]
        waits = derive(actions)
        assert is_enough(actions, waits)
        before = ordered_before(actions, waits)
        # The full removal test is quadratic; that a wait is not implied by the others is the same thing.
        for i, found in enumerate(waits):
            lane_before = next((before[j] | {j} for j in reversed(range(i)) if actions[j][0] == actions[i][0]), set())
            for wait in found:
                assert wait not in lane_before.union(*(before[other] for other in found - {wait}))


def test_a_reader_waits_for_the_writer_and_a_writer_for_all_readers() -> None:
    x: Buffer = ("slot", 0)
    actions: list[Access] = [
        ("h2d", frozenset(), frozenset({x})),
        ("compute", frozenset({x}), frozenset()),
        ("d2h", frozenset({x}), frozenset()),
        ("h2d", frozenset(), frozenset({x})),
        ("compute", frozenset({x}), frozenset()),
    ]
    assert derive(actions) == [set(), {0}, {0}, {1, 2}, {3}]
