"""Read a YAML file into a RunConfig. One ConfigError lists every problem.

Paths stay as written: they are relative to the working directory, as in Axolotl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outsize.base.records import Reader, fields_by_key, raise_problems, require_mapping
from outsize.config.aliases import normalize
from outsize.config.cross_checks import contradictions
from outsize.config.run import RunConfig
from outsize.config.source import load_yaml, overridden_key, override, read_text

_EXAMPLE = "Write lines such as `base_model: path/to/model`; docs/config.md describes the keys."


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a file, with overrides `key=value`: the value is YAML, dots in the key reach into containers."""
    where = str(path)
    mapping, problems = load_yaml(read_text(path), where=where)
    require_mapping(mapping, where, _EXAMPLE)
    for text in overrides:
        problems += override(mapping, text)
    return replace(
        _parse(mapping, where, problems), overridden=tuple(dict.fromkeys(overridden_key(text) for text in overrides))
    )


def parse_config(mapping: Mapping[str, Any], where: str) -> RunConfig:
    """The config of a mapping as a YAML file holds it. `where` names it in errors."""
    require_mapping(mapping, where, _EXAMPLE)
    return _parse(mapping, where, [])


def _parse(mapping: Mapping[Any, Any], where: str, problems: list[str]) -> RunConfig:
    """`problems`: those found so far."""
    normalized = normalize(mapping)
    problems += normalized.problems
    reader = Reader()
    values = reader.fields(RunConfig, normalized.data, spelled=normalized.spelled)
    problems += reader.problems
    given = {key for key, value in normalized.data.items() if value is not None}
    wrong = {key for key, names in fields_by_key(RunConfig).items() if key in given and not values.keys() & set(names)}
    # Required fields get placeholders, so that the other checks run without them.
    config = RunConfig(**{"base_model": "", "datasets": (), "notes": normalized.notes, **values})
    problems += contradictions(config, given=given, wrong=wrong)
    raise_problems(where, problems, "docs/config.md")
    return config
