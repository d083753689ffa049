"""Records (frozen dataclasses): written as JSON, read from JSON or YAML, fingerprinted.

The dataclass is the schema: its type hints say how a value is read and checked. Supported are str, int, float, bool,
None, Any, records, `tuple[X, ...]`, `tuple[X, Y]`, `dict[K, X]`, unions, `Literal`, and `Annotated[X, Rule(...)]`.
"""

import dataclasses
import difflib
import functools
import hashlib
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from outsize.base.errors import ConfigError

R = TypeVar("R")

_NOUNS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", dict: "a mapping"}
_SHOWN_CHARS, _SHOWN_PROBLEMS, _SHOWN_VALUES = 80, 8, 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """A condition on the values of a field, beyond their type."""

    expected: str = ""
    """What a value must be, for error messages: `a positive integer`. Empty: what the type says."""
    holds: Callable[[Any], bool] = lambda value: True
    """Whether a value of the right type satisfies the rule. May raise a ConfigError that says more than `expected`."""
    also: tuple[tuple[Any, Any], ...] = ()
    """Other spellings of a value, as (written, meant)."""
    convert: Callable[[Any], Any] | None = None
    """Applied first, where values are written in another form, such as `24GiB`. May raise a ConfigError."""


def to_json(record: Any) -> Any:
    """Plain JSON data (dicts, lists, numbers, strings) of a record."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        hints = _schema(type(record)).hints
        values = {name: getattr(record, name) for name in hints}
        # An int in a float field would come back as a float: equal, but with another fingerprint.
        return {name: float(value) if hints[name] is float else to_json(value) for name, value in values.items()}
    if isinstance(record, (tuple, list)):
        return [to_json(item) for item in record]
    if isinstance(record, dict):
        return {key: to_json(value) for key, value in record.items()}
    if record is None or isinstance(record, (str, int, float, bool)):
        return record
    raise TypeError(f"{type(record).__name__} has no JSON form")


def dumps(record: Any) -> str:
    return json.dumps(to_json(record), indent=1, ensure_ascii=False, allow_nan=False)


def fingerprint(record: Any) -> str:
    """Sixteen hex digits that change whenever any field does."""
    text = json.dumps(to_json(record), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def from_json(cls: type[R], data: Any, *, where: str = "") -> R:
    """Read the record that `to_json` wrote. Missing fields get their defaults: the file may be older than a field.

    `where` names the file or object in messages.
    """
    reader = Reader(strict=True)
    record = reader.value(cls, data, where or cls.__name__)
    if reader.problems:
        shown, more = reader.problems[:_SHOWN_PROBLEMS], len(reader.problems) - _SHOWN_PROBLEMS
        rest = [f"{more} more problems."] if more > 0 else []
        raise ConfigError(" ".join([*shown, *rest, "Write the file again with this version of outsize."]))
    return typing.cast(R, record)


def loads(cls: type[R], text: str, *, where: str = "") -> R:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        what = f"{where or cls.__name__}: not valid JSON at line {error.lineno} ({error.msg})"
        raise ConfigError(f"{what}. The file may be truncated: write it again.") from None
    return from_json(cls, data, where=where)


class Reader:
    """Reads data into the fields of records. Collects all problems, one line each, instead of raising the first.

    A strict reader takes what `to_json` wrote. The other one takes what people write in YAML: a key without a value is
    absent, a number may be quoted, one item is a list of one, and a string is a record with its first field.

    `skip_blank`: a key that is false or empty where that is no valid value is absent too, known or not.
    """

    def __init__(self, *, strict: bool = False, skip_blank: bool = False):
        self.strict = strict
        self.skip_blank = skip_blank
        self.problems: list[str] = []
        self.meant: set[str] = set()
        """Names that unknown keys of `fields` are near."""

    def fields(
        self,
        record: type,
        data: Mapping[str, Any],
        *,
        prefix: str = "",
        spelled: Mapping[str, str] | None = None,
        rules: Mapping[str, Rule] | None = None,
    ) -> dict[str, Any]:
        """Values of the fields that are given and valid. `spelled`: how the user wrote a key, if not by its name.
        `rules`: for fields whose type hints have none.
        """
        schema, values = _schema(record), {}
        meant: set[str] = set()
        for key, item in data.items():
            label = prefix + (spelled or {}).get(key, str(key))
            is_off = self.skip_blank and is_blank(item)
            if key not in schema.keys:
                nearest = _nearest(str(key), schema.keys)
                meant |= {nearest} if nearest else set()
                if not is_off or nearest:
                    self.problems.append(_unknown(label, str(key), list(schema.keys)))
            elif item is not None or self.strict:
                name = _field_for(item, schema.keys[key], schema.hints)
                hint, before = schema.hints[name], len(self.problems)
                value = self.value(Annotated[hint, rules[name]] if rules else hint, item, label)
                if len(self.problems) == before:
                    values[name] = value
                if is_off and name not in schema.required and (len(self.problems) > before or _may_lack_record(hint)):
                    values.pop(name, None)
                    del self.problems[before:]
        for name in schema.required:
            if name not in meant and ((name not in data) if self.strict else data.get(name) is None):
                expected = rules[name].expected if rules else _noun(schema.hints[name])
                self.problems.append(f"{prefix}{name}: missing. Give {expected}.")
        self.meant = meant
        return values

    def value(self, hint: Any, data: Any, label: str, expected: str = "") -> Any:
        """`data` as a value of `hint`; without meaning if it adds to `problems`. `expected`: better words than the
        hint's.
        """
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if origin is Annotated:
            return self._ruled(args[0], args[1], data, label)
        if origin in (typing.Union, types.UnionType):
            if data is None and types.NoneType in args:
                return None
            # `float | int` keeps 16 an int; data of none of the types is read, or refused, as the first.
            members = [arg for arg in args if arg is not types.NoneType]
            member = next((kind for kind in members if type(data) is kind), members[0])
            return self.value(member, data, label, expected)
        if origin is tuple:
            items = [data] if isinstance(data, (str, dict)) and not self.strict else data
            if isinstance(items, (list, tuple)):
                kinds = [args[0]] * len(items) if args[-1] is Ellipsis else args
                if len(kinds) == len(items):
                    both = zip(kinds, items, strict=True)
                    return tuple(self.value(kind, item, f"{label}.{i}") for i, (kind, item) in enumerate(both))
        elif origin is dict and isinstance(data, dict):
            return self._mapping(args[0], args[1], data, label)
        elif dataclasses.is_dataclass(hint):
            if isinstance(data, dict) or (isinstance(data, str) and not self.strict):
                return self._record(typing.cast(type, hint), data, label)
        elif origin is Literal:
            if any(type(data) is type(arg) and data == arg for arg in args):
                return data
        elif hint is float:
            if (number := self._number(data)) is not None:
                return number
        elif hint is Any or type(data) is hint:  # by type(): a bool is no int
            return data
        noun = "a mapping" if self.strict and dataclasses.is_dataclass(hint) else expected or _noun(hint)
        lists_values = origin is Literal and noun.startswith("one of")
        nearest = _nearest(data, map(str, args)) if lists_values and isinstance(data, str) else None
        is_found = nearest is not None and len(args) > _SHOWN_VALUES
        known = f"; did you mean {nearest}?" if nearest else "."
        self.problems.append(f"{label}: {show(data)} is {'unknown' if is_found else f'not {noun}'}{known}")
        return data

    def _ruled(self, hint: Any, rule: Rule, data: Any, label: str) -> Any:
        for written, meant in rule.also:
            if type(data) is type(written) and data == written:
                return meant
        before = len(self.problems)
        try:
            value = self.value(hint, rule.convert(data) if rule.convert else data, label, rule.expected)
            if len(self.problems) == before and not rule.holds(value):
                self.problems.append(f"{label}: {show(data)} is not {rule.expected}.")
        except ConfigError as error:
            self.problems.append(f"{label}: {error}")
            return data
        return value

    def _mapping(self, key_hint: Any, hint: Any, data: dict[Any, Any], label: str) -> dict[str, Any]:
        names = typing.get_args(key_hint)  # of a Literal; empty if any key is valid
        unknown = [key for key in data if names and key not in names]
        self.problems += [_unknown(f"{label}.{key}", str(key), list(names)) for key in unknown]
        known = {key: item for key, item in data.items() if key not in unknown and (item is not None or self.strict)}
        return {str(key): self.value(hint, item, f"{label}.{key}") for key, item in known.items()}

    def _record(self, record: type, data: str | dict[Any, Any], label: str) -> Any:
        given = {_schema(record).first: data} if isinstance(data, str) else data
        before = len(self.problems)
        values = self.fields(record, given, prefix=f"{label}.")
        return record(**values) if len(self.problems) == before else None

    def _number(self, data: Any) -> float | None:
        """YAML 1.1 reads `2e-5` as a string, and quotes are easily written. Infinity and NaN are no settings."""
        if isinstance(data, bool) or not isinstance(data, (int, float) if self.strict else (int, float, str)):
            return None
        try:
            number = float(data)
        except (ValueError, OverflowError):
            return None
        return number if self.strict or math.isfinite(number) else None


def raise_problems(where: str, problems: list[str], docs: str) -> None:
    """One ConfigError for all problems of a file, if there are any. `docs`: the page that describes its keys."""
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{where}: {count}. {docs} describes every key.", *problems]))


def require_mapping(data: Any, where: str, hint: str) -> None:
    if not isinstance(data, Mapping):
        found = "is empty" if data is None else f"holds a {type(data).__name__}, not a mapping of keys to values"
        raise ConfigError(f"{where} {found}. {hint}")


def is_blank(data: Any) -> bool:
    """Whether a value of a YAML file is null, false or empty."""
    return data is None or data is False or (isinstance(data, (str, list, dict)) and not data)


def show(data: Any) -> str:
    """A value as found in a file, shortened if it is long."""
    shown = str(data).lower() if isinstance(data, bool) else "null" if data is None else repr(data)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[:_SHOWN_CHARS]}…"


def fields_by_key(record: type) -> dict[str, list[str]]:
    """The fields that each key fills: one of the same name, unless the field's metadata has another `key` (empty: the
    field is in no file).
    """
    keys: dict[str, list[str]] = {}
    for field in dataclasses.fields(record):
        if key := field.metadata.get("key", field.name):
            keys.setdefault(key, []).append(field.name)
    return keys


@dataclass(frozen=True, slots=True)
class _Schema:
    hints: dict[str, Any]
    keys: dict[str, list[str]]
    required: list[str]
    first: str


@functools.cache
def _schema(record: type) -> _Schema:
    fields, missing = dataclasses.fields(record), dataclasses.MISSING
    hints = typing.get_type_hints(record, include_extras=True)
    required = [field.name for field in fields if field.default is missing and field.default_factory is missing]
    return _Schema({field.name: hints[field.name] for field in fields}, fields_by_key(record), required, fields[0].name)


def _field_for(data: Any, names: list[str], hints: dict[str, Any]) -> str:
    """Choose between the fields that one key fills: the one for mappings if `data` is a mapping, else the other."""
    if len(names) > 1:
        for name in names:
            takes_mapping = any(typing.get_origin(arg) is dict for arg in typing.get_args(hints[name]))
            if takes_mapping == isinstance(data, dict):
                return name
    return names[0]


def _may_lack_record(hint: Any) -> bool:
    """Whether the hint is a record or None."""
    args = typing.get_args(hint)
    return types.NoneType in args and any(map(dataclasses.is_dataclass, args))


def _unknown(label: str, key: str, names: list[str]) -> str:
    nearest = _nearest(key, names)
    return f"{label}: unknown key" + (f"; did you mean {nearest}?" if nearest else ".")


def _nearest(key: str, names: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(key, names, n=1, cutoff=0.8)), None)


def _noun(hint: Any) -> str:
    """The kind of value that a type hint means, in the words of YAML."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return args[1].expected or _noun(args[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_noun(arg) for arg in args if arg is not types.NoneType)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is tuple:
        return "a list" if args[-1] is Ellipsis else f"a list of {len(args)}"
    if dataclasses.is_dataclass(hint):
        return f"a mapping, or its {dataclasses.fields(hint)[0].name} alone"
    return _NOUNS.get(origin or hint, str(hint))
