"""The config of a model whose layers differ, for `model/pruned.py`."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outsize.base.errors import ModelUnsupported
from outsize.model.pruned import MODELING_FILE

Part = Literal["attention", "mlp"]
"""The names that transformers has for what a layer's config may `skip`."""


@dataclass(frozen=True)
class PartPlace:
    """Where one part is in a layer."""

    module: str
    norms: tuple[str, ...]
    """In front of it, and after it if the residual is added to that norm's output. Parts may share one."""
    num_outputs: int
    """Items of the tuple that the module returns; 0 if it returns a tensor."""


@dataclass(frozen=True)
class LayerChange:
    """How one layer differs from the teacher's."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    """By attribute of the config: `intermediate_size`, `num_key_value_heads`, …"""
    skip: frozenset[Part] = frozenset()
    linear: frozenset[Part] = frozenset()


def pruned_config(
    config: Any, parent: type, layer_list: str, parts: Mapping[Part, PartPlace], changes: Mapping[int, LayerChange]
) -> Any:
    """A copy of the teacher's config with `per_layer_config`. `parent`: its class; `changes`: by layer index.

    transformers' own class must refuse a folder with it, whatever changed: it would ignore `skip`, and initialize
    weights that the files lack. It refuses sizes that differ between layers. So a part that is skipped or linear also
    gets another size, which nothing uses. `require_refused` checks it.
    """
    per_layer: dict[int, dict[str, Any]] = {}
    for index, change in changes.items():
        own: dict[str, Any] = dict(change.sizes)
        for part in change.skip | change.linear:
            own |= _unused_size(config, part)
        for name, some in (("skip", change.skip), ("linear", change.linear)):
            if some:
                own[name] = sorted(some)
        per_layer[index] = own
    values = copy.deepcopy(config).to_dict()
    if any(change.linear for change in changes.values()):
        values["linear"] = []
    values |= {
        "per_layer_config": per_layer,
        "pruned_layers": {
            "parent": parent.__name__,
            "list": layer_list,
            "parts": {
                name: {"module": part.module, "norms": list(part.norms), "num_outputs": part.num_outputs}
                for name, part in parts.items()
            },
        },
        "auto_map": {"AutoModelForCausalLM": f"{MODELING_FILE.removesuffix('.py')}.Pruned{parent.__name__}"},
        "architectures": [f"Pruned{parent.__name__}"],
    }
    return type(config).from_dict(values)


def require_refused(config: Any) -> None:
    """Refuse a `pruned_config` for a folder if transformers' own class would accept it."""
    if config.per_layer_config and not config.per_layer_attributes:
        raise ModelUnsupported(
            f"prune.form: transformers would load a pruned {config.pruned_layers['parent']} as a whole one, with "
            "random weights in what was removed. Use form: padded."
        )


def with_layers(config: Any, layers: Sequence[int]) -> Any:
    """A copy of a config of transformers with these layers only."""
    values = copy.deepcopy(config).to_dict()
    for name, value in values.items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:  # layer_types and the like
            values[name] = [value[index] for index in layers]
    return type(config).from_dict({**values, "num_hidden_layers": len(layers)})


def _unused_size(config: Any, part: Part) -> dict[str, int]:
    name = "num_key_value_heads" if part == "attention" else "intermediate_size"
    value = getattr(config, name, None)
    if value is None:
        return {}
    return {name: 1 if value != 1 else 2}
