"""Read a YAML file into a RunConfig. One ConfigError lists every problem.

Paths stay as written: they are relative to the working directory, as in Axolotl.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from outsize.base.errors import ConfigError
from outsize.base.records import Reader, fields_by_key, is_blank, raise_problems, require_mapping
from outsize.config.cross_checks import contradictions
from outsize.config.normalize import normalize
from outsize.config.overrides import overridden_key, override
from outsize.config.prune import DEFAULTS
from outsize.config.run import RunConfig
from outsize.config.source import load_yaml, read_text

_OTHER_METHODS, _DATASETS = ("rl:", "reward_model:", "process_reward_model:"), ("datasets.", "test_datasets.")
_DATA_SUFFIXES = (".jsonl", ".parquet", ".csv", ".txt")
_NAME_YAML = "Name a YAML file; docs/quickstart.md has one to start from."
_EXAMPLE = "Write lines such as `base_model: path/to/model`; docs/config.md describes the keys."


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The config of a file, with overrides `key=value`: the value is YAML, dots in the key reach into containers."""
    where = str(path)
    if Path(path).is_dir():
        raise ConfigError(f"{path}: it is a folder, not a run file. {_NAME_YAML}")
    if Path(path).suffix in _DATA_SUFFIXES:
        raise ConfigError(f"{path}: it looks like data, not a run file. {_NAME_YAML}")
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
    reader = Reader(skip_blank=True)
    values = reader.fields(RunConfig, normalized.data, spelled=normalized.spelled)
    if normalized.data.get("prune") is not None:
        values = {**{key: value for key, value in DEFAULTS.items() if _is_free(key, values)}, **values}
    # Datasets of other methods have other keys; that the method is refused says enough.
    is_other = any(line.startswith(_OTHER_METHODS) for line in normalized.problems)
    problems += [line for line in reader.problems if not (is_other and line.startswith(_DATASETS))]
    given = {key for key, value in normalized.data.items() if not is_blank(value)}
    wrong = {key for key, names in fields_by_key(RunConfig).items() if key in given and not values.keys() & set(names)}
    wrong |= {"rl"} if is_other else set()
    wrong |= reader.meant  # what a misspelled key would have said is not missing
    # Required fields get placeholders, so that the other checks run without them.
    unread = {
        "notes": tuple(normalized.notes),
        "environment": normalized.environment,
        "replaced_optimizer": normalized.replaced_optimizer,
    }
    config = RunConfig(**{"base_model": "", "datasets": (), **unread, **values})
    problems += contradictions(config, given=given, wrong=wrong)
    raise_problems(where, problems, "docs/config.md")
    return config


def _is_free(key: str, values: Mapping[str, Any]) -> bool:
    """Whether a default of pruning holds: neither the key nor one of the same meaning is given."""
    return key not in values and not (key == "warmup_ratio" and ("warmup_steps" in values or _is_constant(values)))


def _is_constant(values: Mapping[str, Any]) -> bool:
    return values.get("lr_scheduler") == "constant"
