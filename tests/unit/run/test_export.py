"""`outsize export` of folders that are not what they should be. What it makes of good ones is in
tests/parity/test_lora_runs.py.
"""

import shutil
from pathlib import Path

import folders
import peft
import pytest

from outsize.base.errors import BadFile, ConfigError
from outsize.run.export import export_folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and an adapter of it."""
    folder = tmp_path_factory.mktemp("made")
    model = folders.write_model(folder / "model")
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(folder / "adapter")  # type: ignore[arg-type]
    return folder


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


def test_a_target_that_is_a_file_is_refused_and_kept(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="it is a file"):
        export_folder(source / "model", tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize(("name", "file"), [("model", "model.safetensors"), ("adapter", "adapter_model.safetensors")])
@pytest.mark.parametrize("merge", [False, True])
def test_a_source_without_weights_is_refused(source: Path, tmp_path: Path, name: str, file: str, merge: bool) -> None:
    (source / name / file).unlink()
    with pytest.raises((BadFile, ConfigError), match="weights"):
        export_folder(source / name, tmp_path / "to", merge=merge)
    assert not (tmp_path / "to").exists()


def test_an_adapter_that_does_not_fit_its_base_is_refused(source: Path, tmp_path: Path) -> None:
    folders.write_model(source / "other", "gpt2")
    with pytest.raises(ConfigError, match=r"other: the adapter does not fit.*--base"):
        export_folder(source / "adapter", tmp_path / "to", merge=True, base=str(source / "other"))
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_an_adapter_config_that_is_cut_off_is_named(source: Path, tmp_path: Path) -> None:
    (source / "adapter" / "adapter_config.json").write_text("{")
    with pytest.raises(BadFile, match=r"adapter_config\.json"):
        export_folder(source / "adapter", tmp_path / "to", merge=True)


def test_a_model_in_several_files_stays_in_several_files(source: Path, tmp_path: Path) -> None:
    folders.write_model(source / "sharded", max_shard_size="20KB")
    export_folder(source / "sharded", tmp_path / "to")
    copied = {path.name: path.read_bytes() for path in (tmp_path / "to").iterdir()}
    assert copied == {path.name: path.read_bytes() for path in (source / "sharded").iterdir()} and len(copied) > 4
