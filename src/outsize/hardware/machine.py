"""Machine: a HardwareSpec as a YAML file, key by key, with the measurements behind it under `measured`.

`outsize probe` writes such files, and the catalog consists of them. Sizes are written as `24GiB`, rates as numbers in
the unit of their key's name. `measured` is kept as it is. An error lists everything that is wrong with a file.
"""

import dataclasses
import difflib
import math
import typing
from pathlib import Path
from typing import Any

import yaml

from outsize.base.errors import ConfigError
from outsize.base.units import exact_bytes, parse_bytes
from outsize.config.source import load_yaml, read_text
from outsize.hardware.spec import HardwareSpec


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    spec: HardwareSpec
    measured: dict[str, Any]
    """What was measured, when and with what; may be empty."""


_FIELDS = {field.name: field for field in dataclasses.fields(HardwareSpec)}
_TYPES = typing.get_type_hints(HardwareSpec)
_KEYS = (*_FIELDS, "measured")
_LEAST_BYTES = 2**20
"""A smaller bare number is a mistake, such as `gpu_bytes: 24`."""
_MOST = 1e20
"""Above every rate. Excludes infinity and NaN."""
_LEAST_RATE = 1e6
"""Below every rate. A smaller one is a mistake, such as `h2d_bytes_per_second: 25`."""
_MOST_BYTES = 2**50
"""Above every machine's memory."""
_RANGES = {
    "allocator_share": (0.0, 1.0),
    "launch_seconds": (1e-9, 0.1),
    "op_launch_seconds": (1e-9, 0.1),
    "launch_slowdown": (1.0, 100.0),
    "sustained_clock_ratio": (0.5, 5.0),
}
"""Valid ranges, without the second number, of fields that are not rates. `launch_seconds: 20` is a mistake."""


def read_machine(path: str | Path) -> Machine:
    where = str(path)
    data, problems = load_yaml(read_text(path), where=where)
    if not isinstance(data, dict):
        found = "is empty" if data is None else f"is a {type(data).__name__}, not a mapping of keys to values"
        raise ConfigError(
            f"{where} {found}. `outsize probe --save` writes a machine file; docs/probe.md lists its keys."
        )
    values: dict[str, Any] = {}
    for key, value in data.items():
        if key not in _KEYS:
            nearest = difflib.get_close_matches(str(key), _KEYS, n=1)
            problems.append(f"{key}: unknown key" + (f"; did you mean {nearest[0]}?" if nearest else ""))
        elif value is not None:
            values[key], wrong = _read(key, value)
            problems += [f"{key}: {wrong}"] if wrong else []
    required = [name for name, field in _FIELDS.items() if field.default is dataclasses.MISSING]
    problems += [f"{key}: expected {_expected(key)}, found nothing" for key in required if key not in values]
    context = values.get("context_bytes", _FIELDS["context_bytes"].default)
    if not problems and context >= values["gpu_bytes"]:
        problems.append(
            f"context_bytes: expected less than gpu_bytes ({exact_bytes(values['gpu_bytes'])}), found "
            f"{exact_bytes(context)}"
        )
    if problems:
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        raise ConfigError("\n  ".join([f"{where} has {count}. docs/probe.md describes every key.", *problems]))
    measured = values.pop("measured", {})
    return Machine(spec=HardwareSpec(**values), measured=measured)


def write_machine(machine: Machine) -> str:
    """The text of a machine file; `read_machine` reads it back."""
    spec = {
        name: exact_bytes(value) if _TYPES[name] is int else value
        for name in _FIELDS
        for value in (getattr(machine.spec, name),)
    }
    data = {**spec, **({"measured": machine.measured} if machine.measured else {})}
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)


def _read(key: str, value: Any) -> tuple[Any, str]:
    """The parsed value, and what is wrong with it or an empty text."""
    wrong = f"expected {_expected(key)}, found {value!r}"
    if key == "measured":
        return value, "" if isinstance(value, dict) else wrong
    if _TYPES[key] is str:
        return value, "" if isinstance(value, str) and value.strip() else wrong
    if _TYPES[key] is int:
        if key == "context_bytes" and value in (0, "0B") and value is not False:
            return 0, ""
        if isinstance(value, int) and value < _LEAST_BYTES:
            return 0, wrong
        try:
            size = parse_bytes(value, name="it")
            return size, "" if size < _MOST_BYTES else wrong
        except ConfigError as error:
            return 0, str(error) if isinstance(value, str) else wrong
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < _MOST:
        return 0.0, wrong
    least, most = _RANGES.get(key, (_LEAST_RATE, _MOST))
    return float(value), "" if least <= value < most else wrong


def _expected(key: str) -> str:
    if key == "measured":
        return "a mapping"
    if key in _RANGES:
        least, most = _RANGES[key]
        return f"a number from {least:g} to below {most:g}"
    return {
        str: "a text",
        int: "a size such as 24GiB",
        float: "a number such as 25.0e+9, of bytes, parameters or FLOPs a second",
    }[_TYPES[key]]


class _Dumper(yaml.SafeDumper):
    """Writes numbers as `54.3e+9` where that is the same number."""


def _written(number: float) -> str:
    if abs(number) < 1e-300 or not math.isfinite(number) or 1e-3 <= abs(number) < 1e5:
        return repr(number)
    power = 3 * math.floor(math.log10(abs(number)) / 3)
    digits = f"{number / 10.0**power:.6g}"
    text = f"{digits if '.' in digits else digits + '.0'}e{power:+d}"
    return text if float(text) == number else repr(number)


_Dumper.add_representer(
    float, lambda dumper, number: dumper.represent_scalar("tag:yaml.org,2002:float", _written(number))
)
