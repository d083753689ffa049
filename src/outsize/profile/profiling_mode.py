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
from outsize.model.state import ModuleState, generators_of


@contextmanager
def profiling_mode(model: nn.Module, device: Device) -> Iterator[None]:
    """Profile with grad, without key-value caches, LayerDrop and autocast's weight cache, and without gradients at the
    beginning. Random states, gradients, buffers and module attributes are restored at the end.
    """
    rng, device_rng, python_rng, numpy_rng = (
        torch.get_rng_state(),
        device.rng_state(),
        random.getstate(),
        np.random.get_state(),
    )
    generators = [(generator, generator.get_state()) for generator in generators_of(model)]
    buffers = [
        (module, name, buffer, buffer.data, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    module_state = ModuleState(model)
    grads = [(p, p.grad) for p in model.parameters()]
    for param, _ in grads:
        param.grad = None
    cached = turn_caches_off(model)
    repacking = turn_repacking_off(model)
    layerdrop = _turn_layerdrop_off(model)
    # As in training: casts of weights are made where they are used, and freed there.
    autocast_cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for generator, state in generators:
            generator.set_state(state)
        for param, grad in grads:
            param.grad = grad
        with torch.no_grad():
            for module, name, buffer, data, saved in buffers:
                module._buffers[name] = buffer
                buffer.data = data
                # Expanded buffers are skipped: they cannot be written, by the model or by this code.
                if all(stride or size == 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
                    buffer.copy_(saved)
        torch.set_autocast_cache_enabled(autocast_cache)
        turn_caches_on(cached)
        turn_repacking_on(repacking)
        for owner, name, value in layerdrop:
            setattr(owner, name, value)
        module_state.restore()
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
