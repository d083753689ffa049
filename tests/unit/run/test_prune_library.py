"""The library on disk: states and entries are complete or absent, and the newest complete one counts."""

import os
from pathlib import Path

import pruned
import pytest
import torch

from outsize.base.errors import BadFile
from outsize.run.prune_library import BEST, LATEST, STATE, Description, Library


def described(steps: int) -> Description:
    return Description(
        layer=3, layer_name="model.layers.3", variant="ffn-64", learn="ffn", changes=({"kind": "copy"},), spec="0" * 16,
        steps=steps, losses=((1, 0.5), (steps, 0.25)),
    )  # fmt: skip


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((3, 2), value, dtype=torch.bfloat16), "w/lo": torch.ones(3, dtype=torch.int16)}


def test_a_state_replaces_the_one_before_and_an_entry_replaces_states(tmp_path: Path) -> None:
    library = Library(tmp_path)
    assert library.state(3, "ffn-64") is None and library.entry(3, "ffn-64") is None
    library.save_state(described(50), tensors(1.0))
    library.save_state(described(100), tensors(2.0), best=tensors(7.0))
    found = library.state(3, "ffn-64")
    assert found is not None and found.description == described(100) and found.folder.name == "step-000100"
    assert torch.equal(found.tensors(STATE)["w"], tensors(2.0)["w"]) and found.tensors(BEST)["w"][0, 0] == 7
    assert [path.name for path in found.folder.parent.iterdir()] == ["step-000100"]
    library.finish(described(200), {LATEST: tensors(3.0)})
    entry = library.entry(3, "ffn-64")
    assert entry is not None and entry.description.steps == 200 and library.state(3, "ffn-64") is None
    assert entry.folder == tmp_path / "library" / "003" / "ffn-64" and not entry.has(STATE)


def test_d8_a_saved_state_is_not_changed(tmp_path: Path) -> None:
    library = Library(tmp_path)
    library.save_state(described(50), tensors(1.0))
    library.save_state(described(50), tensors(9.0))
    found = library.state(3, "ffn-64")
    assert found is not None and found.tensors(STATE)["w"][0, 0] == 1


@pytest.mark.parametrize("name", ["description.json", "latest.safetensors"])
def test_a_damaged_entry_is_named_with_what_to_do(tmp_path: Path, name: str) -> None:
    library = Library(tmp_path)
    library.finish(described(200), {LATEST: tensors(3.0)})
    path = tmp_path / "library" / "003" / "ffn-64" / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(BadFile, match=r"ffn-64 is damaged: .* Remove this folder; the same command makes it again"):
        library.entry(3, "ffn-64")


@pytest.mark.parametrize("finishes", [False, True])
@pytest.mark.parametrize("function", ["fsync", "rename", "unlink", "rmdir", "ftruncate", "pwrite", "open"])
def test_d7_a_kill_at_every_file_boundary_leaves_one_whole_state(tmp_path: Path, function: str, finishes: bool) -> None:
    for number in range(1, 60):
        library = Library(tmp_path / str(number))
        library.save_state(described(50), tensors(1.0))

        def work(library: Library = library) -> None:
            if finishes:
                library.finish(described(100), {LATEST: tensors(2.0)})
            else:
                library.save_state(described(100), tensors(2.0))

        owner, name = (Path, "rename") if function == "rename" else (os, function)
        was_killed = pruned.killed_at(number, owner, name, work)
        entry, state = library.entry(3, "ffn-64"), library.state(3, "ffn-64")
        if entry is not None:
            assert finishes and entry.tensors(LATEST)["w"][0, 0] == 2
        else:
            assert state is not None
            assert state.tensors(STATE)["w"][0, 0] == {50: 1, 100: 2}[state.description.steps]
        library.finish(described(100), {LATEST: tensors(2.0)})
        assert library.entry(3, "ffn-64") is not None and library.state(3, "ffn-64") is None
        if not was_killed:
            return
    raise AssertionError("never finished")
