"""Work: what one call of a block costs under one activation strategy. Numbers only, no torch.

All bytes are relative to the level at which the call's phase opens, as an observer of live device memory saw them. A
forward phase lasts until the next call opens (for the last layer before a region: until it returns); a backward phase
until the next call's backward opens. The memory of a step is the sum of these numbers along the schedule: see
planner/memory.py.
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
    forward_launch_seconds: float = 0.0
    """That the thread which issues its operators takes over them. 0: nobody knows, and it counts as ahead."""
    backward_launch_seconds: float = 0.0
    forward_syncs_host: bool = False
    """That thread asks the device for something (a length, a flag) and waits until it has come so far: it is not ahead
    after that.
    """
    backward_syncs_host: bool = False


Role = Literal["argument", "output", "left", "saved"]
Holders = tuple[tuple[int, tuple[str, ...]], ...]
"""Calls, each with the strategies under which it holds a tensor. In forward order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """A tensor that outlives the call that made it: an output of a layer, a mask, encoder states. It lives once,
    however many calls hold it.

    Its death is in no call's Work, since it depends on the strategies of several calls: it dies in the backward of the
    first call that holds it. If none holds it, it dies in forward.
    """

    call: int
    """Where it was first seen, as ..."""
    role: Role
    """... an argument of a layer, an output, something a layer left in its arguments, or something its graph
    saved ...
    """
    number: int
    """... with this number."""
    num_bytes: int
    born: int = -1
    """The call in whose forward it is made. -1: that call's Work includes it."""
    dies_at: int
    """If nothing holds or sends it, it is dead before this call's forward reaches its peak. The number of calls: when
    the model's forward returns. -1: it never dies."""
    held_by: Holders = ()
    """Who holds it until its backward."""
    early_in: Holders = ()
    """Of these, who frees it before the peak of its backward if no other call holds it longer."""
    sent_by: Holders = ()
    """Who sends it to the host: on the device it lives at least until that call's release."""
    under: tuple[str, ...] = ()
    """Strategies of the call that makes it under which it exists. Empty: all."""
