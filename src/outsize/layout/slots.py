"""Assigns a slot to each streamed chunk: an interval coloring over the order of calls.

With prefetch depth d, the chunks of a streamed call may be on the device while any of the d streamed calls before it
runs (in backward: after it). So chunks whose calls are at most d apart never share a slot, nor do chunks of one call.
A chunk that several calls use has a slot of its own, since it may be needed at any time. For equal blocks of one chunk,
the slot of block i is i mod (d + 1). Planner and runtime both call this function.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from outsize.layout.chunks import ChunkLayout


@dataclass(frozen=True, slots=True)
class SlotMap:
    slot_of: dict[int, int]
    """Chunk index to slot index."""
    slot_bytes: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.slot_bytes)


def assign_slots(
    layout: ChunkLayout, streamed: Collection[int], depth: int, nbytes: Iterable[int] | None = None
) -> SlotMap:
    """Slots for the chunks in `streamed`. `nbytes` overrides the chunks' sizes (gradient slots use the gradients')."""
    size = list(nbytes) if nbytes is not None else [chunk.nbytes for chunk in layout.chunks]
    rank = {call: i for i, call in enumerate(sorted({v for c in streamed for v in layout.chunks[c].calls}))}
    slot_of: dict[int, int] = {}
    slot_bytes: list[int] = []
    last_rank: list[float] = []  # of the slot's latest chunk; infinite for a slot that is not shared
    for index in sorted(streamed, key=lambda c: (layout.chunks[c].calls[0], c)):
        calls = layout.chunks[index].calls
        shared = len(calls) > 1
        here = rank[calls[0]]
        free = [] if shared else [s for s, r in enumerate(last_rank) if here - r > depth]
        if free:
            # The slot that grows least; among equals the least recently used one, which gives i mod k.
            slot = min(free, key=lambda s: (max(0, size[index] - slot_bytes[s]), last_rank[s], s))
            slot_bytes[slot] = max(slot_bytes[slot], size[index])
        else:
            slot = len(slot_bytes)
            slot_bytes.append(size[index])
            last_rank.append(0)
        last_rank[slot] = float("inf") if shared else here
        slot_of[index] = slot
    return SlotMap(slot_of, tuple(slot_bytes))
