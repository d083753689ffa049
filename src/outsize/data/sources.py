"""Where records come from: a file, a folder, or the hub. Files need nothing installed beside this library, except
parquet; the hub and folders written by `save_to_disk` need `datasets`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from outsize.base.errors import ConfigError, DataError, tell
from outsize.data.files import READERS, Record, need, read_file

_SUFFIXES = {"json": ".json", "jsonl": ".jsonl", "text": ".txt", "parquet": ".parquet"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One dataset as a user names it; the fields have the names of the configuration's keys."""

    path: str
    """A file, a folder, or a dataset's name on the hub."""
    type: Literal["chat_template", "completion"] | None = None
    """None: told from the first record."""
    field: str = "text"
    """Where the text of a completion is."""
    field_messages: str = "messages"
    """Where the messages of a chat are; `conversations` is looked for too unless another name is given."""
    split: str = "train"
    name: str | None = None
    """Of the configuration, where a dataset on the hub has several."""
    ds_type: Literal["json", "jsonl", "text", "parquet"] | None = None
    """What the files are. None: told from their endings."""

    def __post_init__(self) -> None:
        for key, value, known in (
            ("type", self.type, ("chat_template", "completion")),
            ("ds_type", self.ds_type, tuple(_SUFFIXES)),
        ):
            if value is not None and value not in known:
                raise ConfigError(
                    tell(
                        f"{key} of a dataset is one of {', '.join(known)}",
                        f"it is {value!r}",
                        "Choose one, or leave it out",
                    )
                )


def read(source: Source) -> Iterator[Record]:
    """All records in order, at least one. What is wrong with the data raises when reading comes to it."""
    path = Path(source.path).expanduser()
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved_records(path, source)
    if path.exists():
        return _local_records(path, source)
    if path.suffix in READERS or source.path.startswith(("/", ".", "~")):
        raise ConfigError(
            tell(
                f"the dataset {source.path} is a file or folder",
                "there is none of that name",
                "Correct `path` of this dataset",
            )
        )
    return _hub_records(source)


def _local_records(path: Path, source: Source) -> Iterator[Record]:
    files = _files_in(path, source) if path.is_dir() else [path]
    if not files:
        # A folder as the hub has it keeps its files further down, by split.
        yield from _hub_records(source)
        return
    for file in files:
        suffix = _SUFFIXES[source.ds_type] if source.ds_type is not None else file.suffix
        if suffix not in READERS:
            found = f"{file} ends in {suffix!r}"
            raise ConfigError(
                tell(
                    f"the ending of a dataset's file is one of {', '.join(READERS)}",
                    found,
                    "Rename it, or say what it is with `ds_type`",
                )
            )
        for key, value, only in (("split", source.split, "train"), ("name", source.name, None)):
            if value != only:
                found = f"{key} of this dataset is {value!r}"
                raise ConfigError(
                    tell(
                        f"all of {file} is read, since only datasets on the hub have splits and names",
                        found,
                        f"Remove `{key}`",
                    )
                )
        yield from read_file(file, suffix=suffix, field=source.field)


def _files_in(folder: Path, source: Source) -> list[Path]:
    visible = [path for path in folder.iterdir() if path.is_file() and not path.name.startswith(".")]
    return sorted(path for path in visible if source.ds_type is not None or path.suffix in READERS)


# --- through `datasets`


def _saved_records(folder: Path, source: Source) -> Iterator[Record]:
    saved = _ask(source, lambda datasets: datasets.load_from_disk(str(folder)))
    if isinstance(saved, dict):
        if source.split not in saved:
            found = f"its splits are {', '.join(saved)}"
            raise ConfigError(
                tell(
                    f"{source.path} has the split {source.split!r}",
                    found,
                    "Name one of them with `split` of this dataset",
                )
            )
        saved = saved[source.split]
    yield from _records_of(saved, source)


def _hub_records(source: Source) -> Iterator[Record]:
    yield from _records_of(
        _ask(source, lambda datasets: datasets.load_dataset(source.path, name=source.name, split=source.split)), source
    )


def _ask(source: Source, load: Callable[[Any], Any]) -> Any:
    datasets = need("datasets", to_read=source.path)
    try:
        return load(datasets)
    except Exception as error:  # its errors have no common type, and each means that this dataset cannot be had
        found = f"`datasets` says {type(error).__name__}: {error}".rstrip(". \n")
        do = "Correct `path`, `name` or `split` of this dataset, or download it first and name the folder"
        raise ConfigError(tell(f"{source.path} is a file, a folder, or a dataset on the hub", found, do)) from error


def _records_of(dataset: Any, source: Source) -> Iterator[Record]:
    number = 0
    for number, fields in enumerate(dataset, start=1):
        yield Record(fields=dict(fields), place=f"{source.path}:{number}")
    if not number:
        raise DataError(
            tell(
                f"{source.path} has records",
                f"its split {source.split!r} is empty",
                "Name another `split`, or remove it from the datasets",
            )
        )
