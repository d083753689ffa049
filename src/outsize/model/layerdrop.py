"""LayerDrop: off while a model is looked at. A plan is made for all layers; training drops them as it likes."""

from typing import Any

from torch import nn

Dropped = list[tuple[Any, str, float]]


def turn_layerdrop_off(model: nn.Module) -> Dropped:
    """What modules and their configs had for it, by the name that transformers gives it everywhere. `turn_layerdrop_on`
    takes it back.
    """
    owners = {
        id(owner): owner
        for module in model.modules()
        for owner in (module, getattr(module, "config", None))
        if owner is not None
    }
    values = (
        (owner, name, value) for owner in owners.values() for name, value in getattr(owner, "__dict__", {}).items()
    )
    found = [
        (owner, name, value) for owner, name, value in values if name.endswith("layerdrop") and isinstance(value, float)
    ]
    for owner, name, _ in found:
        setattr(owner, name, 0.0)
    return found


def turn_layerdrop_on(dropped: Dropped) -> None:
    for owner, name, value in dropped:
        setattr(owner, name, value)
