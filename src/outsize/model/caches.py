"""Key-value caches: off in training. One that fills in a training forward keeps activations alive and breaks recompute; generation asks for its own."""

from typing import Any

from torch import nn


def turn_caches_off(model: nn.Module) -> list[Any]:
    """The configs whose `use_cache` was on, also nested ones; `turn_caches_on` takes them back."""
    top = getattr(model, "config", None)
    found = []
    for config in [top, *(getattr(top, name, None) for name in ("text_config", "decoder", "encoder"))]:
        if config is not None and getattr(config, "use_cache", False) is True:
            config.use_cache = False
            found.append(config)
    return found


def turn_caches_on(configs: list[Any]) -> None:
    for config in configs:
        config.use_cache = True
