"""Saving a PEFT model: to save prompts, PEFT runs its prompt encoders or reads their tensors. No hook sees either."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outsize.runtime.store import Store


def saves_from_home(model: nn.Module, store: Store, drain: Callable[[], None]) -> Callable[..., Any]:
    """`save_pretrained`, run while the parameters of prompt encoders have their values in tensors of their own."""
    save: Callable[..., Any] = model.save_pretrained  # type: ignore[assignment]
    ids = {id(param) for param in model.get_submodule("prompt_encoder").parameters()}

    @functools.wraps(save)
    def save_from_home(*args: Any, **kwargs: Any) -> Any:
        drain()
        with torch.no_grad(), _values_at_hand(store, ids):
            return save(*args, **kwargs)

    return save_from_home


@contextmanager
def _values_at_hand(store: Store, ids: set[int]) -> Iterator[None]:
    """Copies on the same device, since prompts are small. Parameters that do not stream have their values already."""
    place = store.place
    streams = {name for name, (chunk, _) in place.layout.place.items() if place.streams(chunk)}
    streamed = {name: param for name, param in store.params.items() if id(param) in ids and name in streams}
    slots = {name: param.data for name, param in streamed.items()}
    try:
        for name, param in streamed.items():
            param.data = store.read(name).to(slots[name].device, copy=True)
        yield
    finally:
        for name, param in streamed.items():
            param.data = slots[name]
