"""Records have the place they were read from; errors name file and line."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from outsize.base.errors import ConfigError, DataError
from outsize.data.files import Record, read_file


def write_parquet(path: Path, *records: dict[str, Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(list(records)), path)


def records_of(path: Path) -> list[Record]:
    return list(read_file(path, suffix=path.suffix, field="text"))


def told(path: Path) -> str:
    with pytest.raises(DataError) as error:
        records_of(path)
    return str(error.value)


def test_each_line_of_json_is_a_record_that_knows_its_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "one"}\n\n{"text": "two"}'
    )  # a byte order mark, a blank line, no newline at the end
    assert records_of(path) == [
        Record(fields={"text": "one"}, place=f"{path}:1"),
        Record(fields={"text": "two"}, place=f"{path}:3"),
    ]


def test_a_list_of_json_may_span_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=2))
    assert [(record.fields["text"], record.place) for record in records_of(path)] == [
        ("one", f"{path} item 1"),
        ("two", f"{path} item 2"),
    ]


def test_lines_are_read_as_requested(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one"}\nno JSON\n')
    assert next(read_file(path, suffix=".jsonl", field="text")).fields == {"text": "one"}


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("one\n\ntwo\n")
    assert records_of(path) == [Record(fields={"text": "one\n\ntwo\n"}, place=str(path))]


def test_rows_of_csv_are_texts_under_the_names_of_the_first_line(tmp_path: Path) -> None:
    path = tmp_path / "data.csv"
    path.write_bytes(b'\xef\xbb\xbfprompt,completion\r\n"one, ""two""\r\nthree",4\r\n\r\nfive,\r\n')
    assert records_of(path) == [
        Record(fields={"prompt": 'one, "two"\r\nthree', "completion": "4"}, place=f"{path}:3"),
        Record(fields={"prompt": "five", "completion": ""}, place=f"{path}:5"),
    ]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("a,b\none,two, three\n", ":2: 3 values for 2 columns (a, b)."),
        ("a,b\none\n", ":2: 1 values for 2 columns (a, b)."),
        ("a,b,a\n1,2,3\n", ":1: the column 'a' is given twice."),
        ('a,b\n1,"2', ": unreadable after"),
        ("a,b\n", ": the file is empty."),
    ],
)
def test_csv_that_is_not_a_table_is_named(tmp_path: Path, content: str, found: str) -> None:
    path = tmp_path / "data.csv"
    path.write_text(content)
    assert f"{path}{found}" in told(path)


def test_rows_of_parquet_are_records_with_their_number(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    messages = [{"role": "user", "content": "hi"}]
    write_parquet(path, {"messages": messages}, {"messages": []})
    assert records_of(path) == [
        Record(fields={"messages": messages}, place=f"{path}:1"),
        Record(fields={"messages": []}, place=f"{path}:2"),
    ]


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "one"}\n{"text": two}\n{"text": "three"}\n')
    assert f"{path}:2: not valid JSON (Expecting value at column 10)" in told(path)


CUT = [
    (b'{"text": "one"}\n{"text": "tw', "its last line, {path}:2, is incomplete"),
    (b'{"text": "one"}\n{"text": "\xc3', "its last line, {path}:2, is incomplete"),  # within a letter
    (b'[{"text": "one"}, {"te', "{path}: its list has no end"),
]


@pytest.mark.parametrize(("content", "found"), CUT)
def test_a_file_that_stops_in_the_middle_seems_cut_off_and_nothing_was_trained(
    tmp_path: Path, content: bytes, found: str
) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(content)
    message = told(path)
    assert found.format(path=path) in message and "seems to be cut off: copy or write it again" in message


def test_a_parquet_file_without_its_end_seems_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    write_parquet(path, {"text": "one"})
    path.write_bytes(path.read_bytes()[:-20])
    assert f"{path}: " in (message := told(path)) and "seems to be cut off" in message


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl", ""), ("b.json", "[]"), ("c.txt", " \n"), ("d.jsonl", "\n\n")]
)
def test_an_empty_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert f"{path}: the file is empty" in told(path)


@pytest.mark.parametrize(("line", "kind"), [("[1]", "a number"), ('"text"', "text"), ("null", "null")])
def test_a_record_that_is_no_object_is_named(tmp_path: Path, line: str, kind: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{line}\n")
    message = told(path)
    assert str(path) in message and f": {kind}, not a JSON object" in message


def test_text_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes("é".encode("latin-1"))
    assert f"{path}: not UTF-8" in told(path)


def test_a_missing_column_is_reported_with_those_that_are_there(write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl({"body": "one", "title": "two"})
    (record,) = records_of(path)
    with pytest.raises(DataError, match=r"data\.jsonl:1: no column 'text'; its columns are body, title\. .*`field`"):
        record.get_text("text", key="field")


@pytest.mark.parametrize(("value", "kind"), [(3, "a number"), (["one"], "a list"), (None, "null")])
def test_a_value_of_the_wrong_type_is_reported_with_its_place(
    write_jsonl: Callable[..., Path], value: Any, kind: str
) -> None:
    (record,) = records_of(write_jsonl({"text": value}))
    with pytest.raises(DataError, match=rf"data\.jsonl:1: 'text' is {kind}, not text"):
        record.get_text("text", key="field")


def test_a_missing_package_is_reported_with_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "data.parquet"
    path.touch()
    with pytest.raises(ConfigError, match=r"needs the package pyarrow.*pip install 'outsize\[data\]'"):
        records_of(path)
