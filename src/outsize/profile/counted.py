"""Counts the bytes of a model on shapes: for the time of a profiling run, fake tensors take the place of its weights.
So any batch fits, and a pass takes the time of Python alone.

Models that branch on values of their weights, or run kernels without a rule for shapes, cannot be counted.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outsize.base.log import log
from outsize.compat import is_traceable_wrapper_subclass
from outsize.device.device import Device
from outsize.device.sdp_kernel import kernels_on_shapes
from outsize.device.sim import AbsentDevice
from outsize.model.discover import Layer
from outsize.model.parts import SHAPE_OF, quant_state_of, rewrapped
from outsize.model.tensors import map_tensors
from outsize.model.weights import is_unmaterialized
from outsize.profile.calling import Loss, batch_shapes
from outsize.profile.fake_weights import FakeWeights
from outsize.profile.trace import ModelTrace
from outsize.profile.tracer import Tracer


def counted_trace(
    model: nn.Module, batch: Any, layers: tuple[Layer, ...], device: Device, loss: Loss | None, *, tile_tokens: int = 0
) -> ModelTrace | None:
    """The trace of a model on shapes, of which only bytes are of use. None if the model does not run on shapes.
    The arguments are those of Tracer."""
    kind = device.torch_device.type
    autocast = torch.autocast("cpu", torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind))
    on_cpu = map_tensors(lambda t: t.detach().to("cpu").requires_grad_(t.requires_grad), batch)
    try:
        with torch.random.fork_rng(devices=[]), _without_values(model) as shapes_of, autocast, kernels_on_shapes():
            made = map_tensors(shapes_of, on_cpu)
            _, trace = Tracer(
                model, made, layers, AbsentDevice(device.spec), None, loss, tile_tokens=tile_tokens
            ).trace()
    except Exception as error:  # whatever a model does with tensors that have no values
        log.debug("its bytes cannot be counted on shapes: %s: %s", type(error).__name__, error)
        return None
    return replace(trace, inputs=batch_shapes(batch))


@contextmanager
def _without_values(model: nn.Module) -> Iterator[Any]:
    """Put fake tensors in the place of all parameters and of buffers with floating-point values. Yields a function that
    makes such a tensor."""
    tables = [(table, name) for m in model.modules() for table in (m._parameters, m._buffers) for name in table]
    given = [(table, name, tensor) for table, name in tables if (tensor := table[name]) is not None]
    on_cpu = {id(t): t.detach().to("cpu") for _, _, t in given if not isinstance(t, nn.Parameter) and _is_known(t)}
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) in on_cpu or _is_known(tensor):
            return on_cpu.get(id(tensor), tensor)
        if id(tensor) not in fakes:
            fakes[id(tensor)] = shape_of(tensor)
        return fakes[id(tensor)]

    with FakeWeights():
        try:
            for table, name, tensor in given:
                table[name] = fake(tensor)  # type: ignore[assignment]
            yield fake
        finally:
            for table, name, tensor in given:
                table[name] = tensor  # type: ignore[assignment]


def _is_known(tensor: Tensor) -> bool:
    """Token ids, positions and masks: a model reads their values."""
    return not (isinstance(tensor, nn.Parameter) or tensor.is_floating_point() or tensor.is_complex())


def _state_of_shapes(state: Any) -> Any:
    """A copy of bitsandbytes' description of a 4-bit weight, with tensors without memory."""
    made = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            setattr(made, name, shape_of(value))
        elif hasattr(value, "absmax"):
            setattr(made, name, _state_of_shapes(value))
    return made


def shape_of(tensor: Tensor) -> Tensor:
    """A tensor of the same shape without memory. Made in fake mode."""
    if is_traceable_wrapper_subclass(tensor):
        return nn.Parameter(rewrapped(tensor, shape_of), requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        values = torch.empty(tensor.shape, dtype=tensor.dtype)
        if not is_unmaterialized(tensor) and not tensor.is_contiguous():
            values = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        made = nn.Parameter(values, requires_grad=tensor.requires_grad)
        setattr(made, SHAPE_OF, type(tensor))
        if (state := quant_state_of(tensor)) is not None:
            vars(made).update(vars(tensor) | {"quant_state": _state_of_shapes(state)})
        elif isinstance(scale := getattr(tensor, "SCB", None), Tensor):
            vars(made).update(vars(tensor) | {"SCB": shape_of(scale)})
        return made
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).requires_grad_(tensor.requires_grad)
