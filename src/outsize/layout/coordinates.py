"""Coordinates: what the optimizer updates in place of a weight's elements, under a method such as OSFT. No torch.

*Contract* makes the gradient of the coordinates from the gradient of the weight. *Merge* makes the weight from the
coordinates and the initial weight. Both are matrix products on the GPU that read *constants*, which training never
changes. The update itself is the optimizer's usual one, with the coordinates as fp32 weights.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from outsize.base.units import ALIGN_BYTES
from outsize.layout.chunks import Chunk, Piece

COORDINATES = "coordinates"
"""The name of the coordinates among the state tensors of a parameter. They are the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """The coordinates of one weight: their shape, and what contract and merge need."""

    shape: tuple[int, int]
    contract_bytes: int
    """Constants that contract and merge read."""
    merge_bytes: int
    """Constants that only merge reads, without the initial weight."""
    contract_flops: float
    """As operations of the machine's measured rate of bf16 products."""
    merge_flops: float
    scratch_bytes: int
    """Workspace on the GPU of one contract or merge."""

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


class ChunkConstants(NamedTuple):
    """The constants of a chunk in one buffer: all that contract reads, what only merge reads, the initial weights."""

    contract_at: dict[str, int]
    """By parameter: the first byte of its constants for contract."""
    merge_at: dict[str, int]
    contract_bytes: int
    """Of all parameters; a contract loads only these."""
    base_at: int
    """The first byte of the initial weights, which are laid out as the chunk is."""
    num_bytes: int
    coordinate_bytes: int
    """Of the coordinates, which begin the optimizer state."""
    contract_flops: float
    merge_flops: float
    scratch_bytes: int


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


def coordinate_pieces(chunk: Chunk, coordinates: Mapping[str, Coordinates]) -> tuple[tuple[Piece, ...], int]:
    """Each parameter's range among the coordinates of its chunk, and their number with padding."""
    pieces, end = [], 0
    for piece in chunk.pieces:
        numel = coordinates[piece.name].numel
        pieces.append(Piece(name=piece.name, offset=end, numel=numel))
        end += aligned(4 * numel) // 4
    return tuple(pieces), end


def chunk_constants(chunk: Chunk, coordinates: Mapping[str, Coordinates], numel: int) -> ChunkConstants:
    """`numel`: of the chunk's coordinates."""
    of = [coordinates[piece.name] for piece in chunk.pieces]
    contract_at, merge_at, end = {}, {}, 0
    for piece, one in zip(chunk.pieces, of, strict=True):
        contract_at[piece.name] = end
        end += aligned(one.contract_bytes)
    contract_bytes = end
    for piece, one in zip(chunk.pieces, of, strict=True):
        merge_at[piece.name] = end
        end += aligned(one.merge_bytes)
    return ChunkConstants(
        contract_at,
        merge_at,
        contract_bytes,
        end,
        end + chunk.nbytes,
        4 * numel,
        sum(one.contract_flops for one in of),
        sum(one.merge_flops for one in of),
        max(one.scratch_bytes for one in of),
    )
