"""Key-value caches: off in training. One that fills in a training forward keeps activations alive and breaks recompute;
generation asks for its own.
"""

from typing import Any

from torch import nn


def turn_caches_off(model: nn.Module) -> list[Any]:
    """The configs whose `use_cache` was on: the model's, nested ones, and those that a part has for itself (T5's
    decoder). `turn_caches_on` takes them back.
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
