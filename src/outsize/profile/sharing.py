"""Gradients that several calls add to, and which calls a profiling pass must therefore run.

The gradient of a weight that several calls use lives from the backward of its last user to that of its first. The users
between them hold both the sum so far and their own part. The same holds for a tensor that several layers have as a
further argument (encoder states, keys and values of an earlier layer), until the backward of the call that made it. If
code outside of layers sums the states of all layers, autograd gives all of them one gradient: the call that is the last
to add its own part adds in place, the others make a new tensor. So a call can stand for others only if it has the same
position among the users. If one user runs in a profiling pass, the first and the last must run too: the first one in
backward order begins the sum, the last one ends it.
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
        """`users`: by gradient, the calls whose backward adds to it, in forward order. For a tensor, the call that made
        it comes first. For a gradient that several tensors have: the calls that have one of these as their input.
        """
        self._of: dict[int, list[tuple[int, ...]]] = {}
        for calls in users:
            for call in calls if len(calls) > 1 else ():
                self._of.setdefault(call, []).append(tuple(calls))

    def position(self, call: int) -> tuple[tuple[bool, bool], ...]:
        """By gradient that the call adds to: whether an earlier call does too, and whether a later one does."""
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
    """The first two calls with each key, those that always run, and what must run with them. `keys`: by call of a
    layer, equal for calls that cost the same.
    """
    counts: dict[object, int] = {}
    first: list[int] = []
    for call, key in sorted(keys.items()):
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= 2:
            first.append(call)
    return gradients.complete([*first, *always])


class HiddenReads:
    """Tensors that a layer made and a later layer reads, though they are none of its arguments or attributes: they came
    through an object that both refer to.

    How long such a tensor lives depends on what holds that object. Only a pass in which every layer keeps its
    activations measures it correctly.
    """

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Tensor], int, set[int]]] = {}

    def note_read(self, tensor: Tensor, run: ProfilingPass, made_in: Callable[[Tensor], int]) -> None:
        """An operator reads this tensor, which is no parameter, in the forward of a discovery pass."""
        call, storage = len(run.layer_of) - 1, tensor.untyped_storage()
        shared = run.arguments.find(storage)
        if shared is not None:
            shared.readers.add(call)
        elif (
            run.argument_storages is not None
            and tensor.grad_fn is not None
            and storage_id(storage) not in run.argument_storages
        ):
            maker = made_in(tensor)
            if 0 <= maker < call and run.layer_of[maker] is not None:
                self._add(tensor, maker, call)

    def _add(self, tensor: Tensor, maker: int, reader: int) -> None:
        known = self._found.get(id(tensor))
        if known is None or known[0]() is not tensor:
            # The id may be that of a freed tensor, whose entry stays under its own key.
            key = id(tensor) if known is None else -len(self._found) - 1
            self._found[key] = (weakref.ref(tensor), maker, {reader})
        else:
            known[2].add(reader)

    def makers_and_readers(self) -> Iterator[tuple[int, set[int]]]:
        """By tensor: the call that made it, and the calls that read it."""
        return ((maker, readers) for _, maker, readers in self._found.values())

    def __bool__(self) -> bool:
        return bool(self._found)
