"""Guard: raises if an operator in a forward or backward reads a parameter while its slot holds another chunk.

Such a read gives finite, wrong numbers and no error, so a dispatch mode checks every operator's arguments: parameters
by identity, and any other tensor (`p.data`, views, tensors saved by autograd) by its storage, which may be a slot that
holds no chunk. Always on for `cpu` and `sim`; on CUDA for the first step after prepare or a re-plan, for the first step
that skips given blocks, and with OUTSIZE_GUARD=1. Between passes parameters read their homes (access.py) in any case.
"""

import weakref
from typing import Any

import torch

from outsize.base.errors import StaleParameter
from outsize.compat import TorchDispatchMode
from outsize.device.observer import tensors_of
from outsize.runtime.store import Store
from outsize.schedule.buffers import BufferKind as B


class Guard(TorchDispatchMode):
    def __init__(self, store: Store):
        super().__init__()
        # No strong reference to the store or its parameters: a mode lives until it is removed from its thread's stack,
        # and would keep the memory of a dropped engine.
        self._place, self._slot_contents = store.place, store.slot_contents
        self._store = weakref.ref(store)
        place = store.place
        self._where = {
            id(store.params[piece.name]): (
                weakref.ref(store.params[piece.name]),
                piece.name,
                chunk.index,
                place.slots.slot_of[chunk.index],
            )
            for chunk in place.layout.chunks
            if place.streams(chunk.index)
            for piece in chunk.pieces
        }
        # A weight that consists of other tensors is as stale as they are.
        for wrapper, names in store.wrappers.values():
            for part in [store.params[name] for name in names if id(store.params[name]) in self._where]:
                self._where[id(wrapper)] = (weakref.ref(wrapper), *self._where[id(part)][1:])
        self._slot_at = {store.gpu[B.SLOT, slot].untyped_storage().data_ptr(): slot for slot in store.slot_contents}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Nothing is streamed, or the store was collected while the mode was active.
        if not self._where or self._store() is None:
            return func(*args, **(kwargs or {}))
        for leaf in tensors_of(*args, *(kwargs or {}).values()):
            known = self._where.get(id(leaf))
            if known is not None and known[0]() is leaf:
                self._check(func, *known[1:])
            elif type(leaf) is torch.Tensor and leaf.layout is torch.strided:
                slot = self._slot_at.get(leaf.untyped_storage().data_ptr())
                if slot is not None and self._slot_contents[slot] is None:
                    raise StaleParameter(
                        f"{func}: it reads {tuple(leaf.shape)} elements of a streamed weight whose slot holds no "
                        "chunk. Read weights inside the forward of their own module, or between steps."
                    )
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, name: str, chunk: int, slot: int) -> None:
        owner = self._slot_contents[slot]
        if owner != chunk:
            place = self._place
            block = place.graph.call_name(place.chunk(chunk).calls[0])
            holds = (
                "nothing yet" if owner is None else f"weights of {place.graph.call_name(place.chunk(owner).calls[0])}"
            )
            raise StaleParameter(
                f"{func}: it reads {name} of {block}, but its slot holds {holds}. Read it inside the model's forward, "
                "or `with engine.gathered(name)`."
            )
