"""Work: what one visit of a block costs under one activation strategy. Numbers only, no torch.

All bytes are relative to the level at which the visit's phase opens, as an observer of live device memory saw them. A forward
phase lasts until the next visit opens (for the last layer before a region: until it returns); a backward phase until the
next visit's backward opens. The memory of a step is the sum of these numbers along the schedule: see planner/memory.py.
"""

from dataclasses import dataclass
from typing import Literal

Strategy = Literal["keep", "recompute", "offload", "swap"]
STRATEGIES: tuple[Strategy, ...] = ("keep", "recompute", "offload", "swap")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    forward_seconds: float
    backward_seconds: float
    """Recompute included."""
    forward_peak_bytes: int
    """Highest level during the phase."""
    forward_delta_bytes: int
    """Level at its end. Activations on their way to the host still count."""
    backward_peak_bytes: int
    backward_delta_bytes: int
    sent_bytes: int
    """Activations that go to the host and come back (offload, swap)."""
    released_bytes: int
    """Device bytes that die when those copies are done."""
    late_bytes: int
    """Of its input, not needed for backward but held by a caller's frame …"""
    late_visit: int
    """… until this later visit's forward (-1: none); it is dead before that visit reaches its own peak."""
    forward_issue_seconds: float = 0.0
    """That the thread which issues its operators takes over them. 0: nobody knows, and it counts as ahead."""
    backward_issue_seconds: float = 0.0
    forward_waits: bool = False
    """That thread asks the device for something (a length, a flag) and waits until it has come so far: it is not ahead after that."""
    backward_waits: bool = False
    output_kept_bytes: int = 0
    """Of its outputs, what its own graph keeps on the device until its backward, as where it ends in ReLU. 0 where no `input_from` names this visit."""
    input_from: int = 0
    """The layer that made its input is so many visits before it, and keeps that output under some strategies only. 0: it does not depend on that layer."""
    input_kept_bytes: int = 0
    """What that layer kept of its outputs when this was measured, with the same strategy for both. If it keeps more, this visit frees less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """A tensor that several layers take beside their input (a mask, rotary tables, encoder output). It lives once, however many keep it.

    Its death is in nobody's Work: it dies in forward unless a layer keeps it, else in the backward of the first layer that does.
    """

    num_bytes: int
    visits: tuple[int, ...]
    """Who takes it."""
    kept_by: tuple[str, ...]
    """Strategies under which a layer keeps it for backward."""
    dies_at: int
    """The visit in whose forward it dies if nobody keeps it (-1: every strategy keeps it)."""
    maker: int = -1
    """The visit of a layer that left it in an argument, for later layers to take (-1: it came otherwise) …"""
    maker_keeps: tuple[str, ...] = ()
    """… and the strategies under which that layer keeps it for its own backward."""
