"""Assigns slots: an interval coloring over the order in which items are used.

An item needs its slot from its first to its last position, and items whose intervals overlap never share a slot.
Weights, gradients and optimizer state that pass through the GPU are all assigned here, by planner and runtime alike.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from outsize.layout.chunks import ChunkLayout

Interval = tuple[float, float]
"""The first and the last position at which an item needs its slot."""
ALWAYS: Interval = (float("-inf"), float("inf"))
"""The interval of an item that never shares its slot."""


@dataclass(frozen=True, slots=True)
class SlotMap:
    slot_of: dict[int, int]
    """Item (a chunk) to slot index."""
    slot_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.slot_bytes)


def assign_slots(intervals: Mapping[int, Interval], sizes: Mapping[int, int]) -> SlotMap:
    """Assign a slot to each item. `intervals`: in the order of their first positions; ALWAYS may come anywhere."""
    slot_of: dict[int, int] = {}
    slot_bytes: list[int] = []
    ends: list[float] = []  # the last position of the slot's latest item
    for item, (first, last) in intervals.items():
        free = [slot for slot, end in enumerate(ends) if end < first]
        if free:
            # The slot that grows least; among equals the least recently used one, which gives i mod k.
            slot = min(free, key=lambda s: (max(0, sizes[item] - slot_bytes[s]), ends[s], s))
            slot_bytes[slot] = max(slot_bytes[slot], sizes[item])
            ends[slot] = last
        else:
            slot = len(slot_bytes)
            slot_bytes.append(sizes[item])
            ends.append(last)
        slot_of[item] = slot
    return SlotMap(slot_of, tuple(slot_bytes))


def call_intervals(layout: ChunkLayout, chunks: Collection[int], depth: int) -> dict[int, Interval]:
    """The intervals of chunks that are on the GPU while their calls run, and up to `depth` such calls earlier (in
    backward: later).

    Positions count only the calls that use these chunks, since prefetch looks past the others. A chunk that several
    calls use may be needed at any time. For equal blocks of one chunk, the slot of block i is i mod (depth + 1).
    """
    rank = {call: i for i, call in enumerate(sorted({v for c in chunks for v in layout.chunks[c].calls}))}
    intervals: dict[int, Interval] = {}
    for chunk in sorted(chunks, key=lambda c: (layout.chunks[c].calls[0], c)):
        calls = layout.chunks[chunk].calls
        intervals[chunk] = (rank[calls[0]], rank[calls[0]] + depth) if len(calls) == 1 else ALWAYS
    return intervals


def turn_intervals(chunks: Iterable[int], depth: int) -> dict[int, Interval]:
    """The intervals of chunks that are used one after another, each loaded up to `depth` turns ahead."""
    return {chunk: (turn, turn + depth) for turn, chunk in enumerate(chunks)}
