"""How much workspace an optimizer update needs. Here, and without torch, because the planner counts these bytes and the
runtime allocates them: one function for both. `optim.adamw.Scratch` cuts the buffer up.
"""

PIECE_NUMEL = 2**20
"""An update walks its range in pieces of this many elements, so its workspace does not grow with the chunk."""

BYTES_PER_ELEMENT = 12
"""One fp32 value, and one fp64 value whose bytes also serve a second fp32 value and a mask at other times."""


def scratch_bytes(largest_numel: int) -> int:
    """Bytes of workspace for updates of ranges of at most `largest_numel` elements."""
    return BYTES_PER_ELEMENT * min(largest_numel, PIECE_NUMEL)
