"""Runs a layer under each activation strategy (model/strategies.py). One function per strategy, all with one signature.

`run(forward, args, kwargs, offloaded, is_static, layer)` runs the forward of `layer` and packs the tensors that are
copied to the host into `offloaded`. `is_static(tensor)` is true for weights and buffers, which are never offloaded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from outsize.activation.attention import Offloaded, with_attention_once
from outsize.activation.recompute import run_and_compare, run_checkpointed
from outsize.compat import storage_id
from outsize.model.strategies import Strategy
from outsize.model.tensors import map_tensors, tensors_in

Forward = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
IsStatic = Callable[[Tensor], bool]


def keep(
    forward: Forward, args: Args, kwargs: Kwargs, offloaded: Offloaded, is_static: IsStatic, layer: nn.Module
) -> Any:
    """Autograd keeps what it saves."""
    return forward(*args, **kwargs)


def recompute(
    forward: Forward, args: Args, kwargs: Kwargs, offloaded: Offloaded, is_static: IsStatic, layer: nn.Module
) -> Any:
    """Keep only the arguments. Backward runs the forward again, with the same random numbers and autocast."""
    first = next(tensors_in((args, kwargs)), None)
    if first is None:
        return forward(*args, **kwargs)
    return run_checkpointed(_repeatable(forward, args, kwargs), first.device)


def recompute_save_attention(
    forward: Forward, args: Args, kwargs: Kwargs, offloaded: Offloaded, is_static: IsStatic, layer: nn.Module
) -> Any:
    """`recompute`, with the outputs of attention kept on the device: its kernels do not run again."""
    first = next(tensors_in((args, kwargs)), None)
    if first is None:
        return forward(*args, **kwargs)
    return run_checkpointed(with_attention_once(_repeatable(forward, args, kwargs), layer), first.device)


def _repeatable(forward: Forward, args: Args, kwargs: Kwargs) -> Callable[[], Any]:
    """A call that can be repeated. A layer may write to a dict among its arguments that later layers read (keys and
    values in Gemma 3n): the first call gets the dict itself, later calls get a copy from before the first.
    """
    before = map_tensors(lambda t: t, (args, kwargs))  # copies the containers, not the tensors
    first = [(args, kwargs)]

    def run() -> Any:
        positional, named = first.pop() if first else map_tensors(lambda t: t, before)
        return forward(*positional, **named)

    return run


def keep_and_compare(
    forward: Forward, args: Args, kwargs: Kwargs, report: Callable[[str], None], module: nn.Module | None = None
) -> Any:
    """For profiling: `keep`, and in backward the second forward that `recompute` would run. `report` receives the
    difference, or "".
    """
    first = next(tensors_in((args, kwargs)), None)
    if first is None:
        return forward(*args, **kwargs)
    return run_and_compare(_repeatable(forward, args, kwargs), first.device, report, module)


def input_of(args: Args, kwargs: Kwargs) -> Tensor | None:
    """The input of a layer: the first positional tensor. Of a layer that is called with keywords alone `hidden_states`,
    else the first tensor with a gradient, else the first of floating point.
    """
    if (first := next(tensors_in(args), None)) is not None:
        return first
    if isinstance(named := kwargs.get("hidden_states"), Tensor):
        return named
    tensors = list(tensors_in(kwargs))
    return next((t for t in tensors if t.requires_grad), next((t for t in tensors if t.is_floating_point()), None))


def offload(
    forward: Forward, args: Args, kwargs: Kwargs, offloaded: Offloaded, is_static: IsStatic, layer: nn.Module
) -> Any:
    """`recompute`, with the input on the host. Other tensors (masks, encoder output) are shared by many layers and stay
    on the device.
    """
    hidden = input_of(args, kwargs)
    if hidden is None:
        return forward(*args, **kwargs)
    return run_checkpointed(_with_input_offloaded(forward, args, kwargs, hidden, offloaded), hidden.device)


def offload_save_attention(
    forward: Forward, args: Args, kwargs: Kwargs, offloaded: Offloaded, is_static: IsStatic, layer: nn.Module
) -> Any:
    """`offload`, with the outputs of attention on the host too: its kernels do not run again."""
    hidden = input_of(args, kwargs)
    if hidden is None:
        return forward(*args, **kwargs)
    device = hidden.device
    run = _with_input_offloaded(forward, args, kwargs, hidden, offloaded)
    return run_checkpointed(with_attention_once(run, layer, offloaded), device)


def _with_input_offloaded(
    forward: Forward, args: Args, kwargs: Kwargs, hidden: Tensor, offloaded: Offloaded
) -> Callable[[], Any]:
    """A call that can be repeated, and holds its input on the device only until it first runs."""
    handle: Any = offloaded.pack(hidden)
    requires_grad = hidden.requires_grad
    placeholder = torch.empty(0)
    before = map_tensors(lambda t: placeholder if t is hidden else t, (args, kwargs))
    first = [(args, kwargs)]  # as in _repeatable; the first run drops it, so that nothing keeps the input on the device

    def run() -> Any:
        if first:
            positional, named = first.pop()
        else:
            x = offloaded.unpack(handle).requires_grad_(requires_grad)
            positional, named = map_tensors(lambda t: x if t is placeholder else t, before)
        return forward(*positional, **named)

    return run


def swap(
    forward: Forward, args: Args, kwargs: Kwargs, offloaded: Offloaded, is_static: IsStatic, layer: nn.Module
) -> Any:
    """Copy all tensors that autograd saves on the device to the host, except those that layers share. Host tensors stay
    as they are: attention saves its random state in some.
    """
    inputs = list(tensors_in((args, kwargs)))
    device = inputs[0].device if inputs else None
    hidden, others = ({storage_id(t.untyped_storage()) for t in some} for some in (inputs[:1], inputs[1:]))
    shared = others - hidden

    def pack(tensor: Tensor) -> Any:
        if tensor.layout != torch.strided or tensor.device != device:
            return tensor
        storage = tensor.untyped_storage()
        is_sent = storage.nbytes() and storage_id(storage) not in shared and not is_static(tensor)
        return offloaded.pack(tensor) if is_sent else tensor

    def unpack(saved: Any) -> Tensor:
        return saved if isinstance(saved, Tensor) else offloaded.unpack(saved)

    with saved_tensors_hooks(pack, unpack):
        return forward(*args, **kwargs)


RUN: dict[Strategy, Callable[..., Any]] = {
    "keep": keep,
    "recompute": recompute,
    "recompute+attention": recompute_save_attention,
    "offload": offload,
    "offload+attention": offload_save_attention,
    "swap": swap,
}
