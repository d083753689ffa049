"""ChunkLayout: the chunk and offset of every parameter. Does not import torch.

A chunk holds parameters that are used by the same calls, in forward and backward, of one dtype, all trainable or all
frozen. A chunk therefore has one kind of master weights, one gradient and one optimizer state, and weight decay never
applies to frozen parameters. Every parameter begins at a multiple of 256 bytes in its chunk, so that kernels see the
same alignment under every plan.
"""

from dataclasses import dataclass
from functools import cached_property

from outsize.base.units import ALIGN_BYTES
from outsize.model.graph import DTYPE_BYTES, BlockGraph

DEFAULT_CHUNK_BYTES = 256 * 2**20
"""Large enough for full PCIe speed, small enough that the first load of a block arrives early."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A parameter's range in its chunk."""

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
    trainable: bool
    numel: int
    """Number of elements, with padding."""
    pieces: tuple[Piece, ...]

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


def pack(graph: BlockGraph, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> ChunkLayout:
    """Assign every parameter to a chunk. A chunk has at most `chunk_bytes`, unless one parameter alone is larger."""
    ordered: dict[str, None] = {}
    for block in graph.calls:
        ordered.update(dict.fromkeys(graph.blocks[block].params))
    # A parameter that no call reads (an unused tower) is assigned to the last call.
    last = (len(graph.calls) - 1,)
    ordered.update(dict.fromkeys(p.name for p in graph.params))

    groups: dict[tuple[tuple[int, ...], tuple[int, ...], str, bool], list[str]] = {}
    for name in ordered:
        param = graph.param[name]
        groups.setdefault(
            (graph.users[name] or last, graph.backward_users[name], param.dtype, param.trainable), []
        ).append(name)

    chunks: list[Chunk] = []
    for (calls, _, dtype, trainable), names in groups.items():
        size = DTYPE_BYTES[dtype]
        pieces: list[Piece] = []
        end = 0
        for name in names:
            numel = graph.param[name].numel
            step = -(-numel * size // ALIGN_BYTES) * ALIGN_BYTES // size
            if pieces and (end + step) * size > chunk_bytes:
                chunks.append(
                    Chunk(
                        index=len(chunks),
                        calls=calls,
                        dtype=dtype,
                        trainable=trainable,
                        numel=end,
                        pieces=tuple(pieces),
                    )
                )
                pieces, end = [], 0
            pieces.append(Piece(name=name, offset=end, numel=numel))
            end += step
        chunks.append(
            Chunk(index=len(chunks), calls=calls, dtype=dtype, trainable=trainable, numel=end, pieces=tuple(pieces))
        )
    return ChunkLayout(chunk_bytes=chunk_bytes, chunks=tuple(chunks))
