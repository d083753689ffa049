"""Bases on disk."""

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import outsize
from outsize.base.errors import ModelUnsupported
from outsize.methods.osft.bases import split
from outsize.methods.osft.shape import SplitShape
from outsize.methods.osft.stored_bases import bases_folder, load_or_split

SHAPES = [SplitShape(24, 40, 8), SplitShape(40, 24, 23), SplitShape(24, 24, 1, True)]


def weights(dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, SplitShape, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [("w", shape, torch.randn(shape.rows, shape.columns, generator=generator).to(dtype)) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bases_are_computed_once(dtype: torch.dtype, tmp_path: Path) -> None:
    """D34: what is read has the same bits."""
    first = list(load_or_split(weights(dtype), folder=tmp_path))
    written = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(written) == 3
    second = list(load_or_split(weights(dtype), folder=tmp_path))
    assert written == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    for (_, shape, weight), (a, a_id), (b, b_id) in zip(weights(dtype), first, second, strict=True):
        expected = split(weight, shape.frozen_rank, is_transposed=shape.is_transposed)
        assert a_id == b_id and a.shape == b.shape == expected.shape == shape
        assert a.tensors().keys() == b.tensors().keys() and len(a.tensors()) == (4 if dtype == torch.bfloat16 else 2)
        for name, tensor in expected.tensors().items():
            assert torch.equal(a.tensors()[name], tensor) and torch.equal(b.tensors()[name], tensor)


def test_other_weights_ranks_and_decompositions_have_other_files(tmp_path: Path) -> None:
    (_, shape, weight), *_ = weights()
    kinds = [
        (shape, weight, False), (shape, -weight, False), (shape, weight, True), (SplitShape(24, 40, 9), weight, False),
        (SplitShape(40, 24, 8), weight.view(40, 24), False), (shape, weight.float(), False),
    ]  # fmt: skip
    ids = [next(load_or_split([("w", s, w)], svd=svd, folder=tmp_path))[1] for s, w, svd in kinds]
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


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_weights_that_are_not_finite_are_refused_by_name(value: float, tmp_path: Path) -> None:
    (_, shape, weight), *_ = weights()
    weight[3, 5] = value
    with pytest.raises(ModelUnsupported, match=r"layer\.weight: 1 of its 960 values are NaN or infinite"):
        next(load_or_split([("layer.weight", shape, weight)], folder=tmp_path))
    assert not list(tmp_path.iterdir())


def test_a_process_that_is_killed_while_it_writes_leaves_no_bases(tmp_path: Path) -> None:
    """The name appears when the file is complete."""
    script = """
import os, signal, sys, torch
from pathlib import Path
from outsize.checkpoint.tensorfile import TensorFile
from outsize.methods.osft.shape import SplitShape
from outsize.methods.osft.stored_bases import load_or_split
write = TensorFile.write
def dying(self, key, *rest):
    if key == "frozen":
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, key, *rest)
TensorFile.write = dying
weight = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
next(load_or_split([("w", SplitShape(24, 40, 8), weight)], folder=Path(sys.argv[1])))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(outsize.__file__).parents[1])}
    run = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, capture_output=True)
    assert run.returncode == -signal.SIGKILL, run.stderr.decode()
    (left,) = tmp_path.iterdir()
    assert left.suffix == ".tmp"
    os.utime(left, (0, 0))
    one = weights(torch.float32)[:1]
    first = next(load_or_split(one, folder=tmp_path))
    assert next(load_or_split(one, folder=tmp_path))[1] == first[1] and len(list(tmp_path.iterdir())) == 1
