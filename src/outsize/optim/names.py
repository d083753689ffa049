"""The optimizers by name. No torch: settings are checked before torch is imported."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outsize.optim.spec import OptimizerSpec

OPTIMIZERS = {
    "adamw": ("AdamW", ("adamw_torch", "adamw_torch_fused", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_hf")),
    "lion": ("Lion", ("lion_32bit", "lion_pytorch")),
    "sgd": ("SGD", ()),
}
"""By module of this package: the class of its spec, and its names in other libraries (`TrainingArguments(optim=)`)."""
DEFAULT = "adamw"
"""The optimizer if the user names none."""


def find_name(name: str) -> str | None:
    """The key in OPTIMIZERS of a name used here or in another library."""
    return next((own for own, (_, others) in OPTIMIZERS.items() if name == own or name in others), None)


def spec_class(name: str) -> "type[OptimizerSpec]":
    spec: type[OptimizerSpec] = getattr(importlib.import_module(f"outsize.optim.{name}"), OPTIMIZERS[name][0])
    return spec


def default_spec(**settings: Any) -> "OptimizerSpec":
    return spec_class(DEFAULT)(**settings)
