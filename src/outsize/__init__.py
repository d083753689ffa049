"""outsize trains Hugging Face models that are too large for the GPU at hand, to the same bits.

Public names are imported when first used: `import outsize` alone loads neither torch nor a device.
"""

import importlib
import random
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outsize import osft
    from outsize.forecast.forecast import plan
    from outsize.lora.fuse import fuse_lora
    from outsize.methods.osft.method import OSFT
    from outsize.optim.adamw import AdamW
    from outsize.optim.lion import Lion
    from outsize.optim.sgd import SGD
    from outsize.schedule.pins import Pins
    from outsize.setup.activation_offload import enable_hidden_states_offload, hidden_states_offload
    from outsize.setup.prepare import prepare

__all__ = [
    "OSFT", "SGD", "AdamW", "Lion", "Pins", "enable_hidden_states_offload", "fuse_lora", "hidden_states_offload",
    "osft", "plan", "prepare",
]  # fmt: skip
__version__ = "0.1.0"

_MODULES = {
    "AdamW": "outsize.optim.adamw",
    "Lion": "outsize.optim.lion",
    "OSFT": "outsize.methods.osft.method",
    "Pins": "outsize.schedule.pins",
    "SGD": "outsize.optim.sgd",
    "enable_hidden_states_offload": "outsize.setup.activation_offload",
    "fuse_lora": "outsize.lora.fuse",
    "hidden_states_offload": "outsize.setup.activation_offload",
    "plan": "outsize.forecast.forecast",
    "prepare": "outsize.setup.prepare",
}


def _imported(name: str) -> ModuleType:
    """Import a module and leave Python's random generator as it is: importing rich draws a number."""
    state = random.getstate()
    try:
        return importlib.import_module(name)
    finally:
        random.setstate(state)


def __getattr__(name: str) -> Any:
    if name == "osft":
        return _imported("outsize.osft")
    if name not in _MODULES:
        raise AttributeError(f"module 'outsize' has no attribute {name!r}")
    return getattr(_imported(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
