"""The kinds of buffers that a plan allocates for the whole run, and the name of a buffer."""

from enum import StrEnum


class BufferKind(StrEnum):
    # On the GPU.
    WEIGHTS = "weights"
    """Of a resident chunk."""
    SLOT = "slot"
    """Streamed chunks pass through it."""
    STATE = "state"
    """Optimizer state of a chunk that is updated on the GPU."""
    SCRATCH = "scratch"
    GRADIENT = "gradient"
    """Of a chunk, from its backward to the step."""
    STAGE = "stage"
    """Gradients pass through it on their way to the host or to their update."""
    RETURN = "return"
    """Offloaded activations come back into it."""
    NORMS = "norms"
    # On the host.
    HOME = "home"
    """Weights of a chunk that is streamed or updated on the host."""
    HOST_STATE = "host_state"
    HOST_GRADIENT = "host_gradient"
    HOST_STAGE = "host_stage"
    """Gradients that are updated as they arrive pass through it."""
    ARENA = "arena"
    """Activations that a block call has offloaded."""
    HOST_SCRATCH = "host_scratch"
    # Not allocated by the plan.
    LIVE = "live"
    """Activations of a block call, where autograd holds them."""

    @property
    def group(self) -> str:
        """What people call it: several kinds share a line of a table and a color of a chart."""
        return group_of(self)

    @property
    def is_pinned_for_copies(self) -> bool:
        """Host memory that only copies touch."""
        return self in (BufferKind.HOST_GRADIENT, BufferKind.HOST_STAGE, BufferKind.ARENA)


def group_of(kind: str) -> str:
    """`BufferKind.group` of a name, or the name itself if it is no kind of buffer."""
    return _GROUPS.get(kind, kind)  # type: ignore[call-overload]


Buffer = tuple[BufferKind, int]
"""A kind with the number of a chunk, slot or block call, such as (SLOT, 2) or (HOME, 7)."""

_GROUPS = {
    BufferKind.WEIGHTS: "weights",
    BufferKind.HOME: "weights",
    BufferKind.SLOT: "slots",
    BufferKind.STATE: "optimizer",
    BufferKind.HOST_STATE: "optimizer",
    BufferKind.SCRATCH: "optimizer",
    BufferKind.HOST_SCRATCH: "optimizer",
    BufferKind.GRADIENT: "gradients",
    BufferKind.HOST_GRADIENT: "gradients",
    BufferKind.STAGE: "gradients",
    BufferKind.HOST_STAGE: "gradients",
    BufferKind.RETURN: "activations",
    BufferKind.ARENA: "activations",
    BufferKind.LIVE: "activations",
    BufferKind.NORMS: "other",
}
