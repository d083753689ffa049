"""Which tensor goes into which file under which key: to the byte what save_pretrained writes, decided without a
weight.
"""

import json
from pathlib import Path

import pytest
import torch
import zoo
from torch import Tensor, nn
from transformers import PreTrainedModel
from unit.model.test_weights import emptied

from outsize.checkpoint.model_files import SINGLE, ModelFiles, is_weight_file, model_files, write_configs
from outsize.checkpoint.tensorfile import TensorFile, TensorSpec

HUGGING_FACE = [kind for kind in zoo.NAMES if isinstance(zoo.make(kind), PreTrainedModel)]
KINDS = [
    (kind, tied)
    for kind in HUGGING_FACE
    for tied in (True, False)
    if not (kind in ("bert", "llama-classes", "modernbert") and tied)
]


def written(model: nn.Module, folder: Path, files: ModelFiles) -> Path:
    """The files as they say themselves, one tensor after the other."""
    folder.mkdir()
    state = model.state_dict()
    made = {
        key: tensor
        for conversion in files.conversions
        for key, tensor in conversion.convert({name: state[name] for name in conversion.inputs}).items()
    }
    for name, specs in files.files.items():
        with TensorFile.create(folder / name, specs, {"format": "pt"}) as file:
            for key in specs:
                file.write(key, state[files.source[key]] if key in files.source else made[key])
    write_configs(model, folder, files)
    return folder


def assert_same_files(found: Path, expected: Path) -> None:
    assert sorted(path.name for path in found.iterdir()) == sorted(path.name for path in expected.iterdir())
    for path in expected.iterdir():
        assert (found / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("size", [None, "20KB", "3KB"])
@pytest.mark.parametrize(("kind", "tied"), KINDS)
def test_files_are_those_of_save_pretrained_to_the_byte(
    tmp_path: Path, kind: str, tied: bool, size: str | None
) -> None:
    model = zoo.make(kind, torch.bfloat16 if tied else torch.float32, tied)
    files = model_files(model, max_shard_size=size)
    assert (len(files.files) > 1) == (size is not None) == (files.index is not None)
    written(model, tmp_path / "ours", files)
    model.save_pretrained(tmp_path / "theirs", **({} if size is None else {"max_shard_size": size}))
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("kind", ["mixtral", "llama", "bert"])
def test_a_model_that_was_loaded_is_written_as_it_was_stored(tmp_path: Path, kind: str) -> None:
    zoo.make(kind).save_pretrained(tmp_path / "theirs")
    model = type(zoo.make(kind)).from_pretrained(tmp_path / "theirs")
    written(model, tmp_path / "ours", model_files(model))
    assert_same_files(tmp_path / "ours", tmp_path / "theirs")


def test_no_weight_is_touched_to_decide() -> None:
    """A model on meta gives the same answer."""
    for kind in ("llama", "mixtral"):
        model = zoo.make(kind)
        files, without = model_files(model), model_files(emptied(model))
        assert files.files == without.files and files.source == without.source
        assert [(r.inputs, r.keys) for r in files.conversions] == [(r.inputs, r.keys) for r in without.conversions]


def test_converted_weights_are_made_of_one_tensor_at_a_time() -> None:
    """So that saving a model of experts holds one of its layers twice, not all."""
    model = zoo.make("mixtral")
    files = model_files(model)
    experts = [name for name in model.state_dict() if ".experts." in name]
    assert [conversion.inputs for conversion in files.conversions] == [(name,) for name in experts] and experts
    assert set(files.source.values()) == set(model.state_dict()) - set(experts)
    keys = [key for conversion in files.conversions for key in conversion.keys]
    assert len(keys) == len(set(keys)) and set(keys) | files.source.keys() == files.files[SINGLE].keys()


# --- other models


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 3, dtype=torch.bfloat16)
        self.b = nn.Linear(2, 3, bias=False, dtype=torch.bfloat16)
        self.b.weight = self.a.weight
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 2))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("count_again", self.count)
        self.register_buffer("table", torch.ones(4), persistent=False)


def test_any_other_module_is_one_file_with_every_tensor_once(tmp_path: Path) -> None:
    model = Odd()
    files = model_files(model)
    expected = {"a.weight": (3, 2), "a.bias": (3,), "scalar": (), "nothing": (0, 2), "count": ()}
    assert {key: spec.shape for key, spec in files.files[SINGLE].items()} == expected
    assert (
        files.files[SINGLE]["a.weight"] == TensorSpec(torch.bfloat16, (3, 2))
        and files.files[SINGLE]["count"].dtype == torch.int64
    )
    assert files.source == {name: name for name in expected} and files.conversions == () and files.index is None
    assert [path.name for path in written(model, tmp_path / "ours", files).iterdir()] == [SINGLE]


class WithExtraState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def get_extra_state(self) -> Tensor:
        return torch.ones(1)

    def set_extra_state(self, state: Tensor) -> None:
        pass


def test_what_is_neither_parameter_nor_buffer_is_left_out() -> None:
    assert model_files(WithExtraState()).files == {SINGLE: {"weight": TensorSpec(torch.float32, (2,))}}


def test_a_config_that_some_other_module_has_is_not_written(tmp_path: Path) -> None:
    model = Odd()
    model.config = zoo.make("llama").config
    assert [path.name for path in written(model, tmp_path / "ours", model_files(model)).iterdir()] == [SINGLE]


def test_weight_files_are_known_by_name() -> None:
    for name in ("model.safetensors", "model.safetensors.index.json", "model-00002-of-00005.safetensors"):
        assert is_weight_file(name)
    for name in (
        "adapter_model.safetensors",
        "config.json",
        "model.bin",
        "my-model.safetensors",
        "model-1-of-2.safetensors",
        "tokenizer.json",
        "modeling.py",
    ):
        assert not is_weight_file(name)


def test_the_index_says_where_every_key_is(tmp_path: Path) -> None:
    model = zoo.make("llama")
    files = model_files(model, max_shard_size="20KB")
    assert files.index is not None
    assert files.index["weight_map"] == {key: file for file, keys in files.files.items() for key in keys}
    assert json.loads(json.dumps(files.index)) == files.index
