"""Identity by content: a moved or copied teacher is the same one, a changed weight makes another."""

import shutil
from pathlib import Path

import folders
import pytest
import torch

from outsize.config.read import read_config
from outsize.run.content_hash import model_hash, rows_hash
from outsize.run.inputs import load_inputs


def test_the_hash_is_of_the_content_and_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", str(tmp_path / "cache"))
    model = folders.write_model(tmp_path / "model")
    found = model_hash(tmp_path / "model")
    shutil.copytree(tmp_path / "model", tmp_path / "moved")
    assert model_hash(tmp_path / "moved") == found
    with monkeypatch.context() as without_reading:
        without_reading.setattr("hashlib.file_digest", lambda *_: pytest.fail("the file was read again"))
        assert model_hash(tmp_path / "model") == found
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    model.save_pretrained(tmp_path / "model")
    assert model_hash(tmp_path / "model") != found


def test_without_a_cache_folder_files_are_read_every_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTSIZE_CACHE", "")
    folders.write_model(tmp_path / "model")
    assert model_hash(tmp_path / "model") == model_hash(tmp_path / "model")


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_their_tokens_not_their_file(tmp_path: Path, packed: bool) -> None:
    keys = [f"sample_packing={str(packed).lower()}"]
    config = read_config(folders.write_run(tmp_path), keys)
    found = rows_hash(load_inputs(config).train)
    data = tmp_path / "data.jsonl"
    data.rename(tmp_path / "other.jsonl")
    moved = [*keys, f"datasets=[{tmp_path / 'other.jsonl'}]"]
    assert rows_hash(load_inputs(read_config(tmp_path / "run.yaml", moved)).train) == found
    assert rows_hash(load_inputs(read_config(tmp_path / "run.yaml", [*moved, "sequence_len=24"])).train) != found
    lines = (tmp_path / "other.jsonl").read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
    assert rows_hash(load_inputs(read_config(tmp_path / "run.yaml", moved)).train) != found
