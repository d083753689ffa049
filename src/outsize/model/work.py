"""Work: what one block call costs under one activation strategy. Numbers only, no torch.

All bytes are relative to the device memory in use when the call's phase opens, as an observer of live device memory saw
it. A forward phase lasts until the next call opens (for the last layer before a region: until it returns). A backward
phase lasts until the backward of the next call opens. planner/memory.py adds these numbers up along the schedule.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    forward_seconds: float
    backward_seconds: float
    """Includes the recomputed forward."""
    forward_peak_bytes: int
    """The most memory in use during the phase."""
    forward_delta_bytes: int
    """Memory in use at its end. Activations that are still being copied to the host count."""
    backward_peak_bytes: int
    backward_delta_bytes: int
    sent_bytes: int
    """Activations that are copied to the host and back (offload, swap)."""
    released_bytes: int
    """Device bytes that are freed when those copies are done."""
    forward_launch_seconds: float = 0.0
    """CPU time to launch the kernels. 0 if unknown; launch overhead is then ignored."""
    backward_launch_seconds: float = 0.0
    forward_syncs_host: bool = False
    """The CPU waits for the GPU in it (`.item()`, a data-dependent shape), so it cannot run ahead past it."""
    backward_syncs_host: bool = False


Role = Literal["argument", "output", "written", "saved", "kept"]
Holders = tuple[tuple[int, tuple[str, ...]], ...]
"""Calls in forward order, each with the strategies under which it holds a tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedTensor:
    """A tensor that outlives the call that made it: an output of a layer, a mask, encoder states. It is allocated once,
    however many calls hold it.

    No call's Work includes its free, which depends on the strategies of several calls: it is freed in the backward of
    the first call that holds it, or in forward if no call does.
    """

    call: int
    """The call in which it was first seen."""
    role: Role
    """Whether that call had it as an argument, as an output, written into an argument, saved by autograd, or kept in
    attributes of the model until the next step.
    """
    number: int
    """Its position among the call's tensors of that role."""
    num_bytes: int
    allocated_in: int = -1
    """The call whose forward allocates it. -1: the Work of that call includes the allocation."""
    freed_in: int
    """If no call holds or sends it, it is freed before the forward of this call reaches its peak. The number of calls:
    when the model's forward returns. -1: it is never freed."""
    held_by: Holders = ()
    """Calls that hold it until their backward."""
    freed_early_in: Holders = ()
    """Those of `held_by` that free it before the peak of their backward if no other call holds it longer."""
    sent_by: Holders = ()
    """Calls that copy it to the host. It stays on the device at least until the copy of that call is released."""
    only_under: tuple[str, ...] = ()
    """Strategies of the allocating call under which it exists. Empty: all."""
