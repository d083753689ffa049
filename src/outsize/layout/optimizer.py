"""OptimizerLayout and ChunkUpdate: what the update of a chunk needs. The planner sums these bytes, the runtime
allocates them. Does not import torch.
"""

from dataclasses import dataclass
from typing import NamedTuple

from outsize.layout.chunks import Chunk
from outsize.model.graph import DTYPE_BYTES

PIECE_NUMEL = 2**20
"""An update processes its range in pieces of this many elements, so its workspace does not grow with the chunk."""


class ChunkUpdate(NamedTuple):
    """How a chunk is updated, with the bytes of its gradient and state."""

    gradient_dtype: str
    gradient_bytes: int
    state_bytes: int
    is_split: bool
    """bf16 weights are the upper half of a split fp32 master, whose lower half is in the state. fp32 weights are their
    own master."""
    traffic_bytes: int
    """Bytes that the update reads and writes."""
    scratch_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerLayout:
    """The state of an elementwise optimizer: tensors with one value for each element of a parameter."""

    name: str
    state: tuple[str, ...]
    """Names of the fp32 state tensors. A bf16 weight also has `lo`, the lower half of its fp32 master, in 2 bytes."""
    traffic_bytes: int
    """Bytes that the update of one bf16 element reads and writes, with a bf16 gradient."""
    scratch_bytes_per_element: int

    def update_of(self, chunk: Chunk, *, fp32_grads: bool) -> ChunkUpdate | None:
        """None for a frozen chunk: it has neither gradient nor state."""
        if not chunk.trainable:
            return None
        is_split = chunk.dtype == "bfloat16"
        gradient_dtype = "float32" if fp32_grads else chunk.dtype
        return ChunkUpdate(
            gradient_dtype,
            chunk.numel * DTYPE_BYTES[gradient_dtype],
            chunk.numel * (4 * len(self.state) + 2 * is_split),
            is_split,
            chunk.numel * self.traffic_bytes,
            self.scratch_bytes(chunk.numel),
        )

    def scratch_bytes(self, numel: int) -> int:
        """Workspace for updates of ranges of at most `numel` elements."""
        return self.scratch_bytes_per_element * min(numel, PIECE_NUMEL)
