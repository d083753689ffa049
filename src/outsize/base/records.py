"""Frozen dataclasses to JSON and back, and their fingerprint.

The schema is the dataclass itself: a field that is added is written and read without further code, an unknown
or missing key is refused by name. Supported field types: str, int, float, bool, None, records, `tuple[X, ...]`,
`tuple[X, Y]`, `dict[str, X]`, `X | None` and `Literal`.
"""

import dataclasses
import hashlib
import json
import types
import typing
from typing import Any, TypeVar

from outsize.base.errors import ConfigError, tell

R = TypeVar("R")


def to_json(record: Any) -> Any:
    """Plain JSON data (dicts, lists, numbers, strings) of a record."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        hints = typing.get_type_hints(type(record))
        values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
        # An int in a float field would come back as a float: equal, but with another fingerprint.
        return {name: float(value) if hints[name] is float else to_json(value) for name, value in values.items()}
    if isinstance(record, (tuple, list)):
        return [to_json(item) for item in record]
    if isinstance(record, dict):
        return {key: to_json(value) for key, value in record.items()}
    if record is None or isinstance(record, (str, int, float, bool)):
        return record
    raise TypeError(f"{type(record).__name__} has no JSON form")


def from_json(cls: type[R], data: Any, *, where: str = "") -> R:
    """The record that `to_json` wrote, perhaps before some of its fields were there: those with defaults have them.
    `where` names the place in messages.
    """
    where = where or cls.__name__
    if not isinstance(data, dict):
        raise ConfigError(
            tell(f"{where} is a mapping", f"found {type(data).__name__}", "Write it again with this version of outsize")
        )
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    names = [field.name for field in fields]
    required = {
        field.name
        for field in fields
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    missing, unknown = sorted(required - set(data)), sorted(set(data) - set(names))
    if missing or unknown:
        found = "; ".join(
            p for p in (missing and f"missing {', '.join(missing)}", unknown and f"unknown {', '.join(unknown)}") if p
        )
        raise ConfigError(
            tell(f"{where} has the fields {', '.join(names)}", found, "Write it again with this version of outsize")
        )
    return cls(**{name: _value(hints[name], data[name], f"{where}.{name}") for name in names if name in data})


def _value(hint: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), data, where=where)
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in args:
            return None
        return _value(next(a for a in args if a is not type(None)), data, where)
    if origin is typing.Literal:
        ok = any(data == arg and type(data) is type(arg) for arg in args)
    elif origin is tuple:
        ok = isinstance(data, list)
        if ok and len(args) == 2 and args[1] is Ellipsis:
            return tuple(_value(args[0], item, f"{where}[{i}]") for i, item in enumerate(data))
        if ok and len(args) == len(data):
            return tuple(
                _value(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, data, strict=True))
            )
        ok = False
    elif origin is dict:
        if isinstance(data, dict):
            return {key: _value(args[1], item, f"{where}.{key}") for key, item in data.items()}
        ok = False
    elif hint is float:
        ok = isinstance(data, (int, float)) and not isinstance(data, bool)
        data = float(data) if ok else data
    elif hint is int:
        ok = isinstance(data, int) and not isinstance(data, bool)
    else:
        ok = isinstance(data, hint)
    if not ok:
        wanted = " or ".join(map(repr, args)) if origin is typing.Literal else getattr(hint, "__name__", str(hint))
        raise ConfigError(tell(f"{where} is {wanted}", f"found {data!r}", "Correct it, or write the file again"))
    return data


def dumps(record: Any) -> str:
    return json.dumps(to_json(record), indent=1, ensure_ascii=False, allow_nan=False)


def loads(cls: type[R], text: str, *, where: str = "") -> R:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        found = f"it is not at line {error.lineno} ({error.msg})"
        raise ConfigError(
            tell(f"{where or cls.__name__} is JSON", found, "Write it again; it may be truncated")
        ) from None
    return from_json(cls, data, where=where)


def fingerprint(record: Any) -> str:
    """Sixteen hex digits that change whenever any field does."""
    text = json.dumps(to_json(record), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
