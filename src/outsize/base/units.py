"""Parses sizes (`123456B`, `64MiB`, `24GiB`) and formats sizes and times for readers (`21.4 GiB`)."""

import re
from numbers import Integral
from typing import Any

from outsize.base.errors import ConfigError

ALIGN_BYTES = 256
"""Alignment in flat buffers, so that kernels see the same alignment under every plan."""
_FACTORS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")
_COUNT = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE]\d+)?)\s*([kKmMbB]?)\s*")


def parse_bytes(size: "str | int", *, name: str = "size") -> int:
    """Bytes of a size as text or as a number of bytes. `name`: the name of the value in errors, or empty."""
    name = f"{name}: " if name else ""
    if isinstance(size, bool) or not isinstance(size, (str, int)):
        raise ConfigError(
            f"{name}{size!r} is not a size. Write a number with B, KiB, MiB, GiB or TiB, such as '24GiB'."
        )
    if isinstance(size, int):
        value = size
    else:
        match = _SIZE.fullmatch(size)
        factor = {unit.lower(): f for unit, f in _FACTORS.items()}.get(match[2].lower()) if match else None
        if match is None or factor is None:
            hint = (
                "GB means 10^9 to some and 2^30 to others; use GiB"
                if match
                else "Write a number with B, KiB, MiB, GiB or TiB"
            )
            raise ConfigError(f"{name}{size!r} is not a size such as '24GiB' or '123456B'. {hint}.")
        value = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if value <= 0:
        raise ConfigError(f"{name}{size!r} is not a positive size. Leave it out to use the memory that is free.")
    return value


def parse_count(text: Any) -> Any:
    """The number of `50M`, `1.5B` or `20k`. Anything else is returned unchanged."""
    match = _COUNT.fullmatch(text) if isinstance(text, str) else None
    value = float(match[1]) * {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[match[2].lower()] if match else text
    return int(value) if isinstance(value, float) and value.is_integer() else value


def is_count(value: object, *, least: int = 1) -> bool:
    """Whether `value` is a whole number from `least`. A bool is not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def exact_bytes(num_bytes: int) -> str:
    """The text that parses back to the same number: `64MiB` if that is exact, else `123456B`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % _FACTORS[unit] == 0:
            return f"{num_bytes // _FACTORS[unit]}{unit}"
    return f"{num_bytes}B"


def show_bytes(num_bytes: float) -> str:
    """A size for readers, with three significant digits."""
    fitting = [
        (unit, num_bytes / factor)
        for unit, factor in _FACTORS.items()
        if abs(num_bytes / factor) < (1024 if unit == "B" else 999.5)
    ]
    unit, value = fitting[0] if fitting else ("TiB", num_bytes / _FACTORS["TiB"])
    return f"{int(value)} B" if unit == "B" else f"{_three_digits(value)} {unit}"


def show_enough(num_bytes: int) -> str:
    """A size for readers, rounded up, so that the text can be passed back as a budget that is enough."""
    text = show_bytes(num_bytes)
    number, unit = text.split(" ")
    decimals = len(number.partition(".")[2])
    while num_bytes > 0 and parse_bytes(text) < num_bytes:
        number = f"{float(number) + 10.0**-decimals:.{decimals}f}"
        text = f"{number} {unit}"
    return text


def show_seconds(seconds: float) -> str:
    if abs(seconds) >= 600:
        return f"{seconds / 60:.0f} min"
    fitting = [
        (unit, seconds / factor)
        for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
        if abs(seconds / factor) >= 0.9995
    ]
    unit, value = fitting[0] if fitting else ("s", 0.0)
    return f"{value:.3g} {unit}" if value else "0 s"


def show_duration(seconds: float) -> str:
    """A time of a run for readers: `45 s`, `9 min`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24} h"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
