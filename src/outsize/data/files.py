"""Records from single files. Each knows where it came from, so that whatever is wrong with it later can be told with
file and line.

Lines of JSON are read one at a time. Nothing is skipped in silence: what cannot be read raises. Since all data is read
before the first step, nothing was trained then.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from outsize.base.errors import ConfigError, DataError, tell


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    fields: dict[str, Any]
    place: str
    """`data.jsonl:17`, for messages."""

    def get(self, field: str, *, key: str) -> Any:
        """What is in a field; `key` is the configuration's key that names it."""
        if field not in self.fields:
            found = f"its columns are {', '.join(self.fields) or 'none'}"
            raise DataError(
                tell(
                    f"{self.place} has the column {field!r}", found, f"Name the right one with `{key}` of this dataset"
                )
            )
        return self.fields[field]

    def get_text(self, field: str, *, key: str) -> str:
        text = self.get(field, key=key)
        if not isinstance(text, str):
            do = f"Correct the record, or name another column with `{key}` of this dataset"
            raise DataError(tell(f"{field!r} of {self.place} is text", f"it is {json_type(text)}", do))
        return text


def json_type(value: Any) -> str:
    """In the words of a JSON file: what its author sees."""
    names = {
        type(None): "null",
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "an object",
    }
    return names.get(type(value), f"a {type(value).__name__}")


def read_file(path: Path, *, suffix: str, field: str) -> Iterator[Record]:
    """All records of one file, read as a file that ends in `suffix`, one of `READERS`. `field` is where a file of plain
    text has its text.
    """
    record = None
    for record in READERS[suffix](path, field):
        yield record
    if record is None:
        raise DataError(
            tell(
                f"{path} has records",
                "it is empty",
                "Nothing was trained. Write the file again, or remove it from the datasets",
            )
        )


def need(module: str, *, to_read: str) -> Any:
    """A module of a package that not everyone has."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            tell(
                f"the package {package} is there to read {to_read}",
                "it is not installed",
                "Run: pip install 'outsize[data]'",
            )
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
            fields = json.loads(line)
        except ValueError as error:  # not JSON, or not UTF-8
            if not line.endswith(b"\n"):
                raise _cut_off(path, f"its last line, {place}, stops in the middle") from error
            reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(
                tell(
                    f"each line of {path} is a JSON object",
                    f"{place} is not JSON ({reason})",
                    "Correct or delete that line",
                )
            ) from error
        yield _record(fields, place)


def _json_list(path: Path, file: BinaryIO) -> Iterator[Record]:
    text = file.read()
    try:
        items = json.loads(text)
    except ValueError as error:
        if not text.rstrip().endswith(b"]"):
            raise _cut_off(path, "its list has no end") from error
        raise DataError(
            tell(f"{path} is a JSON list of objects", f"it is not JSON ({error})", "Correct it there")
        ) from error
    for number, fields in enumerate(items, start=1):
        yield _record(fields, f"{path} item {number}")


def _record(fields: Any, place: str) -> Record:
    if not isinstance(fields, dict):
        raise DataError(
            tell(
                f'{place} is a JSON object, such as {{"text": …}}',
                f"it is {json_type(fields)}",
                "Write one object for each record",
            )
        )
    return Record(fields=fields, place=place)


def _read_text(path: Path, field: str) -> Iterator[Record]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            tell(f"{path} is text in UTF-8", f"it is not ({error})", "Convert it, or remove it from the datasets")
        ) from error
    if text.strip():
        yield Record(fields={field: text}, place=str(path))


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
        raise _cut_off(path, f"it cannot be read after row {number} ({error})") from error


READERS: dict[str, Callable[[Path, str], Iterator[Record]]] = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".txt": _read_text,
    ".parquet": _read_parquet,
}
"""By the ending of a file."""


def _cut_off(path: Path, found: str) -> DataError:
    return DataError(
        tell(
            f"{path} is whole", f"{found}: the file seems cut off", "Nothing was trained. Copy or write the file again"
        )
    )
