"""Reads YAML files.

Unlike PyYAML, a key given twice is a problem (PyYAML keeps the last), and `2e-5` is a number (YAML 1.1 wants `2.0e-5`).
"""

import re
from pathlib import Path
from typing import Any

import yaml

from outsize.base.errors import ConfigError


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str):
        super().__init__(text)
        self.repeated: list[str] = []

    def compose_mapping_node(self, anchor: Any) -> Any:
        # Before dicts are built: merge keys (`<<`) then add keys that may repeat.
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                self.repeated.append(f"{key.value}: given twice, in lines {lines[name]} and {line}. Keep one of them.")
            lines.setdefault(name, line)
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


def read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}). Check the path.") from None
    except UnicodeDecodeError as error:
        what = f"{path}: not UTF-8 ({error.reason} at byte {error.start})"
        raise ConfigError(f"{what}. Save the file as UTF-8.") from None


def load_yaml(text: str, *, where: str) -> tuple[Any, list[str]]:
    """The data, and a line for each key that is given twice. Invalid YAML is a ConfigError with its position."""
    try:
        loader = _Loader(text)  # checks the characters already
        return loader.get_single_data(), loader.repeated
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date with a month 13
        what = f"{where}: not valid YAML{_place(error, text)}"
        raise ConfigError(f"{what}. Correct it; strings with special characters need quotes.") from None


def _place(error: Exception, text: str) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position].split("\n")
        return f" in line {len(before)}, column {len(before[-1]) + 1} (a character that YAML does not allow)"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f" in line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    return f"{place} ({getattr(error, 'problem', error)})"
