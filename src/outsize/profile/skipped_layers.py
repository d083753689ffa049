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
    alike = [
        i for i, t in enumerate(results) if t is not hidden and t.shape == hidden.shape and t.dtype == hidden.dtype
    ]
    place = next((i for i in alike if results[i].requires_grad), next(iter(alike), None))
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
    others = {
        i: (t.detach().to("cpu", copy=True), t.device)
        for i, (t, source) in enumerate(zip(results, sources, strict=True))
        if source is None
    }
    copied = [i for i in others if results[i].requires_grad]
    is_hidden_copied = is_new[place] and results[place].requires_grad
    template = _with_tensors(outputs, [torch.empty(0) for _ in results])

    def output(number: int, inputs: list[Tensor]) -> Tensor:
        source = sources[number]
        if source is None:
            value, device = others[number]
            return value.to(device, copy=True)
        if is_new[number]:  # a storage of its own, as the layer's would be, so that it lives as long
            return inputs[source].detach().clone() if number == place else inputs[source].clone()
        return inputs[source].view_as(inputs[source]) if number == place else inputs[source]

    def make(inputs: list[Tensor]) -> Any:
        made: dict[int, Tensor] = {}
        if copied or is_hidden_copied:
            copies = _Copies.apply(
                inputs[0], torch.empty(0).requires_grad_(), is_hidden_copied, [others[i] for i in copied]
            )
            made = dict(zip([place] * is_hidden_copied + copied, copies, strict=True))
        return _with_tensors(template, [made[i] if i in made else output(i, inputs) for i in range(len(sources))])

    return make


class _Copies(torch.autograd.Function):
    """Copies of the hidden state, if wanted, and of other outputs. They have a gradient also if the hidden state has
    none, and are no leaves: a leaf would live as long as the graph. Their first gradient becomes that of the hidden
    state, so that the layers before have the backward that they have in training.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, anchor: Tensor, with_hidden: bool, others: list[tuple[Tensor, torch.device]]
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.dtype, ctx.device, ctx.with_hidden = hidden.shape, hidden.dtype, hidden.device, with_hidden
        return *([hidden.clone()] if with_hidden else []), *(value.to(device, copy=True) for value, device in others)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given = [grad for grad in grads if grad is not None]
        found = None
        if ctx.with_hidden and given and ctx.needs_input_grad[0]:
            kind = (ctx.shape, ctx.dtype, ctx.device)
            found = next((grad for grad in given if (grad.shape, grad.dtype, grad.device) == kind), None)
            found = torch.zeros(ctx.shape, dtype=ctx.dtype, device=ctx.device) if found is None else found
        return found, None, None, None


def _with_tensors(values: Any, tensors: Iterable[Tensor]) -> Any:
    """The same nesting with other tensors, in order."""
    others = iter(tensors)
    return map_tensors(lambda _: next(others), values)
