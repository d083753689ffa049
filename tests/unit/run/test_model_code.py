"""The code files of a model's folder: which names are accepted, and which files go along."""

import json
from pathlib import Path
from typing import Any

import pytest

from outsize.base.errors import ConfigError
from outsize.run.model_code import model_code


def write(folder: Path, auto_map: dict[str, Any], tokenizer: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": tokenizer or {}}))
    for name, text in {"own": "from .layers import Layer\n", "layers": "import torch\n", "words": "", "x": ""}.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def test_d22_lists_prefixes_and_what_is_imported(tmp_path: Path) -> None:
    given = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "some/one--own.OwnModel"}
    code = model_code(write(tmp_path, given, {"AutoTokenizer": ["words.Slow", None]}))
    assert code.auto_map == {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    assert code.model_module == "own"
    assert code.files == {name: tmp_path / name for name in ("own.py", "layers.py", "words.py")}
    assert model_code(tmp_path / "nowhere").files == {}


@pytest.mark.parametrize(
    "name", ["../x.Own", "..x.Own", "/x.Own", "a/x.Own", "a.b.Own", "Own", "some/one--../x.Own", 3]
)
@pytest.mark.parametrize("is_list", [False, True])
def test_d22_names_that_are_no_class_in_a_file_of_the_folder(tmp_path: Path, name: Any, is_list: bool) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "x.py").write_text("")
    given = {"AutoTokenizer": [name, None]} if is_list else {"AutoModelForCausalLM": name}
    with pytest.raises(ConfigError, match=r"auto_map in .*config.json names .*, which is no class in a file"):
        model_code(write(folder, *(({}, given) if is_list else (given,))))


def test_d22_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"auto_map names other.Own, but .* has no other.py"):
        model_code(write(tmp_path, {"AutoModelForCausalLM": "other.Own"}))
    (tmp_path / "own.py").write_text("from ..above import Layer\n")
    (tmp_path.parent / "above.py").write_text("")
    with pytest.raises((ConfigError, OSError)):
        model_code(write_only(tmp_path, {"AutoModelForCausalLM": "own.Own"}))


def write_only(folder: Path, auto_map: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps({"auto_map": auto_map}))
    return folder
