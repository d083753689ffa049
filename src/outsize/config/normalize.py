"""Keys as they are written, in our own names and values."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outsize.base.errors import ConfigError
from outsize.base.records import fields_by_key, show
from outsize.config.keys import OtherKey, axolotl_keys, find, is_off, our_name
from outsize.config.run import RunConfig

_OURS = fields_by_key(RunConfig)
_WITHOUT_SPLIT = (
    "drop, Axolotl's default: longer rows are left out. `excess_length_strategy: split` trains on all of them"
)
_SPLIT_TYPES = ("completion", "pretrain")
"""Types of datasets whose rows Axolotl splits at `sequence_len`."""


@dataclass(kw_only=True, slots=True)
class Normalized:
    """A mapping in our own names."""

    data: dict[str, Any] = field(default_factory=dict)
    spelled: dict[str, str] = field(default_factory=dict)
    """Per name how it was written."""
    environment: dict[str, str] = field(default_factory=dict)
    replaced_optimizer: str | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def put(self, name: str, value: Any, key: str) -> None:
        """`key`: how it was written."""
        known = self.data.get(name)
        if name == "report_to" and value is not None and known is not None:
            lists = [[item] if isinstance(item, str) else item for item in (known, value)]
            if all(isinstance(item, list) for item in lists):
                self.data[name] = list(dict.fromkeys(lists[0] + lists[1]))
        elif value is not None and known is not None:
            if name == "bf16" and {known, value} <= {"auto", True}:
                return
            if known != value or find(key) is None or find(key).action == "renamed":  # type: ignore[union-attr]
                other = self.spelled[name]
                self.problems.append(f"{key}: means the same as {other}, which is given too. Keep {name}.")
        elif value is not None or name not in self.data:
            self.data[name], self.spelled[name] = value, key

    def convert(self, row: OtherKey, key: str, value: Any, given: Mapping[str, Any]) -> None:
        assert row.convert is not None
        try:
            made = row.convert(our_name(key), value, given)
        except ConfigError as error:
            self.problems.append(f"{key}: {error}")
            return
        self.environment.update(made.environment)
        self.notes += [f"{key}: {made.note}."] if made.note else []
        for name, item in made.keys.items():
            if name == "replaced_optimizer":
                self.replaced_optimizer = item
            else:
                self.put(name, item, key)


def normalize(mapping: Mapping[Any, Any]) -> Normalized:
    given = {str(key): value for key, value in mapping.items()}
    if given.get("fp16") or given.get("float16"):
        given = {key: value for key, value in given.items() if our_name(key) != "bf16" or value}
    found, without_effect = Normalized(), []
    for key, value in given.items():
        name = our_name(key)
        row = find(name) if name in _OURS else find(key)
        if row is None or (name in _OURS and (row.action != "converted" or not value)):
            found.put(name, value, key)
        elif is_off(key, value):
            continue
        elif row.action == "ignored":
            without_effect.append(key)
        elif row.action == "refused":
            found.problems.append(f"{key}: {show(value)} is not supported. {row.text}")
        else:
            found.convert(row, key, value, given)
    if theirs := list(axolotl_keys(given)):
        without_effect += _take_axolotl_defaults(found, theirs[0])
    if without_effect:
        found.notes.append(f"Without effect here: {', '.join(without_effect)} (docs/axolotl.md says why).")
    return found


def _take_axolotl_defaults(found: Normalized, key: str) -> list[str]:
    """Apply what holds in Axolotl's files only. Returns the keys that have no effect.

    `key`: what shows that the file is Axolotl's.
    """
    data = found.data
    datasets = data.get("datasets")
    items = datasets if isinstance(datasets, list) else [datasets]
    kinds = [item.get("type") if isinstance(item, Mapping) else None for item in items]
    if data.get("excess_length_strategy") is None and not all(kind in _SPLIT_TYPES for kind in kinds):
        data["excess_length_strategy"] = "drop"
        if not data.get("rl"):  # pairs cannot be split, so nothing else is expected
            found.notes.append(f"excess_length_strategy: {_WITHOUT_SPLIT} (the file has Axolotl's key {key}).")
    evaluates = bool(data.get("val_set_size") or data.get("test_datasets"))
    if evaluates and data.get("early_stopping_patience") and data.get("load_best_model_at_end") is None:
        data["load_best_model_at_end"] = True
    of_other_kind = [] if data.get("rl") else ["rl_", "dpo_"]
    of_other_kind += ["unfrozen_parameters"] if data.get("adapter") == "lora" else ["lora_", "peft_"]
    idle = [name for name in data if name.startswith(tuple(of_other_kind))]
    if not evaluates:
        idle += [name for name in ("eval_steps", "eval_strategy", "early_stopping_patience") if name in data]
    if data.get("lr_scheduler") == "constant":
        idle += [name for name in ("warmup_steps", "warmup_ratio") if name in data]
    return [found.spelled[name] for name in idle if data.pop(name)]
