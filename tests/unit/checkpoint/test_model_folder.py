"""Folders written tensor by tensor: the files of save_pretrained, complete or not at all."""

from pathlib import Path

import pytest
import torch
import zoo
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outsize.base.errors import SaveFailed
from outsize.checkpoint.model_folder import write_model_folder


def contents(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in folder.glob("*.safetensors")}


@pytest.mark.parametrize("kind", ["llama", "llama-untied", "gpt2", "mixtral"])
@pytest.mark.parametrize("shard", [None, 20_000])
def test_files_of_save_pretrained(tmp_path: Path, kind: str, shard: int | None) -> None:
    model = zoo.make(kind, torch.bfloat16)
    model.save_pretrained(tmp_path / "theirs", **({} if shard is None else {"max_shard_size": shard}))
    weights, asked = model.state_dict(), []

    def value(name: str) -> torch.Tensor:
        asked.append(name)
        return weights[name]

    empty = zoo.make(kind, torch.bfloat16, seed=5)
    write_model_folder(tmp_path / "ours", empty, value, max_shard_size=shard)
    ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    assert {name: sorted(file) for name, file in ours.items()} == {name: sorted(file) for name, file in theirs.items()}
    assert len(theirs) > 1 or shard is None
    for name, file in theirs.items():
        assert all(torch.equal(tensor, ours[name][key]) for key, tensor in file.items())
    assert len(asked) == len(set(asked))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(tensor, weights[name]) for name, tensor in loaded.state_dict().items())


def test_appears_complete_or_not_at_all_and_overwrites_nothing(tmp_path: Path) -> None:
    model = zoo.make("llama")
    weights = model.state_dict()
    calls = 0

    def failing(name: str) -> torch.Tensor:
        nonlocal calls
        calls += 1
        assert not (tmp_path / "made").exists()
        if calls > 3:
            raise KeyboardInterrupt
        return weights[name]

    with pytest.raises(KeyboardInterrupt):
        write_model_folder(tmp_path / "made", model, failing)
    assert list(tmp_path.iterdir()) == []
    write_model_folder(
        tmp_path / "made", model, weights.__getitem__, lambda folder: (folder / "more").write_text("x") and None
    )
    before = {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
    assert before["more"] == b"x"
    with pytest.raises(SaveFailed, match="made"):
        write_model_folder(tmp_path / "made", model, weights.__getitem__)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()}
