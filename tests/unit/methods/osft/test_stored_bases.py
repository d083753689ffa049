"""Bases on disk."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from outsize.methods.osft.bases import split
from outsize.methods.osft.shape import SplitShape
from outsize.methods.osft.stored_bases import bases_folder, load_or_split

SHAPES = [SplitShape(24, 40, 8), SplitShape(40, 24, 23), SplitShape(24, 24, 1, True)]


def weights(dtype: torch.dtype = torch.bfloat16) -> list[tuple[SplitShape, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(shape, torch.randn(shape.rows, shape.columns, generator=generator).to(dtype)) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bases_are_computed_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """D34: what is read has the same bits."""
    first = list(load_or_split(weights(dtype), folder=tmp_path))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(written) == 3
    second = list(load_or_split(weights(dtype), folder=tmp_path))
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    for (shape, weight), (a, a_id), (b, b_id) in zip(weights(dtype), first, second, strict=True):
        expected = split(weight, shape.frozen_rank, is_transposed=shape.is_transposed)
        assert a_id == b_id and a.shape == b.shape == expected.shape == shape
        assert a.tensors().keys() == b.tensors().keys() and len(a.tensors()) == (4 if dtype == torch.bfloat16 else 2)
        for name, tensor in expected.tensors().items():
            assert torch.equal(a.tensors()[name], tensor) and torch.equal(b.tensors()[name], tensor)


def test_other_weights_ranks_and_decompositions_have_other_files(tmp_path: Path) -> None:
    (shape, weight), *_ = weights()
    kinds = [
        (shape, weight, False), (shape, -weight, False), (shape, weight, True), (SplitShape(24, 40, 9), weight, False),
        (SplitShape(40, 24, 8), weight.view(40, 24), False), (shape, weight.float(), False),
    ]  # fmt: skip
    ids = [next(load_or_split([(s, w)], svd=svd, folder=tmp_path))[1] for s, w, svd in kinds]
    assert len({found.weight for found in ids}) == len(kinds) == len(list(tmp_path.iterdir()))


@pytest.mark.parametrize("damage", [lambda whole: whole[:-5], lambda whole: whole[:-64] + bytes(64)])
def test_a_damaged_file_is_made_again(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = list(load_or_split(weights()[:1], folder=tmp_path))
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    with caplog.at_level(logging.WARNING):
        second = list(load_or_split(weights()[:1], folder=tmp_path))
    assert "the weight is split again" in caplog.text
    assert path.read_bytes() == whole and first[0][1] == second[0][1]


def test_without_a_folder_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", "")
    assert bases_folder() is None
    assert len(list(load_or_split(weights(), folder=bases_folder()))) == 3
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path))
    assert bases_folder() == tmp_path / "osft"


def test_a_folder_that_cannot_be_written_costs_only_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "file"
    folder.write_text("")
    with caplog.at_level(logging.WARNING):
        assert len(list(load_or_split(weights()[:1], folder=folder))) == 1
    assert "later runs compute them again" in caplog.text
