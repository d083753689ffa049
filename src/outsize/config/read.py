"""From a YAML file to a RunConfig. All that is wrong with it is told in one ConfigError, a line for each problem.

Paths stay as they are written: they are relative to the working directory, as in Axolotl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outsize.base.errors import ConfigError, tell
from outsize.config.aliases import normalize
from outsize.config.cross_checks import contradictions
from outsize.config.run import RunConfig, fields_by_key
from outsize.config.source import load_yaml, overridden, override, read_text
from outsize.config.values import read_fields


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a file, changed by `key=value` texts: the value is YAML, dots in the key reach into mappings and
    lists.
    """
    where = str(path)
    mapping, problems = load_yaml(read_text(path), where=where)
    _require_mapping(mapping, where)
    for text in overrides:
        problems += override(mapping, text)
    return replace(_parse(mapping, where, problems), asked=tuple(dict.fromkeys(overridden(text) for text in overrides)))


def parse_config(mapping: Mapping[str, Any], where: str) -> RunConfig:
    """The config of what a YAML file would hold. `where` is what errors call it."""
    _require_mapping(mapping, where)
    return _parse(mapping, where, [])


def _require_mapping(data: Any, where: str) -> None:
    if not isinstance(data, Mapping):
        found = "it is empty" if data is None else f"it is a {type(data).__name__}"
        do = "Write lines such as `base_model: path/to/model`; docs/config.md lists the keys"
        raise ConfigError(tell(f"{where} is a mapping of keys to values", found, do))


def _parse(mapping: Mapping[Any, Any], where: str, problems: list[str]) -> RunConfig:
    """`problems`: what is known to be wrong already."""
    normalized = normalize(mapping)
    problems += normalized.problems
    values = read_fields(RunConfig, normalized.data, problems, spelled=normalized.spelled)
    given = {key for key, value in normalized.data.items() if value is not None}
    wrong = {key for key, names in fields_by_key(RunConfig).items() if key in given and not values.keys() & set(names)}
    # The required fields have a stand-in, so that a config that lacks them can be looked at as well.
    config = RunConfig(**{"base_model": "", "datasets": (), "notes": normalized.notes, **values})
    problems += contradictions(config, given=given, wrong=wrong)
    if problems:
        count = "1 thing in it is" if len(problems) == 1 else f"{len(problems)} things in it are"
        raise ConfigError(
            "\n  ".join(
                [
                    tell(
                        f"{where} describes a run", f"{count} wrong", "Correct this; docs/config.md tells of every key"
                    ),
                    *problems,
                ]
            )
        )
    return config
