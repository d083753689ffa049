"""From written data to the fields of a record, by the record's own type hints. What is wrong is listed, never raised: a
user sees all of it at once.

A line of the list is the key, what was expected and what was found. A key without a value (`max_steps:`) is one that
was not given.
"""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from outsize.base.errors import ConfigError
from outsize.config.run import fields_by_key
from outsize.config.types import Rule

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_SHOWN_CHARS = 80


def read_fields(
    record: type,
    data: Mapping[str, Any],
    problems: list[str],
    *,
    prefix: str = "",
    spelled: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Values of the fields that are given and sound; what is wrong with the others is added to `problems`.

    `spelled`: how the user wrote a key, where that is not its name.
    """
    keys, hints = fields_by_key(record), typing.get_type_hints(record, include_extras=True)
    values: dict[str, Any] = {}
    for key, item in data.items():
        label = prefix + (spelled or {}).get(key, key)
        if key not in keys:
            problems.append(_unknown(label, key, list(keys)))
        elif item is not None:
            name = _field_for(item, keys[key], hints)
            before = len(problems)
            value = read_value(hints[name], item, label, problems)
            if len(problems) == before:
                values[name] = value
    for item in dataclasses.fields(record):
        if item.default is dataclasses.MISSING and data.get(item.name) is None:
            problems.append(f"{prefix}{item.name}: expected {_words(hints[item.name])}, found nothing")
    return values


def read_value(hint: Any, data: Any, label: str, problems: list[str], *, expected: str = "") -> Any:
    """The value that `data` means for `hint`; of no meaning when it adds to `problems`. `expected`: words for it, where
    a rule has better ones.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _ruled(args[0], args[1], data, label, problems)
    if origin in (typing.Union, types.UnionType):
        members = [arg for arg in args if arg is not types.NoneType]
        # `float | int` keeps 16 an int; what is of none of the types is read, or refused, as the first.
        return read_value(
            next((kind for kind in members if type(data) is kind), members[0]), data, label, problems, expected=expected
        )
    if origin is tuple and isinstance(data, (list, tuple, str, dict)):
        items = data if isinstance(data, (list, tuple)) else [data]  # one where a list is expected is a list of one
        return tuple(read_value(args[0], item, f"{label}.{i}", problems) for i, item in enumerate(items))
    if origin is dict and isinstance(data, dict):
        return _mapping(args[0], args[1], data, label, problems)
    if dataclasses.is_dataclass(hint) and isinstance(data, (str, dict)):
        return _record(typing.cast(type, hint), data, label, problems)
    if hint is Any or (origin is Literal and isinstance(data, str) and data in args):
        return data
    if hint is float and (number := _number(data)) is not None:
        return number
    if hint is float or type(data) is not hint:  # by type(): a bool is no int
        problems.append(_wrong(label, expected or _words(hint), data))
    return data


def show(data: Any) -> str:
    """A value as found in a file, cut where it is long."""
    shown = str(data).lower() if isinstance(data, bool) else "nothing" if data is None else repr(data)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}…"


def _ruled(hint: Any, rule: Rule, data: Any, label: str, problems: list[str]) -> Any:
    for written, meant in rule.also:
        if type(data) is type(written) and data == written:
            return meant
    before = len(problems)
    value = read_value(hint, data, label, problems, expected=rule.expected)
    if len(problems) == before:
        try:
            problems += [] if rule.holds(value) else [_wrong(label, rule.expected, data)]
        except ConfigError as error:
            problems.append(f"{label}: {error}")
    return value


def _mapping(key_hint: Any, hint: Any, data: dict[Any, Any], label: str, problems: list[str]) -> dict[str, Any]:
    names = typing.get_args(key_hint)  # of a Literal; none where any name will do
    problems += [_unknown(f"{label}.{key}", str(key), list(names)) for key in data if names and key not in names]
    return {
        str(key): read_value(hint, item, f"{label}.{key}", problems)
        for key, item in data.items()
        if item is not None and (not names or key in names)
    }


def _record(record: type, data: str | dict[Any, Any], label: str, problems: list[str]) -> Any:
    """A text stands for a record's first field."""
    given = (
        {dataclasses.fields(record)[0].name: data}
        if isinstance(data, str)
        else {str(key): item for key, item in data.items()}
    )
    before = len(problems)
    values = read_fields(record, given, problems, prefix=f"{label}.")
    return record(**values) if len(problems) == before else None


def _field_for(data: Any, names: list[str], hints: dict[str, Any]) -> str:
    """Of the fields that one key fills: the one for mappings if `data` is a mapping, else the other."""
    takes_mapping = {
        name: any(typing.get_origin(arg) is dict for arg in typing.get_args(hints[name])) for name in names
    }
    return next((name for name in names if takes_mapping[name] == isinstance(data, dict)), names[0])


def _number(data: Any) -> float | None:
    """Also of a text: YAML 1.1 reads `2e-5` as one, and quotes are easily written. Infinity and NaN are no settings."""
    if isinstance(data, bool) or not isinstance(data, (int, float, str)):
        return None
    try:
        number = float(data)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _wrong(label: str, expected: str, data: Any) -> str:
    return f"{label}: expected {expected}, found {show(data)}"


def _unknown(label: str, key: str, names: list[str]) -> str:
    nearest = difflib.get_close_matches(key, names, n=1)
    return f"{label}: unknown key; " + (
        f"did you mean {nearest[0]}?" if nearest else "docs/config.md lists those there are"
    )


def _words(hint: Any) -> str:
    """What a value of the hint is, for those who know YAML and not Python."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return str(args[1].expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(arg) for arg in args if arg is not types.NoneType)
    if origin is Literal:
        return "one of " + ", ".join(args)
    if origin is tuple:
        return "a list"
    if dataclasses.is_dataclass(hint):
        return f"a mapping, or its {dataclasses.fields(hint)[0].name} alone"
    return "a mapping" if origin is dict else _WORDS[hint]
