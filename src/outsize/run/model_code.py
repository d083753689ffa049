"""The code that a model's folder has for classes that transformers lacks, and that folders made from it need too."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outsize.base.errors import ConfigError

_CONFIGS = ("config.json", "tokenizer_config.json")
_MODEL = "AutoModelForCausalLM"


@dataclass(frozen=True, slots=True)
class ModelCode:
    auto_map: dict[str, Any]
    """Of config.json, with classes in the folder itself."""
    files: dict[str, Path]
    """By name in the folder."""

    @property
    def model_module(self) -> str | None:
        """The file of the language model's class, without `.py`."""
        name = self.auto_map.get(_MODEL)
        return None if name is None else str(name).partition(".")[0]


def model_code(folder: Path) -> ModelCode:
    """Of the folder of a model that `prune.trust_remote_code` allows. Raises ConfigError for names that are no module
    in the folder. Runs none of the code.
    """
    files: dict[str, Path] = {}
    maps: dict[str, dict[str, Any]] = {}
    for config in _CONFIGS:
        given = _read(folder / config).get("auto_map") or {}
        maps[config] = {
            kind: _map(value, lambda one, at=config: _own_name(one, folder / at)) for kind, value in given.items()
        }
        for value in given.values():
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if one is not None:
                    files |= dict(_files(str(one), folder))
    return ModelCode(maps["config.json"], files)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # reported when the model or the tokenizer is loaded
        return {}
    return found if isinstance(found, dict) else {}


def _map(value: Any, change: Any) -> Any:
    """A name, or a list of names and None (a slow and a fast tokenizer)."""
    if isinstance(value, (list, tuple)):
        return [None if one is None else change(one) for one in value]
    return change(value)


def _own_name(name: Any, path: Path) -> str:
    """`module.Class` without the repository in front of it (`owner/name--module.Class`)."""
    own = str(name).rpartition("--")[2]
    module, _, kind = own.rpartition(".")
    if not module.isidentifier() or not kind.isidentifier():
        raise ConfigError(
            f"base_model: auto_map in {path} names {name!r}, which is no class in a file of the folder. Correct it: "
            "module.Class."
        )
    return own


def _files(name: str, folder: Path) -> Iterator[tuple[str, Path]]:
    """A class's file, and those that it imports from beside it."""
    from transformers.dynamic_module_utils import get_relative_import_files

    repository, _, own = name.rpartition("--")
    file = f"{own.partition('.')[0]}.py"
    source = folder / file
    if not source.exists() and repository:
        from transformers.utils import cached_file

        try:
            source = Path(str(cached_file(repository, file)))
        except (OSError, ValueError) as error:
            raise ConfigError(f"base_model: {file} of {repository} cannot be read ({error}). Download it.") from None
    if not source.exists():
        raise ConfigError(f"base_model: auto_map names {name}, but {folder} has no {file}. Copy it there.")
    yield file, source
    for path in map(Path, get_relative_import_files(str(source))):
        if not path.stem.isidentifier() or path.parent != source.parent:
            raise ConfigError(f"base_model: {source} imports {path.name}, which is not beside it. Copy it there.")
        yield path.name, path
