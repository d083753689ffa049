"""Slots: the colouring that decides who may lie where. What it must never do is checked for any layout, streamed set
and depth.
"""

from collections.abc import Collection
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.layout.chunks import Chunk, ChunkLayout
from outsize.layout.slots import SlotMap, call_intervals, turn_intervals
from outsize.layout.slots import assign_slots as assign


def layout_of(chunks: list[tuple[tuple[int, ...], int]]) -> ChunkLayout:
    """(calls, KiB) per chunk, in the order of first use as `pack` gives them."""
    chunks = sorted(chunks, key=lambda c: c[0])
    made = (
        Chunk(index=i, calls=calls, dtype="uint8", updated="frozen", numel=kib * 1024, pieces=())
        for i, (calls, kib) in enumerate(chunks)
    )
    return ChunkLayout(chunk_bytes=2**20, chunks=tuple(made))


def assign_slots(layout: ChunkLayout, streamed: Collection[int], depth: int) -> SlotMap:
    """Of the weights of streamed chunks."""
    return assign(call_intervals(layout, streamed, depth), {chunk.index: chunk.nbytes for chunk in layout.chunks})


calls = st.integers(0, 9).map(lambda v: (v,)) | st.sets(st.integers(0, 9), min_size=2, max_size=3).map(
    lambda s: tuple(sorted(s))
)
layouts = st.lists(st.tuples(calls, st.integers(1, 8)), min_size=1, max_size=16).map(layout_of)


@st.composite
def cases(draw: st.DrawFn) -> tuple[ChunkLayout, set[int], int]:
    layout = draw(layouts)
    streamed = draw(st.sets(st.integers(0, len(layout.chunks) - 1)))
    return layout, streamed, draw(st.integers(0, 4))


@given(cases())
def test_chunks_that_may_be_wanted_together_never_share_a_slot(case: tuple[ChunkLayout, set[int], int]) -> None:
    """Together: used by one call, at most `depth` streamed calls apart, or used by several calls at all."""
    layout, streamed, depth = case
    slots = assign_slots(layout, streamed, depth)
    assert set(slots.slot_of) == streamed
    order = sorted({call for index in streamed for call in layout.chunks[index].calls})
    for one, other in combinations(sorted(streamed), 2):
        if slots.slot_of[one] != slots.slot_of[other]:
            continue
        first, second = layout.chunks[one].calls, layout.chunks[other].calls
        assert len(first) == len(second) == 1, "a chunk of several calls has its slot to itself"
        assert abs(order.index(first[0]) - order.index(second[0])) > depth


@given(cases())
def test_a_slot_is_exactly_as_large_as_its_largest_chunk(case: tuple[ChunkLayout, set[int], int]) -> None:
    layout, streamed, depth = case
    slots = assign_slots(layout, streamed, depth)
    for slot, nbytes in enumerate(slots.slot_bytes):
        assert nbytes == max(layout.chunks[index].nbytes for index in streamed if slots.slot_of[index] == slot)
    assert slots.total_bytes == sum(slots.slot_bytes)


@given(cases())
def test_there_are_no_more_slots_than_chunks_that_may_be_there_at_once(case: tuple[ChunkLayout, set[int], int]) -> None:
    """Greedy in the order of calls is optimal for intervals: the slots of single-call chunks are the fullest window of
    depth + 1 calls.
    """
    layout, streamed, depth = case
    order = sorted({call for index in streamed for call in layout.chunks[index].calls})
    single = [index for index in streamed if len(layout.chunks[index].calls) == 1]
    fullest = max(
        (sum(layout.chunks[i].calls[0] in order[k : k + depth + 1] for i in single) for k in range(len(order))),
        default=0,
    )
    assert len(assign_slots(layout, streamed, depth).slot_bytes) == fullest + len(streamed) - len(single)


@given(cases())
def test_the_assignment_does_not_depend_on_the_order_in_which_chunks_are_named(
    case: tuple[ChunkLayout, set[int], int],
) -> None:
    layout, streamed, depth = case
    assert assign_slots(layout, sorted(streamed), depth) == assign_slots(layout, sorted(streamed, reverse=True), depth)


@pytest.mark.parametrize("depth", [0, 1, 2, 3, 20])
def test_equal_blocks_take_turns_i_mod_depth_plus_one(depth: int) -> None:
    slots = assign_slots(layout_of([((i,), 4) for i in range(10)]), range(10), depth)
    assert slots.slot_of == {i: i % (depth + 1) for i in range(10)}
    assert slots.slot_bytes == (4096,) * min(10, depth + 1)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_equal_blocks_of_several_chunks_take_turns_as_well(depth: int) -> None:
    slots = assign_slots(layout_of([((i // 3,), 4) for i in range(18)]), range(18), depth)
    assert slots.slot_of == {i: i % (3 * (depth + 1)) for i in range(18)}


def test_resident_visits_between_streamed_ones_do_not_count_as_distance() -> None:
    """Depth counts streamed calls: the prefetch looks past the resident ones, so the chunks on both sides of them are
    neighbours.
    """
    layout = layout_of([((i,), 1) for i in range(10)])
    slots = assign_slots(layout, {0, 9}, depth=1)
    assert slots.slot_of[0] != slots.slot_of[9]
    assert len(set(assign_slots(layout, {0, 5, 9}, depth=1).slot_of.values())) == 2


def test_a_tied_chunk_between_equal_blocks_leaves_their_turns_alone() -> None:
    slots = assign_slots(layout_of([((0, 6), 8), *(((i,), 1) for i in range(1, 6))]), range(6), depth=1)
    assert slots.slot_of[0] == 0 and [slots.slot_of[i] for i in range(1, 6)] == [1, 2, 1, 2, 1]
    assert slots.slot_bytes == (8192, 1024, 1024)


def test_a_chunk_takes_the_slot_that_must_grow_least() -> None:
    slots = assign_slots(layout_of([((0,), 1), ((0,), 8), ((1,), 8), ((2,), 1)]), range(4), depth=0)
    assert slots.slot_of[2] == slots.slot_of[1]
    assert sorted(slots.slot_bytes) == [1024, 8192]


def test_other_sizes_may_be_given_for_gradients() -> None:
    layout = layout_of([((i,), 1) for i in range(4)])
    slots = assign(call_intervals(layout, range(4), 1), {0: 10, 1: 20, 2: 30, 3: 40})
    assert slots.slot_bytes == (30, 40)


def test_chunks_that_take_turns_share_one_more_slot_than_are_loaded_ahead() -> None:
    slots = assign(turn_intervals([4, 2, 7, 1], 1), {1: 10, 2: 20, 4: 40, 7: 70})
    assert slots.slot_of == {4: 0, 2: 1, 7: 0, 1: 1} and slots.slot_bytes == (70, 20)


def test_nothing_streamed_needs_no_slots() -> None:
    slots = assign_slots(layout_of([((0,), 1)]), (), depth=3)
    assert slots.slot_of == {} and slots.total_bytes == 0
