"""ChunkLayout: the chunk and offset of every parameter. Does not import torch.

A chunk holds parameters that are used by the same calls, in forward and backward, and updated in the same way. A chunk
that is updated has one dtype, and therefore one kind of master weights, one gradient and one optimizer state. A frozen
chunk holds bytes, of parameters of any dtype. Weight decay never applies to frozen parameters. Every parameter begins
at a multiple of 256 bytes in its chunk, so that kernels see the same alignment under every plan.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from outsize.base.units import ALIGN_BYTES
from outsize.model.graph import DTYPE_BYTES, BlockGraph

_Value = TypeVar("_Value")

DEFAULT_CHUNK_BYTES = 256 * 2**20
"""Large enough for full PCIe speed, small enough that the first load of a block arrives early."""


BYTE = "uint8"
"""The dtype of frozen chunks."""
Updated = Literal["frozen", "weights", "coordinates"]
"""What the optimizer updates: nothing, the weights, or coordinates that the weights are made from
(layout/coordinates.py)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A parameter's range in its chunk, in the chunk's elements: bytes if the chunk is frozen."""

    name: str
    offset: int
    """Number of the first element."""
    numel: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    index: int
    calls: tuple[int, ...]
    """The calls that use it, in forward order. More than one: tied weights, or a block that runs twice."""
    dtype: str
    """Of its elements: BYTE if it is frozen, else that of its parameters."""
    updated: Updated
    numel: int
    """Number of elements, with padding."""
    pieces: tuple[Piece, ...]

    @property
    def is_updated(self) -> bool:
        return self.updated != "frozen"

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    chunk_bytes: int
    chunks: tuple[Chunk, ...]
    """In the order of first use."""

    @cached_property
    def by_call(self) -> tuple[tuple[int, ...], ...]:
        """By call: the chunks that it uses."""
        num_calls = 1 + max((v for c in self.chunks for v in c.calls), default=-1)
        table: list[list[int]] = [[] for _ in range(num_calls)]
        for chunk in self.chunks:
            for call in chunk.calls:
                table[call].append(chunk.index)
        return tuple(tuple(row) for row in table)

    @cached_property
    def location(self) -> dict[str, tuple[int, Piece]]:
        """By parameter: the index of its chunk, and its piece of it."""
        return {piece.name: (chunk.index, piece) for chunk in self.chunks for piece in chunk.pieces}

    def used_by(self, call: int) -> tuple[int, ...]:
        return self.by_call[call] if call < len(self.by_call) else ()


def aligned_numel(numel: int, dtype: str) -> int:
    """Elements of a parameter with the padding behind it."""
    size = DTYPE_BYTES[dtype]
    return -(-numel * size // ALIGN_BYTES) * ALIGN_BYTES // size


def joined_ranges(pieces: Iterable[Piece], values: Mapping[str, _Value]) -> list[tuple[int, int, _Value]]:
    """Start, end and value of ranges of elements. Neighbouring pieces with the same object as their value, and nothing
    between them, are one range. A piece without value is in none.
    """
    ranges: list[tuple[int, int, _Value]] = []
    for piece in pieces:
        if piece.name not in values:
            continue
        value, end = values[piece.name], piece.offset + piece.numel
        if ranges and ranges[-1][1] == piece.offset and ranges[-1][2] is value:
            ranges[-1] = (ranges[-1][0], end, value)
        else:
            ranges.append((piece.offset, end, value))
    return ranges


def pack(
    graph: BlockGraph, chunk_bytes: int = DEFAULT_CHUNK_BYTES, *, in_coordinates: Collection[str] = ()
) -> ChunkLayout:
    """Assign every parameter to a chunk. A chunk has at most `chunk_bytes`, unless one parameter alone is larger.

    `in_coordinates`: the parameters that a method trains in coordinates.
    """
    ordered: dict[str, None] = {}
    for block in graph.calls:
        ordered.update(dict.fromkeys(graph.blocks[block].params))
    # A parameter that no call reads (an unused tower) is assigned to the last call.
    last = (len(graph.calls) - 1,)
    ordered.update(dict.fromkeys(p.name for p in graph.params))

    groups: dict[tuple[tuple[int, ...], tuple[int, ...], str, Updated], list[str]] = {}
    for name in ordered:
        param = graph.param[name]
        updated: Updated = "frozen" if not param.trainable else "coordinates" if name in in_coordinates else "weights"
        dtype = BYTE if updated == "frozen" else param.dtype
        groups.setdefault((graph.users[name] or last, graph.backward_users[name], dtype, updated), []).append(name)

    chunks: list[Chunk] = []

    def add(calls: tuple[int, ...], dtype: str, updated: Updated, numel: int, pieces: list[Piece]) -> None:
        chunk = Chunk(index=len(chunks), calls=calls, dtype=dtype, updated=updated, numel=numel, pieces=tuple(pieces))
        chunks.append(chunk)

    for (calls, _, dtype, updated), names in groups.items():
        size = DTYPE_BYTES[dtype]
        pieces: list[Piece] = []
        end = 0
        for name in names:
            numel = graph.param[name].nbytes // size
            step = aligned_numel(numel, dtype)
            if pieces and (end + step) * size > chunk_bytes:
                add(calls, dtype, updated, end, pieces)
                pieces, end = [], 0
            pieces.append(Piece(name=name, offset=end, numel=numel))
            end += step
        add(calls, dtype, updated, end, pieces)
    return ChunkLayout(chunk_bytes=chunk_bytes, chunks=tuple(chunks))
