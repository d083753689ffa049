"""What a block does with its activations: keep, recompute, offload, swap. One function each, all of the same form.

`run(forward, args, kwargs, parcel, is_static)` runs the block and puts what shall leave the device into `parcel`. `is_static` tells
storages that are weights or buffers, which never enter the activation path.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from outsize.activation.parcel import Handle, Parcel
from outsize.model.tensors import map_tensors, tensors_in
from outsize.model.work import Strategy

IsStatic = Callable[[Tensor], bool]


def keep(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parcel: Parcel, is_static: IsStatic) -> Any:
    """Autograd keeps what it saves."""
    return forward(*args, **kwargs)


def recompute(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parcel: Parcel, is_static: IsStatic) -> Any:
    """Only the input stays; backward runs the forward again, with the same random numbers and autocast."""
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def offload(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parcel: Parcel, is_static: IsStatic) -> Any:
    """`recompute`, with the input on the host. The input is the first tensor argument; others (masks, encoder output) are shared by many blocks."""
    hidden = next(tensors_in((args, kwargs)))
    handle, requires_grad = parcel.pack(hidden), hidden.requires_grad
    present = [hidden]  # during the forward alone: the checkpoint must not hold it
    args, kwargs = map_tensors(lambda t: _INPUT if t is hidden else t, args), map_tensors(lambda t: _INPUT if t is hidden else t, kwargs)

    def run(_: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = present.pop() if present else parcel.unpack(handle).requires_grad_(requires_grad)
        return forward(*_put_input(x, args), **_put_input(x, kwargs))

    # The empty tensor tells the checkpoint which device's random state to keep.
    return checkpoint(run, hidden.new_empty(0), *args, use_reentrant=False, **kwargs)


def swap(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], parcel: Parcel, is_static: IsStatic) -> Any:
    """Everything that autograd saves goes to the host, but for what blocks share."""
    inputs = list(tensors_in((args, kwargs)))
    shared = {t.untyped_storage()._cdata for t in inputs[1:]} - {t.untyped_storage()._cdata for t in inputs[:1]}

    def pack(tensor: Tensor) -> Tensor | Handle:
        if is_static(tensor) or tensor.layout != torch.strided or tensor.untyped_storage()._cdata in shared or not tensor.untyped_storage().nbytes():
            return tensor
        return parcel.pack(tensor)

    with saved_tensors_hooks(pack, _unpack_from(parcel)):
        return forward(*args, **kwargs)


RUN: dict[Strategy, Callable[..., Any]] = {"keep": keep, "recompute": recompute, "offload": offload, "swap": swap}
SENDS: tuple[Strategy, ...] = ("offload", "swap")


def _unpack_from(parcel: Parcel) -> Callable[[Tensor | Handle], Tensor]:
    return lambda saved: parcel.unpack(saved) if isinstance(saved, Handle) else saved


class _Input:
    """Stands where the block's input was among its arguments."""


_INPUT: Any = _Input()


def _put_input(x: Tensor, value: Any) -> Any:
    if value is _INPUT:
        return x
    if isinstance(value, (tuple, list)):
        return type(value)(_put_input(x, item) for item in value)
    if isinstance(value, dict):
        return {key: _put_input(x, item) for key, item in value.items()}
    return value
