"""ChunkLayout: every parameter has exactly one aligned place, and no chunk mixes what must not be mixed."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.base.records import dumps, fingerprint, loads
from outsize.layout.chunks import ALIGN_BYTES, BYTE, ChunkLayout, pack
from outsize.model.graph import DTYPE_BYTES, Block, BlockGraph, Param
from outsize.optim.adamw import RULE


@dataclass(frozen=True)
class Spec:
    """One parameter of a graph to be made: the blocks that use it may be none (unused) or several (tied)."""

    numel: int
    dtype: str = "bfloat16"
    trainable: bool = True
    blocks: tuple[int, ...] = (0,)


def graph_of(specs: list[Spec], num_blocks: int = 3, calls: tuple[int, ...] | None = None) -> BlockGraph:
    params = tuple(
        Param(name=f"p{i}", shape=(s.numel,), dtype=s.dtype, trainable=s.trainable) for i, s in enumerate(specs)
    )
    blocks = tuple(
        Block(
            name=f"b{b}",
            kind="layer",
            structure="x",
            params=tuple(f"p{i}" for i, s in enumerate(specs) if b in s.blocks),
        )
        for b in range(num_blocks)
    )
    calls = calls or tuple(range(num_blocks))
    return BlockGraph(blocks=blocks, calls=calls, has_backward=(True,) * len(calls), params=params, buffer_bytes=0)


specs = st.lists(
    st.builds(
        Spec,
        numel=st.integers(1, 700),
        dtype=st.sampled_from(["bfloat16", "float32", "uint8"]),
        trainable=st.booleans(),
        blocks=st.sets(st.integers(0, 2), max_size=3).map(lambda s: tuple(sorted(s))),
    ),
    min_size=1,
    max_size=12,
)
calls = st.lists(st.integers(0, 2), min_size=0, max_size=3).map(lambda more: (0, 1, 2, *more))


@given(specs, calls, st.sampled_from([1, 256, 1000, 4096, 2**20]))
def test_any_graph_is_packed_without_gap_overlap_or_mixture(
    wanted: list[Spec], order: tuple[int, ...], chunk_bytes: int
) -> None:
    """C1, C2, C5, C13 and C19 at once: alignment, one kind per chunk, oversized, tied and unused parameters."""
    graph = graph_of(wanted, calls=order)
    layout = pack(graph, chunk_bytes)
    assert [chunk.index for chunk in layout.chunks] == list(range(len(layout.chunks)))
    placed = [piece.name for chunk in layout.chunks for piece in chunk.pieces]
    assert sorted(placed) == sorted(p.name for p in graph.params), "every parameter exactly once"
    for chunk in layout.chunks:
        size, end = DTYPE_BYTES[chunk.dtype], 0
        for piece in chunk.pieces:
            param = graph.param[piece.name]
            assert piece.offset * size % ALIGN_BYTES == 0
            assert 0 <= piece.offset - end < ALIGN_BYTES // size, "no overlap, and no more padding than alignment asks"
            assert (piece.numel * size, chunk.is_updated) == (param.nbytes, param.trainable)
            assert chunk.dtype == (param.dtype if param.trainable else BYTE)
            assert chunk.calls == (graph.users[piece.name] or (len(order) - 1,))
            end = piece.offset + piece.numel
        assert 0 <= chunk.numel - end < ALIGN_BYTES // size
        assert chunk.nbytes % ALIGN_BYTES == 0
        assert chunk.nbytes <= chunk_bytes or len(chunk.pieces) == 1


@given(specs, calls)
def test_the_tables_agree_with_the_chunks(wanted: list[Spec], order: tuple[int, ...]) -> None:
    graph = graph_of(wanted, calls=order)
    layout = pack(graph, 1000)
    for name, (index, piece) in layout.location.items():
        assert piece in layout.chunks[index].pieces and piece.name == name
    for call in range(len(order)):
        assert layout.used_by(call) == tuple(chunk.index for chunk in layout.chunks if call in chunk.calls)
        names = {piece.name for index in layout.used_by(call) for piece in layout.chunks[index].pieces}
        assert set(graph.blocks[order[call]].params) <= names, "a call finds all its parameters in its chunks"
    firsts = [chunk.calls[0] for chunk in layout.chunks]
    assert firsts == sorted(firsts), "chunks are in the order of first use"


@given(specs, calls)
def test_a_layout_survives_json(wanted: list[Spec], order: tuple[int, ...]) -> None:
    layout = pack(graph_of(wanted, calls=order), 1000)
    again = loads(ChunkLayout, dumps(layout))
    assert again == layout and fingerprint(again) == fingerprint(layout)


def test_c1_parameters_begin_at_multiples_of_256_bytes_whatever_their_dtype() -> None:
    wanted = [
        Spec(3),
        Spec(5),
        Spec(3, "float32"),
        Spec(5, "float32"),
        Spec(7, "uint8", trainable=False),
        Spec(9, "bfloat16", trainable=False),
        Spec(65, "float32", trainable=False),
        Spec(1, "float8_e4m3fn", trainable=False),
    ]
    layout = pack(graph_of(wanted))
    assert [(chunk.dtype, [piece.offset for piece in chunk.pieces], chunk.nbytes) for chunk in layout.chunks] == [
        ("bfloat16", [0, 128], 512),
        ("float32", [0, 64], 512),
        ("uint8", [0, 256, 512, 1024], 1280),
    ], "frozen parameters of any dtype share a chunk, which holds bytes"


def test_c2_frozen_and_trainable_parameters_never_share_a_chunk_and_frozen_ones_have_no_state() -> None:
    layout = pack(graph_of([Spec(100), Spec(100, trainable=False), Spec(100), Spec(100, trainable=False)]))
    frozen, trained = (
        next(chunk for chunk in layout.chunks if chunk.updated == value) for value in ("frozen", "weights")
    )
    assert [piece.name for piece in frozen.pieces] == ["p1", "p3"] and [piece.name for piece in trained.pieces] == [
        "p0",
        "p2",
    ]
    assert RULE.layout.update_of(frozen, fp32_grads=True) is None


def test_c5_a_parameter_larger_than_a_chunk_has_a_chunk_of_its_own() -> None:
    layout = pack(graph_of([Spec(100), Spec(10_000), Spec(100), Spec(100)]), chunk_bytes=1024)
    assert [[piece.name for piece in chunk.pieces] for chunk in layout.chunks] == [["p0"], ["p1"], ["p2", "p3"]]
    assert layout.chunks[1].nbytes == 20_224  # 20000 rounded up to 256


def test_c13_a_tied_parameter_is_placed_once_with_all_its_visits() -> None:
    layout = pack(
        graph_of([Spec(100, blocks=(0, 2)), Spec(100, blocks=(0,)), Spec(100, blocks=(1,)), Spec(100, blocks=(2,))])
    )
    index, _ = layout.location["p0"]
    assert layout.chunks[index].calls == (0, 2)
    assert [piece.name for piece in layout.chunks[index].pieces] == ["p0"], (
        "what only the stem uses does not wait for the head"
    )
    assert index in layout.used_by(0) and index in layout.used_by(2) and index not in layout.used_by(1)


def test_c13_a_block_that_runs_three_times_has_one_chunk_with_three_visits() -> None:
    layout = pack(
        graph_of([Spec(100, blocks=(0,)), Spec(100, blocks=(1,)), Spec(100, blocks=(2,))], calls=(0, 1, 1, 1, 2))
    )
    assert [chunk.calls for chunk in layout.chunks] == [(0,), (1, 2, 3), (4,)]


def test_c19_a_parameter_that_is_never_read_is_packed_with_the_last_call() -> None:
    layout = pack(graph_of([Spec(100, blocks=()), Spec(100, blocks=(0,)), Spec(100, blocks=(2,))]))
    assert set(layout.location) == {"p0", "p1", "p2"}
    assert layout.chunks[layout.location["p0"][0]].calls == (2,)


@pytest.mark.parametrize(
    ("dtype", "state", "grad", "grad_fp32", "split"), [("bfloat16", 10, 2, 4, True), ("float32", 8, 4, 4, False)]
)
def test_bytes_beside_the_weights(dtype: str, state: int, grad: int, grad_fp32: int, split: bool) -> None:
    """12 bytes a parameter: 2 + 2 + 4 + 4 for a split bf16 master, 4 + 4 + 4 for fp32."""
    (chunk,) = pack(graph_of([Spec(256, dtype)])).chunks
    update, with_fp32 = (RULE.layout.update_of(chunk, fp32_grads=fp32) for fp32 in (False, True))
    assert update is not None and with_fp32 is not None
    assert update.state_bytes == with_fp32.state_bytes == 256 * state
    assert (update.gradient_bytes, with_fp32.gradient_bytes) == (256 * grad, 256 * grad_fp32)
    assert update.is_split is split
    assert chunk.nbytes + update.state_bytes == 256 * 12
