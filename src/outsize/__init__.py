"""outsize trains Hugging Face models that are too large for the GPU at hand, to the same bits.

Public names are imported when first used: `import outsize` alone loads neither torch nor a device.
"""

import importlib
import random
from types import ModuleType
from typing import TYPE_CHECKING, Any

import outsize.plan as _plan_room

if TYPE_CHECKING:
    from outsize.optim.adamw import AdamW
    from outsize.optim.lion import Lion
    from outsize.optim.sgd import SGD
    from outsize.plan.pins import Pins
    from outsize.setup.prepare import prepare

__all__ = ["SGD", "AdamW", "Lion", "Pins", "plan", "prepare"]
__version__ = "0.1.0"

_HOMES = {
    "AdamW": "outsize.optim.adamw",
    "Lion": "outsize.optim.lion",
    "Pins": "outsize.plan.pins",
    "SGD": "outsize.optim.sgd",
    "prepare": "outsize.setup.prepare",
}


def _imported(name: str) -> ModuleType:
    """Import a module and leave Python's random generator as it is: importing rich draws a number."""
    state = random.getstate()
    try:
        return importlib.import_module(name)
    finally:
        random.setstate(state)


class _CallableRoom(ModuleType):
    """`outsize.plan` is a room, and the function of that name: importing the room would hide the function otherwise."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Forecast a plan: see `outsize.forecast.forecast.plan`."""
        return _imported("outsize.forecast.forecast").plan(*args, **kwargs)


_plan_room.__class__ = _CallableRoom
plan = _plan_room


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'outsize' has no attribute {name!r}")
    return getattr(_imported(_HOMES[name]), name)
