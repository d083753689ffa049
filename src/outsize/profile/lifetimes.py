"""Tensors that outlive the block call that made them: which calls hold each one, under which strategies, and when it
dies if none does.

Each pass runs all layers under one strategy, and a plan gives each layer its own. So the memory of such tensors is in
no call's Work; the ledger (planner/memory.py) adds it up from the records that are made here (`Shared`). Followed are
the arguments of layers, their outputs, what they leave in their arguments, and what their graphs save if it dies in a
later forward (a graph that nothing uses).

What holds a tensor is known before its death is seen. With `keep`, autograd tells what a layer saves. `recompute` holds
all arguments, `offload` all but the input, and `swap` what autograd saves, without what it sends. A death that is seen
overrules this, and shows what code outside of layers holds.

Layers that are skipped return copies of their inputs, so that what other code does with their outputs is seen. What
they would hold themselves is what the layer holds that was measured in their place.
"""

import weakref
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from outsize.base.errors import ModelUnsupported
from outsize.compat import node_number, saved_tensors_hooks_in_force, storage_id
from outsize.model.work import Role, Shared, Strategy
from outsize.profile.phases import Moment, Phases, Storage

Use = tuple[int, Role, int]
"""A block call and the number of a tensor among its arguments, outputs, ..."""


@dataclass(slots=True, eq=False)
class Followed:
    """A tensor, by where it was first seen."""

    first: Use
    storage: Storage
    uses: list[Use] = field(default_factory=list)
    """Layers that made it, or took it."""


class Lifetimes:
    """Of one pass."""

    def __init__(self, phases: Phases, device: str, is_static: Callable[[Tensor], bool]):
        """`device`: the type of the one whose memory is measured."""
        self.phases, self._device, self._is_static = phases, device, is_static
        self.tensors: dict[Use, Followed] = {}
        self.held: set[Use] = set()
        """By what a layer is known to do, it keeps these until its backward."""
        self.sent: set[Use] = set()
        self.strategies: dict[int, Strategy] = {}
        """Of layers that ran."""
        self._by_key: dict[int, tuple[weakref.ref[torch.UntypedStorage], Followed]] = {}
        self._uses: dict[int, list[tuple[Use, weakref.ref[torch.UntypedStorage]]]] = {}
        self._saved: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._returned_last, self._made_until = -1, -1
        """The last layer, and the number of the last of its autograd nodes."""

    def takes(self, call: int, inputs: Iterable[Tensor]) -> None:
        """A layer is called with these."""
        for number, tensor in enumerate(inputs):
            if self._comes_and_goes(tensor):
                storage, found = tensor.untyped_storage(), self._find(tensor.untyped_storage())
                use: Use = (call, "argument", number)
                if found is None:
                    is_between = (
                        self._returned_last == call - 1
                        and tensor.grad_fn is not None
                        and node_number(tensor.grad_fn) > self._made_until
                    )
                    found = self._follow(use, storage, call - 1 if is_between else -1)
                self._use(found, use, storage)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Note what autograd saves. Not inside hooks of the model's own (checkpointing around layers, which is
        refused): they would see nothing.
        """
        self._saved = {}
        if saved_tensors_hooks_in_force(False) is not None:
            yield
            return

        def note(tensor: Tensor) -> Tensor:
            if self._comes_and_goes(tensor):
                storage = tensor.untyped_storage()
                self._saved[storage_id(storage)] = weakref.ref(storage)
            with self.phases.uncounted():
                return tensor if tensor.is_leaf else tensor.data  # a node that has its own output would never die

        with saved_tensors_hooks(note, lambda tensor: tensor):
            yield

    def returns(self, call: int, role: Role, tensors: Iterable[Tensor], given: Container[int]) -> None:
        """A layer returned these, or left them in its arguments. `given`: the storages of its arguments."""
        self._returned_last = call
        for number, tensor in enumerate(tensors):
            if tensor.grad_fn is not None:
                self._made_until = max(self._made_until, node_number(tensor.grad_fn))
            storage = tensor.untyped_storage() if self._comes_and_goes(tensor) else None
            if storage is not None and storage_id(storage) not in given and self._find(storage) is None:
                found = self._follow((call, role, number), storage, call)
                self._use(found, found.first, storage)

    def ran(self, call: int, strategy: Strategy) -> None:
        """A layer ran, and what it returned is known."""
        self.strategies[call] = strategy
        for use, ref in self._uses.get(call, ()):
            alive = ref()
            if alive is not None and self._holds(strategy, use, alive):
                self.held.add(use)
        saved = [
            storage for ref in self._saved.values() if (storage := ref()) is not None and self._find(storage) is None
        ]
        for number, storage in enumerate(saved):
            self.tensors[call, "saved", number] = Followed(
                (call, "saved", number), self.phases.follow(storage, saved_by=call)
            )
        self._saved = {}

    def _holds(self, strategy: Strategy, use: Use, storage: torch.UntypedStorage) -> bool:
        _, role, number = use
        if strategy == "keep":
            return storage_id(storage) in self._saved and self._saved[storage_id(storage)]() is storage
        return (
            role == "argument"
            and (strategy == "recompute" or (strategy == "offload" and number > 0))
            and torch.is_grad_enabled()
        )

    def sends(self, call: int, holds: Callable[[torch.UntypedStorage], bool]) -> None:
        """A layer's offloaded is complete."""
        self.sent |= {use for use, ref in self._uses.get(call, ()) if (storage := ref()) is not None and holds(storage)}

    def _comes_and_goes(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.device.type == self._device and not self._is_static(tensor)

    def _find(self, storage: torch.UntypedStorage) -> Followed | None:
        ref, found = self._by_key.get(storage_id(storage), (None, None))
        return found if ref is not None and ref() is storage else None

    def _use(self, tensor: Followed, use: Use, storage: torch.UntypedStorage) -> None:
        if not tensor.uses or tensor.uses[-1][0] != use[0]:
            tensor.uses.append(use)
            self._uses.setdefault(use[0], []).append((use, weakref.ref(storage)))

    def _follow(self, first: Use, storage: torch.UntypedStorage, born: int) -> Followed:
        found = self.tensors[first] = Followed(first, self.phases.follow(storage, born))
        self._by_key[storage_id(storage)] = weakref.ref(storage), found
        return found


class Records:
    """Of tensors, by what the passes say together."""

    def __init__(
        self, passes: Mapping[Strategy, Lifetimes], layers: Container[int], representative: Callable[[int], int]
    ):
        """`layers`: calls of layers. `representative`: the call that was measured in the place of another."""
        if len({tuple(use for use in run.tensors if use[1] != "saved") for run in passes.values()}) > 1:
            raise ModelUnsupported(
                "The model's layers get other tensors as arguments when activations are recomputed or sent to the "
                "host. "
                "Let layers return what later layers need, instead of writing it into an object that they are given."
            )
        self._passes, self._representative = passes, representative
        self._tensors = passes["keep"].tensors
        self._held = {s: set(run.held) for s, run in passes.items()}
        swap = passes["swap"]
        self._held["swap"] |= {
            use for use in passes["keep"].held if swap.strategies.get(use[0]) == "swap" and use not in swap.sent
        }
        self._early: dict[Strategy, set[Use]] = {s: set() for s in passes}
        """They freed it before the peak of their backward."""
        self._others: dict[Use, dict[int, tuple[str, ...]]] = {}
        """By tensor: calls that hold it though they neither made it nor took it."""
        for tensor in self._tensors.values():
            if tensor.first[1] != "saved":
                self._look_at(tensor)
                self._settle(tensor, layers)

    def _look_at(self, tensor: Followed) -> None:
        """Correct what is known of its holders by when it died."""
        ran = self._passes["keep"].strategies
        uses = {use[0]: use for use in tensor.uses if use[0] in ran}
        for strategy, died in self._deaths(tensor):
            if died is None:
                continue
            moment, call = died
            self._held[strategy].difference_update([use for use in uses.values() if moment != "B" or use[0] < call])
            if moment == "B" and call in uses:
                self._held[strategy].add(uses[call])
                if self._is_early(tensor, strategy):
                    self._early[strategy].add(uses[call])
            elif moment == "B":
                under = strategy if call in ran else "keep"  # a region, whatever strategy layers have
                others = self._others.setdefault(tensor.first, {})
                others[call] = tuple(dict.fromkeys((*others.get(call, ()), under)))

    def _settle(self, tensor: Followed, layers: Container[int]) -> None:
        """Complete what phases count.

        A tensor that dies in a forward after its peak counts as alive until the next forward, since it is part of that
        peak where it lives on. If it never does it makes no difference, and which moment is the peak depends on the
        size of the batch: then it counts as dead from the beginning, and numbers of several sizes lie on one line. Not
        so in layers, whose numbers stand for those of others.
        """
        storages = [(run, run.tensors[tensor.first].storage) for run in self._passes.values()]
        moments = {
            died[1] - storage.is_late if (died := storage.died) is not None and died[0] == "F" else -1
            for _, storage in storages
        }
        at = max(moments)
        may_live_on = any(self._source(use) in held for use in tensor.uses for held in self._held.values())
        if len(moments) == 1 and at >= 0 and at not in layers and at != tensor.storage.born and not may_live_on:
            for run, storage in storages:
                if storage.is_late:
                    run.phases.call_early(storage)

    def _source(self, use: Use) -> Use:
        """The use whose measurement stands for this one."""
        return self._representative(use[0]), use[1], use[2]

    def _is_early(self, tensor: Followed, strategy: Strategy) -> bool:
        return self._passes[strategy].tensors[tensor.first].storage.is_early

    def _deaths(self, tensor: Followed) -> list[tuple[Strategy, Moment | None]]:
        return [(strategy, run.tensors[tensor.first].storage.died) for strategy, run in self._passes.items()]

    def all(self, offered: Sequence[Collection[str]]) -> tuple[Shared, ...]:
        """`offered`: by call, the strategies that a plan may choose."""
        found = [self._record(tensor, offered) for tensor in self._tensors.values() if tensor.first[1] != "saved"]
        found += self._saved(len(offered))
        # One that lives from the beginning to the end needs none.
        return tuple(
            sorted((r for r in found if r.born >= 0 or r.dies_at >= 0), key=lambda r: (r.call, r.role, r.number))
        )

    def _record(self, tensor: Followed, offered: Sequence[Collection[str]]) -> Shared:
        call, role, number = tensor.first
        # What a skipped layer returned may be of another size than what it would have made.
        measured = self._tensors.get((self._representative(call), role, number), tensor) if role == "output" else tensor
        held, sent = dict(self._others.get(tensor.first, {})), {}
        early = {
            v: under
            for v, under in held.items()
            if all(self._is_early(tensor, s) for s, died in self._deaths(tensor) if died == ("B", v))
        }
        for use in tensor.uses:
            own = [s for s in self._passes if s in offered[use[0]]]
            if under := tuple(s for s in own if self._source(use) in self._held[s]):
                held[use[0]] = under
            if under := tuple(s for s in own if self._source(use) in self._early[s]):
                early[use[0]] = under
            if under := tuple(s for s in own if self._source(use) in self._passes[s].sent):
                sent[use[0]] = under
        dies_at = self._dies_at(tensor, len(offered))
        found = Shared(
            call=call,
            role=role,
            number=number,
            num_bytes=measured.storage.num_bytes,
            born=tensor.storage.born,
            dies_at=dies_at,
        )
        if dies_at < 0:
            return found
        held_by, early_in, sent_by = (tuple(sorted(holders.items())) for holders in (held, early, sent))
        return replace(found, held_by=held_by, early_in=early_in, sent_by=sent_by)

    def _dies_at(self, tensor: Followed, num_calls: int) -> int:
        """The forward that begins without it, if nothing holds or sends it. -1: none."""
        deaths = [died for _, died in self._deaths(tensor)]
        if None in deaths:
            return -1
        in_forward = [died[1] for died in deaths if died is not None and died[0] == "F"]
        released = [min(died[1] + 2, num_calls) for died in deaths if died is not None and died[0] == "R"]
        return max(in_forward) if in_forward else min(released, default=num_calls)

    def _saved(self, num_calls: int) -> Iterator[Shared]:
        """What graphs of layers saved and nothing used, by when it died."""
        found: dict[int, dict[int, int]] = {}
        for tensor in self._tensors.values():
            died = tensor.storage.died
            if tensor.first[1] == "saved" and died is not None:
                later = died[1] - tensor.first[0]
                sizes = found.setdefault(tensor.first[0], {})
                sizes[later] = sizes.get(later, 0) + tensor.storage.num_bytes
        for call in range(num_calls):
            for number, (later, num_bytes) in enumerate(sorted(found.get(self._representative(call), {}).items())):
                yield Shared(
                    call=call,
                    role="saved",
                    number=number,
                    num_bytes=num_bytes,
                    born=call,
                    dies_at=min(call + later, num_calls),
                    under=("keep",),
                )
