"""Which slot each streamed chunk passes through: an interval colouring over the order of visits.

With prefetch depth d, the chunks of a streamed visit may be on the device while any of the d streamed visits before it
runs (and, in backward, after it): chunks whose visits are at most d apart never share a slot, nor do chunks of one visit.
A chunk that several visits use has a slot of its own, since it may be wanted at any time. For equal blocks of one chunk
this is i mod (d + 1). Planner and runtime call this one function.
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


def assign_slots(layout: ChunkLayout, streamed: Collection[int], depth: int, nbytes: Iterable[int] | None = None) -> SlotMap:
    """Slots for the chunks in `streamed`. `nbytes` overrides the chunks' sizes (gradient slots use the gradients')."""
    size = list(nbytes) if nbytes is not None else [chunk.nbytes for chunk in layout.chunks]
    rank = {visit: i for i, visit in enumerate(sorted({v for c in streamed for v in layout.chunks[c].visits}))}
    slot_of: dict[int, int] = {}
    slot_bytes: list[int] = []
    last_rank: list[float] = []  # of the slot's latest chunk; infinite for a slot of one's own
    for index in sorted(streamed, key=lambda c: (layout.chunks[c].visits[0], c)):
        visits = layout.chunks[index].visits
        shared = len(visits) > 1
        here = rank[visits[0]]
        free = [] if shared else [s for s, r in enumerate(last_rank) if here - r > depth]
        if free:
            # The slot that must grow least; among equals the one that has waited longest, which gives i mod k.
            slot = min(free, key=lambda s: (max(0, size[index] - slot_bytes[s]), last_rank[s], s))
            slot_bytes[slot] = max(slot_bytes[slot], size[index])
        else:
            slot = len(slot_bytes)
            slot_bytes.append(size[index])
            last_rank.append(0)
        last_rank[slot] = float("inf") if shared else here
        slot_of[index] = slot
    return SlotMap(slot_of, tuple(slot_bytes))
