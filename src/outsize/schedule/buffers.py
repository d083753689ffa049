"""The kinds of buffers that a plan allocates for the whole run, and the name of a buffer."""

from enum import StrEnum


class BufferKind(StrEnum):
    # On the GPU.
    WEIGHTS = "weights"
    """Weights of a resident chunk."""
    SLOT = "slot"
    """Weights of the streamed chunks that share it, one at a time."""
    STATE = "state"
    """Optimizer state of a chunk whose state home is the GPU, and the lower halves of its master weights."""
    STATE_SLOT = "state_slot"
    """Optimizer state that is streamed to the GPU for its update; chunks share it."""
    SCRATCH = "scratch"
    """Workspace of the updates, contractions and merges on the GPU."""
    CONSTANTS = "constants"
    """Constants of a chunk that is trained in coordinates, and its initial weights; in its state home."""
    CONSTANTS_SLOT = "constants_slot"
    """Constants that are streamed to the GPU for contract and merge; chunks share it."""
    COORDINATES_SLOT = "coordinates_slot"
    """Coordinates that the host has updated, on the GPU for their merge; chunks share it."""
    GRADIENT = "gradient"
    """Gradient of a chunk, from its backward to the step."""
    STAGE = "stage"
    """Stage: gradients on their way to the host or to their update; chunks share it."""
    ARRIVAL = "arrival"
    """Arrival slot: a new gradient that is not summed in place, because the sum waits on the host or is that of
    coordinates; block calls share it."""
    RETURN = "return"
    """Return slot: offloaded activations, loaded for the backward."""
    NORMS = "norms"
    """Sums of the gradients' squares: see layout/norm.py."""
    # On the host.
    HOME = "home"
    """Weights in host memory, of a chunk that is streamed, or resident and updated on the host."""
    HOST_STATE = "host_state"
    """Optimizer state of a chunk whose state home is the host."""
    HOST_CONSTANTS = "host_constants"
    """Constants of a chunk whose state home is the host."""
    HOST_GRADIENT = "host_gradient"
    """Gradient of a chunk, until its update."""
    HOST_STAGE = "host_stage"
    """Gradients that the host applies as they arrive; chunks share it."""
    ARENA = "arena"
    """Offloaded activations of a block call."""
    HOST_SCRATCH = "host_scratch"
    """Workspace of the updates on the host."""
    # Not allocated by the plan.
    LIVE = "live"
    """Activations of a block call, in the memory that autograd holds."""

    @property
    def group(self) -> str:
        """The group in tables and charts; several kinds share one."""
        return group_of(self)

    @property
    def is_pinned_for_copies(self) -> bool:
        """Whether only copies access this host memory."""
        return self in (BufferKind.HOST_GRADIENT, BufferKind.HOST_STAGE, BufferKind.HOST_CONSTANTS, BufferKind.ARENA)


def group_of(kind: str) -> str:
    """`BufferKind.group` of a name, or the name itself if it is not a kind of buffer."""
    return _GROUPS.get(kind, kind)  # type: ignore[call-overload]


Buffer = tuple[BufferKind, int]
"""A kind with the number of a chunk, slot or block call, such as (SLOT, 2) or (HOME, 7)."""

_GROUPS = {
    BufferKind.WEIGHTS: "weights",
    BufferKind.HOME: "weights",
    BufferKind.SLOT: "slots",
    BufferKind.STATE: "optimizer",
    BufferKind.STATE_SLOT: "optimizer",
    BufferKind.HOST_STATE: "optimizer",
    BufferKind.SCRATCH: "optimizer",
    BufferKind.HOST_SCRATCH: "optimizer",
    BufferKind.CONSTANTS: "constants",
    BufferKind.CONSTANTS_SLOT: "constants",
    BufferKind.COORDINATES_SLOT: "constants",
    BufferKind.HOST_CONSTANTS: "constants",
    BufferKind.GRADIENT: "gradients",
    BufferKind.HOST_GRADIENT: "gradients",
    BufferKind.STAGE: "gradients",
    BufferKind.ARRIVAL: "gradients",
    BufferKind.HOST_STAGE: "gradients",
    BufferKind.RETURN: "activations",
    BufferKind.ARENA: "activations",
    BufferKind.LIVE: "activations",
    BufferKind.NORMS: "gradients",
}
