"""Makes the outputs of layers that a profiling pass skips."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from outsize.compat import storage_id
from outsize.model.tensors import map_tensors, tensors_in

StandIn = Callable[[list[Tensor]], Any]
"""Makes the outputs of a skipped layer from its inputs."""


def stand_in_for(inputs: list[Tensor], outputs: Any, arguments: set[int]) -> StandIn | None:
    """Outputs like those of a layer that ran, with the skipped layer's own input in place of the hidden state and of
    other inputs that the layer returned. `arguments`: storages of the inputs. None: no output has the kind of the
    hidden state.

    A second stream (ShadowPEFT's shadow state, text next to images) is passed through too: an output with a gradient
    and the shape of an input.
    """
    hidden, results = inputs[0], list(tensors_in(outputs))
    place = next(
        (i for i, t in enumerate(results) if t is not hidden and t.shape == hidden.shape and t.dtype == hidden.dtype),
        None,
    )
    if place is None:
        return None
    sources = [
        0 if i == place else next((n for n, given in enumerate(inputs) if given is t), None)
        for i, t in enumerate(results)
    ]
    for i, t in enumerate(results):
        if sources[i] is None and t.requires_grad:
            free = ((n, given) for n, given in enumerate(inputs) if n not in sources)
            sources[i] = next((n for n, given in free if given.shape == t.shape and given.dtype == t.dtype), None)
    is_new = [t.layout == torch.strided and storage_id(t.untyped_storage()) not in arguments for t in results]
    # Other outputs are copies on the host: the outputs themselves, with their graphs, would live as long as the pass.
    others = [
        (t.detach().to("cpu", copy=True), t.device, t.requires_grad) if source is None else None
        for t, source in zip(results, sources, strict=True)
    ]
    template = _with_tensors(outputs, [torch.empty(0) for _ in results])

    def output(number: int, inputs: list[Tensor]) -> Tensor:
        source, other = sources[number], others[number]
        if other is not None:
            value, device, requires_grad = other
            return _Copy.apply(inputs[0], value, device) if requires_grad else value.to(device, copy=True)
        assert source is not None
        if is_new[number]:  # a storage of its own, as the layer's would be, so that it lives as long
            return inputs[source].clone()
        return inputs[source].view_as(inputs[source]) if number == place else inputs[source]

    return lambda inputs: _with_tensors(template, [output(number, inputs) for number in range(len(sources))])


class _Copy(torch.autograd.Function):
    """A tensor with a gradient that is no leaf: a leaf would live as long as the graph."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, device: torch.device) -> Tensor:
        return value.to(device, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return None, None, None


def _with_tensors(values: Any, tensors: Iterable[Tensor]) -> Any:
    """The same nesting with other tensors, in order."""
    others = iter(tensors)
    return map_tensors(lambda _: next(others), values)
