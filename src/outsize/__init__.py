"""outsize trains Hugging Face models that are too large for the GPU at hand, to the same bits."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outsize.plan.pins import Pins
    from outsize.runtime.optimizer import AdamW
    from outsize.train.build import prepare
    from outsize.train.forecast import plan

__all__ = ["AdamW", "Pins", "plan", "prepare"]
__version__ = "0.1.0"

_HOMES = {"AdamW": "outsize.runtime.optimizer", "Pins": "outsize.plan.pins", "plan": "outsize.train.forecast", "prepare": "outsize.train.build"}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: `import outsize` alone loads neither torch nor a device."""
    if name not in _HOMES:
        raise AttributeError(f"module 'outsize' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
