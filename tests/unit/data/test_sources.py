"""A path is a file, a folder or a name on the hub; the hub is a stand-in here."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize.base.errors import ConfigError, DataError
from outsize.config.run import DatasetConfig
from outsize.data.sources import read


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets")


def texts(**source: Any) -> list[str]:
    return [record.fields["text"] for record in read(DatasetConfig(**source))]


def test_a_folder_is_its_files_in_sorted_order(tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    write_jsonl({"text": "two"}, name="b.jsonl")
    write_jsonl({"text": "one"}, name="a.json")
    (tmp_path / "c.txt").write_text("three")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".d.txt").write_text("hidden")
    assert texts(path=str(tmp_path)) == ["one", "two", "three"]


def test_data_files_names_the_files_of_a_folder(write_jsonl: Callable[..., Path]) -> None:
    folder = write_jsonl({"text": "one"}, name="a.jsonl").parent
    write_jsonl({"text": "two"}, name="b.jsonl")
    assert texts(path=str(folder), data_files=("b.jsonl",)) == ["two"]
    with pytest.raises(ConfigError, match=r"there is no file .*c\.jsonl\. Correct `data_files`"):
        texts(path=str(folder), data_files=("b.jsonl", "c.jsonl"))


def test_a_text_file_fills_the_field_that_is_requested(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("one")
    assert [record.fields for record in read(DatasetConfig(path=str(path), field="body"))] == [{"body": "one"}]


def test_ds_type_says_what_an_unknown_ending_does_not(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl({"text": "one"}, name="data.ndjson")
    assert texts(path=str(path), ds_type="jsonl") == texts(path=str(path.parent), ds_type="json") == ["one"]
    with pytest.raises(ConfigError, match=r"data\.ndjson: unknown suffix '\.ndjson'\. .*`ds_type`"):
        texts(path=str(path))


def test_a_saved_dataset_is_read_by_split(tmp_path: Path, datasets: Any) -> None:
    one, two = (datasets.Dataset.from_list([{"text": text}]) for text in ("one", "two"))
    one.save_to_disk(tmp_path / "single")
    datasets.DatasetDict({"train": one, "test": two}).save_to_disk(tmp_path / "dict")
    assert texts(path=str(tmp_path / "single")) == texts(path=str(tmp_path / "dict")) == ["one"]
    assert texts(path=str(tmp_path / "dict"), split="test") == ["two"]
    with pytest.raises(ConfigError, match="no split 'dev'; its splits are train, test"):
        texts(path=str(tmp_path / "dict"), split="dev")


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outsize.data.sources.hub_answers", lambda *_, **__: True)


@pytest.mark.usefixtures("online")
def test_anything_else_is_read_from_the_hub(monkeypatch: pytest.MonkeyPatch, datasets: Any) -> None:
    asked = []

    def load_dataset(path: str, **options: Any) -> Any:
        asked.append((path, options))
        return datasets.Dataset.from_list([{"text": "one"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (record,) = read(DatasetConfig(path="org/poems", name="short", split="train[:1]"))
    assert (record.fields, record.place) == ({"text": "one"}, "org/poems:1")
    assert asked == [("org/poems", {"name": "short", "split": "train[:1]"})]


@pytest.mark.usefixtures("online")
def test_what_the_hub_refuses_is_reported_with_its_reason(monkeypatch: pytest.MonkeyPatch, datasets: Any) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("no such dataset")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ConfigError, match=r"org/poems: cannot be loaded .FileNotFoundError: no such dataset"):
        texts(path="org/poems")


def test_without_network_a_name_is_refused_at_once_unless_it_was_downloaded(
    monkeypatch: pytest.MonkeyPatch, datasets: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr("outsize.data.sources.hub_answers", lambda *_, **__: False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([{"text": "one"}]))
    with pytest.raises(ConfigError, match="no file or folder org/OldPoems, and the hub cannot be reached"):
        texts(path="org/OldPoems")
    (tmp_path / "org___old_poems").mkdir()
    assert texts(path="org/OldPoems") == ["one"]


@pytest.mark.usefixtures("online")
def test_an_empty_dataset_is_named(monkeypatch: pytest.MonkeyPatch, datasets: Any) -> None:
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list([]))
    with pytest.raises(DataError, match="org/poems: the split 'train' is empty"):
        texts(path="org/poems")


def test_the_hub_without_its_package_is_reported_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"Reading org/poems needs the package datasets.*pip install 'outsize\[data\]'"
    ):
        texts(path="org/poems")


@pytest.mark.parametrize("path", ["missing.jsonl", "/no/where", "./data", "~/no-such-folder-at-all"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(path: str) -> None:
    with pytest.raises(ConfigError, match="there is no file or folder"):
        read(DatasetConfig(path=path))


@pytest.mark.parametrize(("key", "value"), [("split", "test"), ("name", "short")])
def test_a_file_has_no_splits_and_no_names(write_jsonl: Callable[..., Path], key: str, value: str) -> None:
    path = write_jsonl({"text": "one"})
    with pytest.raises(ConfigError, match=rf"data\.jsonl: {key} of this dataset is '{value}'"):
        texts(path=str(path), **{key: value})
