"""Turns key-value caches off for training. A cache that fills in a training forward keeps activations alive and breaks
recompute. Generation requests its own cache.
"""

from typing import Any

from torch import nn


def turn_caches_off(model: nn.Module) -> list[Any]:
    """Set `use_cache` to False, and return the configs in which it was on, for `turn_caches_on`: the model's, nested
    ones, and those of single modules (T5's decoder).
    """
    found = []
    for config in [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]:
        for one in (config, *(getattr(config, name, None) for name in ("text_config", "decoder", "encoder"))):
            if getattr(one, "use_cache", False) is True:
                one.use_cache = False
                found.append(one)
    return found


def turn_caches_on(configs: list[Any]) -> None:
    for config in configs:
        config.use_cache = True
