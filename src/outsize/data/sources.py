"""Reads datasets: a file, a folder, or a dataset on the hub. Parquet files, hub datasets and folders written by
`save_to_disk` need optional packages.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from outsize.base.errors import ConfigError, DataError
from outsize.config.run import DatasetConfig
from outsize.data.files import READERS, Record, need, read_file
from outsize.hub import hub_answers, may_be_hub_id

_SUFFIXES = {"json": ".json", "jsonl": ".jsonl", "text": ".txt", "csv": ".csv", "parquet": ".parquet"}


def read(source: DatasetConfig) -> Iterator[Record]:
    """All records in order, at least one. Invalid data raises when it is reached."""
    path = Path(source.path).expanduser()
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved_records(path, source)
    if path.exists():
        return _local_records(path, source)
    require_data_path(source.path)
    return _hub_records(source)


def require_data_path(name: str) -> None:
    """Raise if a dataset is neither a file or folder nor a possible hub id."""
    path = Path(name).expanduser()
    if not path.exists() and (path.suffix in READERS or not may_be_hub_id(name)):
        raise ConfigError(f"datasets: there is no file or folder {name}. Correct `path` of this dataset.")


def _local_records(path: Path, source: DatasetConfig) -> Iterator[Record]:
    files = _files_in(path, source) if path.is_dir() else [path]
    if not files:
        # A folder in the layout of the hub has its files in subfolders, by split.
        yield from _hub_records(source)
        return
    for file in files:
        suffix = _SUFFIXES[source.ds_type] if source.ds_type is not None else file.suffix
        if suffix not in READERS:
            raise ConfigError(
                f"{file}: unknown suffix {suffix!r}. Set `ds_type` if it is one of {', '.join(_SUFFIXES)}; otherwise "
                "convert it."
            )
        for key, value, only in (("split", source.split, "train"), ("name", source.name, None)):
            if value != only:
                raise ConfigError(
                    f"{file}: {key} of this dataset is {value!r}, but a file has no splits or names. Remove `{key}`."
                )
        yield from read_file(file, suffix=suffix, field=source.field)


def _files_in(folder: Path, source: DatasetConfig) -> list[Path]:
    if source.data_files:
        named = [folder / name for name in source.data_files]
        if missing := [path for path in named if not path.is_file()]:
            raise ConfigError(f"datasets: there is no file {missing[0]}. Correct `data_files` of this dataset.")
        return named
    visible = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    return sorted(path for path in visible if source.ds_type is not None or path.suffix in READERS)


# --- through `datasets`


def _saved_records(folder: Path, source: DatasetConfig) -> Iterator[Record]:
    saved = _load(source, lambda datasets: datasets.load_from_disk(str(folder)))
    if isinstance(saved, dict):
        if source.split not in saved:
            raise ConfigError(
                f"{source.path}: no split {source.split!r}; its splits are {', '.join(saved)}. Set `split` of this "
                "dataset."
            )
        saved = saved[source.split]
    yield from _records_of(saved, source)


def _hub_records(source: DatasetConfig) -> Iterator[Record]:
    need("datasets", to_read=source.path)
    is_elsewhere = not Path(source.path).exists() and not _is_cached(source.path)
    if is_elsewhere and not hub_answers(source.path, repo_type="dataset"):  # `datasets` would retry for half a minute
        raise ConfigError(
            f"datasets: there is no file or folder {source.path}, and the hub cannot be reached. Correct `path` of "
            "this dataset, or download it where there is network and name its folder."
        )
    options: dict[str, Any] = {"name": source.name, "split": source.split}
    if source.data_files:
        options["data_files"] = list(source.data_files)
    yield from _records_of(_load(source, lambda datasets: datasets.load_dataset(source.path, **options)), source)


def _load(source: DatasetConfig, load: Callable[[Any], Any]) -> Any:
    datasets = need("datasets", to_read=source.path)
    try:
        return load(datasets)
    except Exception as error:  # `datasets` has no common error type
        what = f"{source.path}: cannot be loaded ({type(error).__name__}: {str(error).strip().rstrip('.')})"
        raise ConfigError(
            f"{what}. Correct `path`, `name` or `split` of this dataset, or download it and give the folder."
        ) from error


def _is_cached(name: str) -> bool:
    """Whether `datasets` has downloaded this dataset before."""
    from datasets import config, naming

    *owner, last = name.split("/")
    return (Path(config.HF_DATASETS_CACHE) / "___".join([*owner, naming.camelcase_to_snakecase(last)])).exists()


def _records_of(dataset: Any, source: DatasetConfig) -> Iterator[Record]:
    number = 0
    for number, fields in enumerate(_fields_of(dataset), start=1):
        yield Record(fields=dict(fields), place=f"{source.path}:{number}")
    if not number:
        raise DataError(
            f"{source.path}: the split {source.split!r} is empty. Set another `split`, or remove the dataset."
        )


def _fields_of(dataset: Any) -> Iterator[Any]:
    """The rows. Images are left as they are stored: as bytes, or as paths."""
    if "Image(" not in repr(getattr(dataset, "features", None)):
        yield from dataset
        return
    for table in dataset.with_format("arrow").iter(batch_size=64):
        yield from table.to_pylist()
