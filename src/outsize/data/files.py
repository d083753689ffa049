"""Reads records from single files. Each record knows its file and line, for error messages.

Lines of JSON are read one at a time. Nothing is skipped silently: unreadable data raises. All data is read before the
first step.
"""

import csv
import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from outsize.base.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    fields: dict[str, Any]
    place: str
    """`data.jsonl:17`, for messages."""

    def get(self, field: str, *, key: str) -> Any:
        """The value of a field. `key`: the setting that names the field."""
        if field not in self.fields:
            columns = ", ".join(self.fields) or "none"
            raise DataError(
                f"{self.place}: no column {field!r}; its columns are {columns}. Set `{key}` of this dataset."
            )
        return self.fields[field]

    def get_text(self, field: str, *, key: str) -> str:
        text = self.get(field, key=key)
        if not isinstance(text, str):
            raise DataError(
                f"{self.place}: {field!r} is {json_type(text)}, not text. Correct the record, or set `{key}` of this "
                "dataset to another column."
            )
        return text


def json_type(value: Any) -> str:
    """The type of a value as the author of a JSON file calls it."""
    names: dict[Any, str] = {type(None): "null", bool: "true or false", str: "text", list: "a list", dict: "an object"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")


def read_file(path: Path, *, suffix: str, field: str) -> Iterator[Record]:
    """All records of one file, read as a file with this suffix, one of `READERS`. `field`: where to put the content of
    a text file.
    """
    record = None
    for record in READERS[suffix](path, field):
        yield record
    if record is None:
        raise DataError(f"{path}: the file is empty. Write it again, or remove it from the datasets.")


def need(module: str, *, to_read: str, extra: str = "data") -> Any:
    """Import a module of an optional package. `extra`: of outsize, which installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"PIL": "pillow"}.get(module.partition(".")[0], module.partition(".")[0])
        raise ConfigError(
            f"Reading {to_read} needs the package {package}, which is not installed. Run: pip install "
            f"'outsize[{extra}]'"
        ) from error


def _read_json(path: Path, _: str) -> Iterator[Record]:
    with path.open("rb") as file:
        start = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n")
        file.seek(0)
        yield from _json_list(path, file) if start.startswith(b"[") else _json_lines(path, file)


def _json_lines(path: Path, file: BinaryIO) -> Iterator[Record]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            fields = json.loads(line.rstrip())
        except ValueError as error:  # not JSON, or not UTF-8
            if not line.endswith(b"\n"):
                raise _cut_off(path, f"its last line, {place}, is incomplete") from error
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(f"{place}: not valid JSON ({reason}). Correct or delete the line.") from error
        yield _record(fields, place)


def _json_list(path: Path, file: BinaryIO) -> Iterator[Record]:
    text = file.read()
    try:
        items = json.loads(text)
    except ValueError as error:
        if not text.rstrip().endswith(b"]"):
            raise _cut_off(path, "its list has no end") from error
        raise DataError(f"{path}: not valid JSON ({error}). Correct the file.") from error
    for number, fields in enumerate(items, start=1):
        yield _record(fields, f"{path} item {number}")


def _record(fields: Any, place: str) -> Record:
    if not isinstance(fields, dict):
        raise DataError(
            f'{place}: {json_type(fields)}, not a JSON object such as {{"text": …}}. Write one object for each record.'
        )
    return Record(fields=fields, place=place)


def _read_text(path: Path, field: str) -> Iterator[Record]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error}). Convert the file, or remove it from the datasets.") from error
    if text.strip():
        yield Record(fields={field: text}, place=str(path))


def _read_csv(path: Path, _: str) -> Iterator[Record]:
    """The first line has the names of the columns. All values are text."""
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        place = f"{path}:1"
        try:
            names = next(rows, [])
            if repeated := sorted({name for name in names if names.count(name) > 1}):
                raise DataError(f"{place}: the column {repeated[0]!r} is given twice. Rename one of them.")
            for values in rows:
                place = f"{path}:{rows.line_num}"
                if values and len(values) != len(names):
                    raise DataError(
                        f"{place}: {len(values)} values for {len(names)} columns ({', '.join(names)}). The first line "
                        "names the columns; quote values with commas, quotes or line breaks."
                    )
                if values:
                    yield Record(fields=dict(zip(names, values, strict=True)), place=place)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(f"{path}: unreadable after {place} ({error}). Write the file again as UTF-8.") from error


def _read_parquet(path: Path, _: str) -> Iterator[Record]:
    parquet = need("pyarrow.parquet", to_read=str(path))
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(fields=fields, place=f"{path}:{number}")
    except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
        raise _cut_off(path, f"unreadable after row {number} ({error})") from error


READERS: dict[str, Callable[[Path, str], Iterator[Record]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".txt": _read_text,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}
"""By file suffix."""


def _cut_off(path: Path, found: str) -> DataError:
    return DataError(f"{path}: {found}. The file seems to be cut off: copy or write it again.")
