"""Where the keys come from: the text of a YAML file, and `--set key=value` on the command line.

YAML is read as people mean it: a key given twice is a problem (PyYAML keeps the last), and `2e-5` is a number (YAML 1.1
wants `2.0e-5`).
"""

import copy
import re
from pathlib import Path
from typing import Any

import yaml

from outsize.base.errors import ConfigError, tell
from outsize.config.aliases import ALIASES, spelling_in


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str):
        super().__init__(text)
        self.repeated: list[str] = []

    def compose_mapping_node(self, anchor: Any) -> Any:
        # Here and not where dicts are made: by then merge keys (`<<`) have added keys that may rightly repeat.
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                self.repeated.append(
                    f"{key.value}: given twice, in line {lines[name]} and in line {line}. Keep one of them."
                )
            lines.setdefault(name, line)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        found = (
            f"the system says: {error.strerror}"
            if isinstance(error, OSError)
            else f"it is not UTF-8 ({error.reason} at byte {error.start})"
        )
        raise ConfigError(
            tell(f"{path} is a YAML file that can be read", found, "Check the path and the file")
        ) from None


def load_yaml(text: str, *, where: str) -> tuple[Any, list[str]]:
    """The data, and a line for each key that is given twice. Text that is no YAML is a ConfigError with its place."""
    try:
        loader = _Loader(text)  # looks at the characters already
        return loader.get_single_data(), loader.repeated
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date with a month 13
        raise ConfigError(
            tell(
                f"{where} is YAML", _found(error, text), "Correct it there; a text with special characters needs quotes"
            )
        ) from None


def _found(error: Exception, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position].split("\n")
        return f"in line {len(before)}, column {len(before[-1]) + 1} is a character that YAML does not allow"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    return (
        f"in line {mark.line + 1}, column {mark.column + 1} it is not ({error.problem})"  # type: ignore[attr-defined]
        if mark
        else f"it is not ({error})"
    )


def override(mapping: dict[Any, Any], text: str) -> list[str]:
    """Set what `key=value` says in the mapping, and tell what is wrong with it. Dots reach into mappings and lists:
    `datasets.0.path=x`.
    """
    key, equals, written = text.partition("=")
    steps = key.strip().split(".")
    if not equals or not all(steps):
        found = "a part of its key is empty" if equals else "there is no ="
        return [f"--set {text}: {tell('an override is key=value', found, 'Write it as in --set learning_rate=2e-5')}"]
    try:
        value, problems = load_yaml(written, where="its value")
        _put(mapping, [spelling_in(mapping, steps[0]), *steps[1:]], value)
    except ConfigError as error:
        return [f"--set {text}: {error}"]
    return [f"--set {text}: {problem}" for problem in problems]


def overridden(text: str) -> str:
    """Our name of the key that `key=value` sets, or sets a part of."""
    key = text.partition("=")[0].strip().split(".")[0]
    return ALIASES.get(key, key)


def _put(place: Any, steps: list[str], value: Any) -> None:
    step: Any = steps[0]
    if isinstance(place, list):
        if not step.isdecimal() or int(step) > len(place):
            raise ConfigError(
                tell(
                    f"a number from 0 to {len(place)} tells the place in the list",
                    f"{step!r} was given",
                    "Count from 0; the last adds one",
                )
            )
        step = int(step)
        place += [None] if step == len(place) else []
    elif not isinstance(place, dict):
        raise ConfigError(
            tell(f"{step!r} is in a mapping or list", f"it would be in {place!r}", "Set the whole of it instead")
        )
    if len(steps) > 1:
        inner = place[step] if isinstance(place, list) else place.get(step)
        # A copy, since a YAML anchor may have put the same object at other places.
        inner = copy.copy(inner) if inner is not None else [] if steps[1].isdecimal() else {}
        _put(inner, steps[1:], value)
        value = inner
    place[step] = value
