"""Overrides of the command line: `--set key=value`."""

import copy
from typing import Any

from outsize.base.errors import ConfigError
from outsize.config.keys import our_name, spelling_in
from outsize.config.source import load_yaml


def override(mapping: dict[Any, Any], text: str) -> list[str]:
    """Apply `key=value` to the mapping and return the problems. Dots reach into mappings and lists:
    `datasets.0.path=x`.
    """
    key, equals, written = text.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        what = "a part of the key is empty" if equals else "there is no ="
        return [f"--set {text}: {what}. Write an override as --set learning_rate=2e-5."]
    try:
        value, problems = load_yaml(written, where="the value")
        _put(mapping, [spelling_in(mapping, steps[0]), *steps[1:]], value)
    except ConfigError as error:
        return [f"--set {text}: {error}"]
    return [f"--set {text}: {problem}" for problem in problems]


def overridden_key(text: str) -> str:
    """Our name of the key that `key=value` sets or changes."""
    return our_name(text.partition("=")[0].strip().split(".")[0])


def _put(place: Any, steps: list[str], value: Any) -> None:
    step: Any = steps[0]
    if isinstance(place, list):
        if not step.isdecimal() or int(step) > len(place):
            raise ConfigError(f"{step!r} is not an index of the list. Use 0 to {len(place)}; the last one appends.")
        step = int(step)
        place += [None] if step == len(place) else []
    elif not isinstance(place, dict):
        raise ConfigError(f"{step!r} would be inside {place!r}, which is no mapping or list. Set the whole value.")
    if len(steps) > 1:
        inner = place[step] if isinstance(place, list) else place.get(step)
        # A copy: a YAML anchor may refer to the same object elsewhere.
        inner = copy.copy(inner) if inner is not None else [] if steps[1].isdecimal() else {}
        _put(inner, steps[1:], value)
        value = inner
    place[step] = value
