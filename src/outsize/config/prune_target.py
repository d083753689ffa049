"""PruneTarget: what a pruned model must keep to, and PruneDistill: how it is trained afterwards."""

from dataclasses import dataclass
from typing import Annotated, Any

from outsize.base.errors import ConfigError
from outsize.base.records import Rule
from outsize.base.units import parse_bytes, parse_count
from outsize.config.types import Count, CountFromZero, Positive, Share


def _bounds(name: str, parse: Any) -> Any:
    """Reads `0.7`, a size, or `{min: …, max: …}`; a number alone is the maximum."""

    def convert(value: Any) -> Any:
        given = value if isinstance(value, dict) else {"max": value}
        if unknown := given.keys() - {"min", "max"}:
            names = ", ".join(map(str, unknown))
            raise ConfigError(f"{names}: unknown key. Give min, max, or one value for the maximum.")
        found = dict(_amount(key, each, name, parse) for key, each in given.items() if each is not None)
        low, high = (found.get(key, found.get(f"{key}_share")) for key in ("min", "max"))
        if not found or (low is not None and high is not None and low > high):
            raise ConfigError("min is above max, or neither is given. Correct them.")
        return found

    return convert


def _amount(key: str, value: Any, name: str, parse: Any) -> tuple[str, float]:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
        return f"{key}_share", float(value)
    try:
        return key, float(parse(value))
    except ConfigError:
        raise
    except (TypeError, ValueError):
        raise ConfigError(f"{value!r} is neither a share of the teacher's nor an amount of {name}.") from None


def _size(value: Any) -> int:
    return parse_bytes(value, name="memory")


def _seconds(value: Any) -> float:
    text = str(value).strip()
    for unit, scale in (("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit):
            text, factor = text.removesuffix(unit), scale
            break
    else:
        raise ConfigError(f"{value!r} is neither a share of the teacher's nor seconds such as 800ms or 2.5s.")
    try:
        return float(text) * factor
    except ValueError:
        raise ConfigError(f"{value!r} are no seconds. Write 800ms or 2.5s.") from None


def _rule(name: str, parse: Any, expected: str) -> Rule:
    text = f"{expected}, a share of the teacher's such as 0.7, or min and max"
    return Rule(expected=text, convert=_bounds(name, parse))


Bounds = dict[str, float]
"""`min` and `max`; of numbers up to 1, which are shares of the teacher's, `min_share` and `max_share`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneTarget:
    params: Annotated[Bounds, _rule("params", parse_count, "a number of parameters such as 5B")] | None = None
    memory: Annotated[Bounds, _rule("memory", _size, "a size such as 9GiB")] | None = None
    """Of weights and KV cache."""
    latency: Annotated[Bounds, _rule("latency", _seconds, "seconds such as 800ms")] | None = None
    """Of prefill and decoding."""
    batch: Count = 1
    context: Count = 4096
    """Tokens of prefill."""
    decoded: CountFromZero = 256
    """Tokens that are then generated for each row."""

    @property
    def limits(self) -> dict[str, Bounds]:
        given = {"params": self.params, "memory": self.memory, "latency": self.latency}
        return {name: bounds for name, bounds in given.items() if bounds is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneDistill:
    tokens: Annotated[int, Rule(expected="a number of tokens such as 20M", convert=parse_count)]
    learning_rate: Positive = 1e-4
    kd_alpha: Share = 1.0
    kd_temperature: Positive = 1.0
