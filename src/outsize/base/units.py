"""Sizes as people write them: `123456B`, `64MiB`, `24GiB`; and as people read them: `21.4 GiB`."""

import re

from outsize.base.errors import ConfigError, tell

_FACTORS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*")


def parse_bytes(size: "str | int", *, name: str = "size") -> int:
    """Bytes of a written size. An int is already bytes. `name` is how errors call the value."""
    if isinstance(size, bool) or not isinstance(size, (str, int)):
        raise ConfigError(tell(f"{name} is a size such as '24GiB'", f"{size!r} was given", "Write a number with B, KiB, MiB, GiB or TiB"))
    if isinstance(size, int):
        value = size
    else:
        match = _SIZE.fullmatch(size)
        factor = {unit.lower(): f for unit, f in _FACTORS.items()}.get(match[2].lower()) if match else None
        if match is None or factor is None:
            hint = "GB means 10^9 to some and 2^30 to others; use GiB" if match else "Write a number with B, KiB, MiB, GiB or TiB"
            raise ConfigError(tell(f"{name} is a size such as '24GiB' or '123456B'", f"{size!r} was given", hint))
        value = int(float(match[1]) * factor) if "." in match[1] else int(match[1]) * factor
    if value <= 0:
        raise ConfigError(tell(f"{name} is a positive size", f"{size!r} was given", "Leave it out to use what is free"))
    return value


def exact_bytes(num_bytes: int) -> str:
    """The written form that parses back to the same number: `64MiB` where it divides, else `123456B`."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes and num_bytes % _FACTORS[unit] == 0:
            return f"{num_bytes // _FACTORS[unit]}{unit}"
    return f"{num_bytes}B"


def show_bytes(num_bytes: float) -> str:
    """For reading: three significant digits."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(num_bytes) >= _FACTORS[unit]:
            value = num_bytes / _FACTORS[unit]
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.1f} {unit}" if value >= 10 else f"{value:.2f} {unit}"
    return f"{int(num_bytes)} B"


def show_seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"
