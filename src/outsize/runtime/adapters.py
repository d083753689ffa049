"""Saving a PEFT model: PEFT runs its prompt encoders, or reads their tensors directly, to save prompts. No hook sees either."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from outsize.runtime.store import Store


def saves_from_home(model: nn.Module, store: Store, drain: Callable[[], None]) -> Callable[..., Any]:
    """The model's `save_pretrained`, run while the parameters of prompt encoders have their values in tensors of their own."""
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
    """Copies, on the device that the parameters are on: prompts are small. Parameters that do not stream have their values already."""
    places = store.place.layout.place
    streamed = {name: param for name, param in store.params.items() if id(param) in ids and store.place.streams(places[name][0])}
    slots = {name: param.data for name, param in streamed.items()}
    try:
        for name, param in streamed.items():
            param.data = store.read(name).to(slots[name].device, copy=True)
        yield
    finally:
        for name, param in streamed.items():
            param.data = slots[name]
