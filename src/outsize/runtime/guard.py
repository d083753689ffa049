"""The guard: no operator reads a parameter while its slot holds another chunk.

Such a read gives finite, wrong numbers and no error, so a dispatch mode looks at every operator's Parameter arguments. Always on for `cpu` and
`sim`; elsewhere for the first step after prepare or a re-plan, for the first that leaves certain blocks out, and with OUTSIZE_GUARD=1.
"""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outsize.base.errors import StaleParameter, tell
from outsize.device.observer import tensors_of
from outsize.runtime.store import Store


class Guard(TorchDispatchMode):
    def __init__(self, store: Store):
        super().__init__()
        # Neither the store itself nor its parameters: a mode lives until it is removed (from its own thread's stack), and would keep a dropped engine's memory.
        self._place, self._owner = store.place, store.owner
        place = store.place
        self._where = {
            id(param := store.params[piece.name]): (
                weakref.ref(param), param.data_ptr(), piece.name, chunk.index, place.slots.slot_of[chunk.index],
            )
            for chunk in place.layout.chunks
            if place.streams(chunk.index)
            for piece in chunk.pieces
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tensors_of(*args, *(kwargs or {}).values()):
            if isinstance(leaf, torch.nn.Parameter) and (known := self._where.get(id(leaf))) is not None and known[0]() is leaf and not _harmless(func, args):
                self._check(func, leaf.data_ptr() == known[1], *known[2:])
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, in_slot: bool, name: str, chunk: int, slot: int) -> None:
        owner = self._owner[slot]
        if owner != chunk and in_slot:  # else it has a tensor of its own for a while: see adapters.py
            place = self._place
            block = place.graph.visit_name(place.chunk(chunk).visits[0])
            holds = "nothing yet" if owner is None else f"weights of {place.graph.visit_name(place.chunk(owner).visits[0])}"
            do = "Read it inside the model's forward, or `with engine.gathered(name)`"
            raise StaleParameter(tell(f"{func} reads {name} of {block}", f"its slot holds {holds}", do))


def _harmless(func: Any, args: Any) -> bool:
    """What state_dict and load_state_dict do to parameters, whose values our hooks take from and bring to their homes."""
    if func is torch.ops.aten.detach.default:
        return True
    return func is torch.ops.aten.copy_.default and args[0].data_ptr() == args[1].data_ptr()
