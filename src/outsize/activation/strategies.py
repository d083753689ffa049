"""What a block does with its activations: keep, recompute, offload, swap. One function each, all of the same form.

`run(forward, args, kwargs, offloaded, is_static)` runs the block and puts what shall leave the device into `offloaded`.
`is_static` tells storages that are weights or buffers, which never enter the activation path.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from outsize.activation.offloaded_tensors import Handle, OffloadedTensors
from outsize.activation.recompute import compared, run_checkpointed
from outsize.compat import storage_id
from outsize.model.tensors import map_tensors, tensors_in
from outsize.model.work import Strategy

IsStatic = Callable[[Tensor], bool]


def keep(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    offloaded: OffloadedTensors,
    is_static: IsStatic,
) -> Any:
    """Autograd keeps what it saves."""
    return forward(*args, **kwargs)


def recompute(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    offloaded: OffloadedTensors,
    is_static: IsStatic,
) -> Any:
    """Only the input stays; backward runs the forward again, with the same random numbers and autocast."""
    first = next(tensors_in((args, kwargs)), None)
    return (
        forward(*args, **kwargs)
        if first is None
        else run_checkpointed(_repeatable(forward, args, kwargs), first.device)
    )


def _repeatable(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
    """A call that can be made again. A layer may write to a dict among its arguments, for later layers to read (Gemma
    3n's keys and values): the first call gets the dict itself, later ones a copy as it was before the first."""
    before = map_tensors(lambda t: t, (args, kwargs))  # copies the containers, not the tensors
    first = [(args, kwargs)]

    def run() -> Any:
        positional, named = first.pop() if first else map_tensors(lambda t: t, before)
        return forward(*positional, **named)

    return run


def keep_and_compare(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    report: Callable[[str], None],
    module: nn.Module | None = None,
) -> Any:
    """For trial runs: `keep`, and in backward the forward that `recompute` would run. `report` gets how they differ, or
    "".
    """
    first = next(tensors_in((args, kwargs)), None)
    if first is None:
        return forward(*args, **kwargs)
    return compared(_repeatable(forward, args, kwargs), first.device, report, module)


def offload(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    offloaded: OffloadedTensors,
    is_static: IsStatic,
) -> Any:
    """`recompute`, with the input on the host. The input is the first tensor argument; others (masks, encoder output)
    are shared by many blocks.
    """
    hidden = next(tensors_in((args, kwargs)), None)
    if hidden is None:
        return forward(*args, **kwargs)
    handle, requires_grad = offloaded.pack(hidden), hidden.requires_grad
    empty = hidden.new_empty(0)  # stands for the input among the arguments
    device = hidden.device
    before = map_tensors(lambda t: empty if t is hidden else t, (args, kwargs))
    first = [(args, kwargs)]  # during the forward alone: backward takes the input from the offloaded. See _repeatable

    def run() -> Any:
        if first:
            positional, named = first.pop()
        else:
            x = offloaded.unpack(handle).requires_grad_(requires_grad)
            positional, named = map_tensors(lambda t: x if t is empty else t, before)
        return forward(*positional, **named)

    return run_checkpointed(run, device)


def swap(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    offloaded: OffloadedTensors,
    is_static: IsStatic,
) -> Any:
    """Everything that autograd saves on the device goes to the host, but for what blocks share. (Attention keeps its
    random state in host tensors.)
    """
    inputs = list(tensors_in((args, kwargs)))
    here = inputs[0].device if inputs else None
    shared = {storage_id(t.untyped_storage()) for t in inputs[1:]} - {
        storage_id(t.untyped_storage()) for t in inputs[:1]
    }

    def pack(tensor: Tensor) -> Tensor | Handle:
        if tensor.layout != torch.strided or tensor.device != here:
            return tensor
        storage = tensor.untyped_storage()
        travels = storage.nbytes() and storage_id(storage) not in shared and not is_static(tensor)
        return offloaded.pack(tensor) if travels else tensor

    with saved_tensors_hooks(pack, _unpack_from(offloaded)):
        return forward(*args, **kwargs)


RUN: dict[Strategy, Callable[..., Any]] = {"keep": keep, "recompute": recompute, "offload": offload, "swap": swap}
SENDS: tuple[Strategy, ...] = ("offload", "swap")
RUNS_TWICE: tuple[Strategy, ...] = ("recompute", "offload")
"""Backward runs the block's forward again."""


def _unpack_from(offloaded: OffloadedTensors) -> Callable[[Tensor | Handle], Tensor]:
    return lambda saved: offloaded.unpack(saved) if isinstance(saved, Handle) else saved
