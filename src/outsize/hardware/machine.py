"""A machine as a YAML file: a HardwareSpec, key by key, with the figures behind it under `measured`. `outsize probe`
writes one; the catalog consists of them.

Sizes are written as `24GiB`, rates as numbers of the unit in their key's name. `measured` is read and written as it is.
"""

import dataclasses
import math
import typing
from pathlib import Path
from typing import Any

import yaml

from outsize.base.records import Reader, Rule, raise_problems, require_mapping
from outsize.base.units import exact_bytes, parse_bytes
from outsize.config.source import load_yaml, read_text
from outsize.hardware.spec import HardwareSpec


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    spec: HardwareSpec
    measured: dict[str, Any]
    """What was measured, when and with what; empty where nothing was."""


_FIELDS = {field.name: field for field in dataclasses.fields(HardwareSpec)}
_TYPES = typing.get_type_hints(HardwareSpec)


def _range(least: float, most: float) -> Rule:
    return Rule(expected=f"a number from {least:g} to below {most:g}", holds=lambda value: least <= value < most)


def _size(written: Any) -> Any:
    return parse_bytes(written, name="") if isinstance(written, str) else written


# The ranges find wrong units: `gpu_bytes: 24`, `h2d_bytes_per_second: 25` (GB), `launch_seconds: 20` (µs).
_RULES = {
    str: Rule(expected="a non-empty string", holds=lambda text: bool(text.strip())),
    int: Rule(expected="a size such as 24GiB", holds=lambda size: 2**20 <= size < 2**50, convert=_size),
    float: Rule(
        expected="a number such as 25.0e+9, of bytes, parameters or FLOPs a second",
        holds=lambda rate: 1e6 <= rate < 1e20,
    ),
}
_SPECIAL_RULES = {
    "context_bytes": dataclasses.replace(_RULES[int], also=(("0B", 0), (0, 0))),
    "allocator_share": _range(0.0, 1.0),
    "launch_seconds": _range(1e-9, 0.1),
    "op_launch_seconds": _range(1e-9, 0.1),
    "launch_slowdown": _range(1.0, 100.0),
    "sustained_clock_ratio": _range(0.5, 5.0),
}


def read_machine(path: str | Path) -> Machine:
    where = str(path)
    data, repeated = load_yaml(read_text(path), where=where)
    require_mapping(data, where, "`outsize probe --save` writes such a file; docs/probe.md describes its keys.")
    reader = Reader()
    reader.problems += repeated
    measured = reader.value(dict[str, Any] | None, data.pop("measured", None), "measured") or {}
    rules = {name: _SPECIAL_RULES.get(name, _RULES[_TYPES[name]]) for name in _FIELDS}
    values = reader.fields(HardwareSpec, data, rules=rules)
    context = values.get("context_bytes", _FIELDS["context_bytes"].default)
    if not reader.problems and context >= values["gpu_bytes"]:
        sizes = f"{exact_bytes(context)} is not less than gpu_bytes ({exact_bytes(values['gpu_bytes'])})"
        reader.problems.append(f"context_bytes: {sizes}.")
    raise_problems(where, reader.problems, "docs/probe.md")
    return Machine(spec=HardwareSpec(**values), measured=measured)


def write_machine(machine: Machine) -> str:
    """The text that `read_machine` reads back to the same machine."""
    spec = {
        name: exact_bytes(value) if _TYPES[name] is int else value
        for name in _FIELDS
        for value in (getattr(machine.spec, name),)
    }
    data = {**spec, **({"measured": machine.measured} if machine.measured else {})}
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140)


class _Dumper(yaml.SafeDumper):
    """Writes numbers as `54.3e+9`, if that is exact."""


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
