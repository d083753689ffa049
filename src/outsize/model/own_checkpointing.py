"""Turns off gradient checkpointing of a model's own code: transformers' (also inside a wrapper), diffusers', timm's."""

from torch import nn

Flags = list[tuple[str, nn.Module, str]]
"""Path, module and name of a flag."""
_FLAGS = ("gradient_checkpointing", "grad_checkpointing")


def is_checkpointed(module: nn.Module) -> bool:
    """Whether the flag of a module is on."""
    return any(vars(module).get(flag) is True for flag in _FLAGS)


def turn_checkpointing_off(model: nn.Module) -> Flags:
    """Returns the flags that were on, for `turn_checkpointing_on`."""
    found = [
        (path, module, flag)
        for path, module in model.named_modules()
        for flag in _FLAGS
        if vars(module).get(flag) is True
    ]
    for _, module, flag in found:
        setattr(module, flag, False)
    for module in model.modules():  # of another form, which has no flag to restore
        is_on = getattr(module, "is_gradient_checkpointing", False) is True
        if is_on and hasattr(module, "gradient_checkpointing_disable"):
            module.gradient_checkpointing_disable()  # type: ignore[operator]
    return found


def turn_checkpointing_on(flags: Flags) -> None:
    for _, module, flag in flags:
        setattr(module, flag, True)
