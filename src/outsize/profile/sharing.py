"""Gradients that several calls add to, and what follows for a trial run that skips calls.

The gradient of a weight that several calls use lives from the backward of its last user to that of its first, and the
users between them hold both the sum so far and their own part. So does that of a tensor which several layers take
beside their input (encoder states, keys and values of an earlier layer): it lives until the backward of whoever made
it. So a call that stands for others must have the same place among the users, and wherever one user runs, the first and
the last run too: without them a sum is neither begun nor kept.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from outsize.compat import storage_id
from outsize.profile.profiling_pass import ProfilingPass

BEFORE_ALL = -1
"""Stands for a region that made a tensor: regions always run."""


class SharedGradients:
    def __init__(self, users: Iterable[Sequence[int]]):
        """`users`: the calls whose backward adds to one gradient, in forward order. Of a tensor, first the one that
        made it.
        """
        self._of: dict[int, list[tuple[int, ...]]] = {}
        for calls in users:
            for call in calls if len(calls) > 1 else ():
                self._of.setdefault(call, []).append(tuple(calls))

    def place(self, call: int) -> tuple[tuple[bool, bool], ...]:
        """Per gradient that it adds to: whether an earlier call does too, and whether a later one does."""
        return tuple((calls[0] < call, calls[-1] > call) for calls in self._of.get(call, ()))

    def complete(self, calls: Iterable[int]) -> set[int]:
        """These calls and all that must run with them."""
        found: set[int] = set()
        to_do = list(calls)
        while to_do:
            call = to_do.pop()
            if call not in found:
                found.add(call)
                to_do += [end for users in self._of.get(call, ()) for end in (users[0], users[-1]) if end != BEFORE_ALL]
        return found


def calls_to_run(keys: Mapping[int, object], always: Iterable[int], gradients: SharedGradients) -> set[int]:
    """The first two calls of every kind, those that run in any case, and what must run with them. `keys`: the kind of
    every call of a layer.
    """
    counts: dict[object, int] = {}
    first: list[int] = []
    for call, key in sorted(keys.items()):
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= 2:
            first.append(call)
    return gradients.complete([*first, *always])


class HiddenReads:
    """Tensors that a layer made and a later one computes with, though it is neither given them nor has them: they came
    through an object that both know.

    What lives how long then depends on who holds that object: nothing but a pass in which every layer keeps its
    activations can tell.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], int, set[int]]] = {}

    def look_at(self, tensor: Tensor, run: ProfilingPass, made_in: Callable[[Tensor], int]) -> None:
        """An operator reads this tensor, which is no parameter, in the forward of a discovery."""
        call, storage = len(run.layer_of) - 1, tensor.untyped_storage()
        shared = run.arguments.shared_as(storage)
        if shared is not None:
            shared.readers.add(call)
        elif run.given is not None and tensor.grad_fn is not None and storage_id(storage) not in run.given:
            maker = made_in(tensor)
            if 0 <= maker < call and run.layer_of[maker] is not None:
                self._add(tensor, maker, call)

    def _add(self, tensor: Tensor, maker: int, reader: int) -> None:
        known = self._found.get(id(tensor))
        if known is None or known[0]() is not tensor:
            # One that died makes way, but not what is known of it.
            key = id(tensor) if known is None else -len(self._found) - 1
            self._found[key] = (weakref.ref(tensor), maker, {reader})
        else:
            known[2].add(reader)

    def of_tensors(self) -> Iterator[tuple[int, set[int]]]:
        """Who made each, and who reads it."""
        return ((maker, readers) for _, maker, readers in self._found.values())

    def __bool__(self) -> bool:
        return bool(self._found)
