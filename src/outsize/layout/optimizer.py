"""OptimizerLayout and ChunkUpdate: what the update of a chunk needs. The planner sums these bytes, the runtime
allocates them. Does not import torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from outsize.layout.chunks import Chunk, Piece
from outsize.layout.coordinates import COORDINATES, ChunkConstants, Coordinates, chunk_constants, coordinate_pieces
from outsize.model.graph import DTYPE_BYTES

PIECE_NUMEL = 2**20
"""An update processes its range in pieces of this many elements, so its workspace does not grow with the chunk."""


class ChunkUpdate(NamedTuple):
    """How a chunk is updated, with the bytes of its gradient and state."""

    pieces: tuple[Piece, ...]
    """Each parameter's range in the gradient and in every state tensor."""
    numel: int
    """Elements of the gradient and of every state tensor, with padding."""
    state: tuple[str, ...]
    """Names of the fp32 state tensors. The first are the coordinates, if the chunk has some."""
    gradient_dtype: str
    gradient_bytes: int
    state_bytes: int
    is_split: bool
    """bf16 weights are the upper half of a split fp32 master, whose lower half is in the state. fp32 weights are their
    own master."""
    traffic_bytes: int
    """Bytes that the update reads and writes."""
    scratch_bytes: int
    constants: ChunkConstants | None = None
    """Of a chunk that is trained in coordinates."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerLayout:
    """The state of an elementwise optimizer: tensors with one value for each element of a parameter."""

    name: str
    state: tuple[str, ...]
    """Names of the fp32 state tensors. A bf16 weight also has `lo`, the lower half of its fp32 master, in 2 bytes."""
    traffic_bytes: int
    """Bytes that the update of one bf16 element reads and writes, with a bf16 gradient."""
    scratch_bytes_per_element: int

    def update_of(
        self, chunk: Chunk, *, fp32_grads: bool, coordinates: Mapping[str, Coordinates] = MappingProxyType({})
    ) -> ChunkUpdate | None:
        """None for a frozen chunk: it has neither gradient nor state."""
        if not chunk.is_updated:
            return None
        if chunk.updated == "coordinates":
            return self._update_of_coordinates(chunk, coordinates)
        is_split = chunk.dtype == "bfloat16"
        gradient_dtype = "float32" if fp32_grads else chunk.dtype
        return ChunkUpdate(
            chunk.pieces,
            chunk.numel,
            self.state,
            gradient_dtype,
            chunk.numel * DTYPE_BYTES[gradient_dtype],
            chunk.numel * (4 * len(self.state) + 2 * is_split),
            is_split,
            chunk.numel * self.traffic_bytes,
            self.scratch_bytes(chunk.numel),
        )

    def _update_of_coordinates(self, chunk: Chunk, coordinates: Mapping[str, Coordinates]) -> ChunkUpdate:
        """The coordinates are fp32 weights, with a gradient in fp32, that are kept beside the optimizer's state."""
        pieces, numel = coordinate_pieces(chunk, coordinates)
        state = (COORDINATES, *self.state)
        traffic_bytes = self.traffic_bytes + 2  # the gradient has 4 bytes; a bf16 weight with `lo` has 4 too
        return ChunkUpdate(
            pieces,
            numel,
            state,
            "float32",
            4 * numel,
            4 * numel * len(state),
            False,
            numel * traffic_bytes,
            self.scratch_bytes(numel),
            chunk_constants(chunk, coordinates, numel),
        )

    def scratch_bytes(self, numel: int) -> int:
        """Workspace for updates of ranges of at most `numel` elements."""
        return self.scratch_bytes_per_element * min(numel, PIECE_NUMEL)
