"""profiling_mode: the settings under which a model is profiled. All state of the model is as before afterwards."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from outsize.device.device import Device
from outsize.model.caches import turn_caches_off, turn_caches_on
from outsize.model.parts import turn_repacking_off, turn_repacking_on
from outsize.model.state import ModuleState


@contextmanager
def profiling_mode(model: nn.Module, device: Device) -> Iterator[ModuleState]:
    """Profile with grad, without key-value caches, LayerDrop and autocast's weight cache, and without gradients at the
    beginning. Random states, gradients, and the state of the model, which it yields, are restored at the end.
    """
    rng, device_rng, python_rng, numpy_rng = (
        torch.get_rng_state(),
        device.rng_state(),
        random.getstate(),
        np.random.get_state(),
    )
    grads = [(p, p.grad) for p in model.parameters()]
    for param, _ in grads:
        param.grad = None
    cached = turn_caches_off(model)
    repacking = turn_repacking_off(model)
    layerdrop = _turn_layerdrop_off(model)
    state = ModuleState(model)
    # As in training: casts of weights are made where they are used, and freed there.
    autocast_cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.enable_grad():
            yield state
    finally:
        state.restore()
        for param, grad in grads:
            param.grad = grad
        torch.set_autocast_cache_enabled(autocast_cache)
        turn_caches_on(cached)
        turn_repacking_on(repacking)
        for owner, name, value in layerdrop:
            setattr(owner, name, value)
        torch.set_rng_state(rng)
        random.setstate(python_rng)
        np.random.set_state(numpy_rng)
        device.set_rng_state(device_rng)


def _turn_layerdrop_off(model: nn.Module) -> list[tuple[Any, str, float]]:
    """Set every LayerDrop probability of modules and their configs to 0, and return the former values. A plan is made
    for all layers; training may drop some.
    """
    owners = {
        id(owner): owner for m in model.modules() for owner in (m, getattr(m, "config", None)) if owner is not None
    }
    found = [
        (owner, name, value)
        for owner in owners.values()
        for name, value in getattr(owner, "__dict__", {}).items()
        if name.endswith("layerdrop") and isinstance(value, float)  # its name everywhere in transformers
    ]
    for owner, name, _ in found:
        setattr(owner, name, 0.0)
    return found
