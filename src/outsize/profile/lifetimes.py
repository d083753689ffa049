"""Tensors that outlive the block call that made them: which calls hold each one, under which strategies, and when it is
freed if none does.

Each pass runs all layers under one strategy, but a plan gives each layer its own. So no call's Work includes the memory
of such tensors: planner/memory.py adds it up from the `SharedTensor` records that are made here. Tracked are the
arguments of layers, their outputs, tensors that they write into their arguments, and what their graphs save if it is
freed in a later forward (a graph that nothing uses).

Which calls hold a tensor is known before it is freed. With `keep`, autograd's hooks show what a layer saves. A strategy
that recomputes holds all arguments (without the input if it sends that); one that sends the saved tensors holds what
`keep` holds, without what it sends. When a tensor is freed overrules this, and shows what code outside of layers holds.

Skipped layers return copies of their inputs, so that it is seen what other code does with their outputs. What they
would hold themselves is taken from the layer that was measured in their place.
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
from outsize.model.strategies import STRATEGY, Strategy
from outsize.model.work import Role, SharedTensor
from outsize.profile.phases import PhaseName, Phases, TrackedStorage

Use = tuple[int, Role, int]
"""A block call, and the number of a tensor among its arguments, outputs, ..."""


@dataclass(slots=True, eq=False)
class TrackedTensor:
    first: Use
    """The use in which it was first seen."""
    storage: TrackedStorage
    uses: list[Use] = field(default_factory=list)
    """Layer calls that made it or had it as an argument."""


class Lifetimes:
    """Tracks the tensors of one pass."""

    def __init__(self, phases: Phases, device: str, is_static: Callable[[Tensor], bool]):
        """`device`: type of the device whose memory is measured."""
        self.phases, self._device, self._is_static = phases, device, is_static
        self.tensors: dict[Use, TrackedTensor] = {}
        self.held: set[Use] = set()
        """Tensors that a layer holds until its backward, by the rules of its strategy."""
        self.sent: set[Use] = set()
        self.strategies: dict[int, Strategy] = {}
        """Of layers that ran."""
        self._by_storage: dict[int, tuple[weakref.ref[torch.UntypedStorage], TrackedTensor]] = {}
        self._uses: dict[int, list[tuple[Use, weakref.ref[torch.UntypedStorage]]]] = {}
        self._saved: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._last_call, self._last_node = -1, -1
        """The last layer call that returned, and the number of its last autograd node."""

    def layer_called(self, call: int, inputs: Iterable[Tensor]) -> None:
        for number, tensor in enumerate(inputs):
            if self._is_activation(tensor):
                storage, found = tensor.untyped_storage(), self._find(tensor.untyped_storage())
                use: Use = (call, "argument", number)
                if found is None:
                    is_made_since_last = (
                        self._last_call == call - 1
                        and tensor.grad_fn is not None
                        and node_number(tensor.grad_fn) > self._last_node
                    )
                    found = self._track(use, storage, call - 1 if is_made_since_last else -1)
                self._add_use(found, use, storage)

    @contextmanager
    def noting_saved(self) -> Iterator[None]:
        """Note what autograd saves. Does nothing inside saved-tensor hooks of the model's own code (checkpointing
        around layers, which is refused): these would see nothing.
        """
        self._saved = {}
        if saved_tensors_hooks_in_force(False) is not None:
            yield
            return

        def note(tensor: Tensor) -> Tensor:
            if self._is_activation(tensor):
                storage = tensor.untyped_storage()
                self._saved[storage_id(storage)] = weakref.ref(storage)
            with self.phases.uncounted():
                # A node that holds its own output would never be freed.
                return tensor if tensor.is_leaf else tensor.data

        with saved_tensors_hooks(note, lambda tensor: tensor):
            yield

    def layer_returned(self, call: int, role: Role, tensors: Iterable[Tensor], arguments: Container[int]) -> None:
        """A layer returned these tensors, or wrote them into its arguments. `arguments`: storages of its arguments."""
        self._last_call = call
        for number, tensor in enumerate(tensors):
            if tensor.grad_fn is not None:
                self._last_node = max(self._last_node, node_number(tensor.grad_fn))
            storage = tensor.untyped_storage() if self._is_activation(tensor) else None
            if storage is not None and storage_id(storage) not in arguments and self._find(storage) is None:
                found = self._track((call, role, number), storage, call)
                self._add_use(found, found.first, storage)

    def layer_ran(self, call: int, strategy: Strategy) -> None:
        """A layer ran, and `layer_returned` was called for all that it made."""
        self.strategies[call] = strategy
        for use, ref in self._uses.get(call, ()):
            storage = ref()
            if storage is not None and self._holds(strategy, use, storage):
                self.held.add(use)
        saved = [
            storage for ref in self._saved.values() if (storage := ref()) is not None and self._find(storage) is None
        ]
        for number, storage in enumerate(saved):
            first: Use = (call, "saved", number)
            self.tensors[first] = TrackedTensor(first, self.phases.track(storage, saved_by=call))
        self._saved = {}

    def _holds(self, strategy: Strategy, use: Use, storage: torch.UntypedStorage) -> bool:
        _, role, number = use
        record = STRATEGY[strategy]
        if record.recomputes:
            return role == "argument" and (number > 0 or record.sends != "input") and torch.is_grad_enabled()
        return not record.sends and storage_id(storage) in self._saved and self._saved[storage_id(storage)]() is storage

    def layer_sent(self, call: int, is_sent: Callable[[torch.UntypedStorage], bool]) -> None:
        """Called once all tensors that a layer copies to the host are known. `is_sent`: whether it copies a storage."""
        self.sent |= {
            use for use, ref in self._uses.get(call, ()) if (storage := ref()) is not None and is_sent(storage)
        }

    def _is_activation(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and tensor.device.type == self._device and not self._is_static(tensor)

    def _find(self, storage: torch.UntypedStorage) -> TrackedTensor | None:
        ref, found = self._by_storage.get(storage_id(storage), (None, None))
        return found if ref is not None and ref() is storage else None

    def _add_use(self, tensor: TrackedTensor, use: Use, storage: torch.UntypedStorage) -> None:
        if not tensor.uses or tensor.uses[-1][0] != use[0]:
            tensor.uses.append(use)
            self._uses.setdefault(use[0], []).append((use, weakref.ref(storage)))

    def _track(self, first: Use, storage: torch.UntypedStorage, allocated_in: int) -> TrackedTensor:
        found = self.tensors[first] = TrackedTensor(first, self.phases.track(storage, allocated_in))
        self._by_storage[storage_id(storage)] = weakref.ref(storage), found
        return found


class SharedTensors:
    """Makes the `SharedTensor` records from the passes of all strategies."""

    def __init__(
        self, passes: Mapping[Strategy, Lifetimes], keys: Mapping[int, object], representative: Callable[[int], int]
    ):
        """`keys`: by call of a layer, equal for calls that cost the same. `representative`: the call that was measured
        in the place of another.
        """
        if len({tuple(use for use in run.tensors if use[1] != "saved") for run in passes.values()}) > 1:
            raise ModelUnsupported(
                "The model's layers get other tensors as arguments when activations are recomputed or sent to the "
                "host. "
                "Let layers return what later layers need, instead of writing it into an object that they are given."
            )
        self._passes, self._representative = passes, representative
        self._tensors = passes["keep"].tensors
        self._by_use = {use: tensor for tensor in self._tensors.values() for use in tensor.uses}
        self._measured: dict[object, list[int]] = {}
        """By key: the calls that ran, in order."""
        for call in sorted(passes["keep"].strategies):
            self._measured.setdefault(keys[call], []).append(call)
        self._keys = keys
        self._held = {s: set(run.held) for s, run in passes.items()}
        for name, run in passes.items():
            if STRATEGY[name].sends == "saved":
                self._held[name] |= {
                    use for use in passes["keep"].held if run.strategies.get(use[0]) == name and use not in run.sent
                }
        self._freed_early: dict[Strategy, set[Use]] = {s: set() for s in passes}
        """Uses whose call freed the tensor before the peak of its backward."""
        self._other_holders: dict[Use, dict[int, tuple[str, ...]]] = {}
        """By tensor: calls that hold it though they neither made it nor had it as an argument."""
        for tensor in self._tensors.values():
            if tensor.first[1] != "saved":
                self._correct_holders(tensor)
                self._correct_peaks(tensor, keys)

    def _correct_holders(self, tensor: TrackedTensor) -> None:
        """Correct the holders of a tensor from the time at which it was freed."""
        ran = self._passes["keep"].strategies
        uses = {use[0]: use for use in tensor.uses if use[0] in ran}
        for strategy, freed in self._frees(tensor):
            if freed is None:
                continue
            moment, call = freed
            self._held[strategy].difference_update(
                [use for use in uses.values() if moment != "backward" or use[0] < call]
            )
            if moment == "backward" and call in uses:
                self._held[strategy].add(uses[call])
                if self._is_freed_before_peak(tensor, strategy):
                    self._freed_early[strategy].add(uses[call])
            elif moment == "backward":
                under = strategy if call in ran else "keep"  # a region holds it under any strategy of the layers
                others = self._other_holders.setdefault(tensor.first, {})
                others[call] = tuple(dict.fromkeys((*others.get(call, ()), under)))

    def _correct_peaks(self, tensor: TrackedTensor, layers: Container[int]) -> None:
        """Complete the peaks of forward phases in which a tensor is freed.

        A tensor that is freed in a forward after its peak counts as there until the next forward, since it is part of
        that peak in plans that hold it longer. If no plan does, it makes no difference; but which moment is the peak
        depends on the batch size. Such a tensor counts as freed from the beginning, so that the numbers of several
        batch sizes lie on one line. Not in layers, whose numbers stand for those of others.
        """
        storages = [(run, run.tensors[tensor.first].storage) for run in self._passes.values()]
        moments = {
            freed[1] - storage.is_freed_after_peak
            if (freed := storage.freed) is not None and freed[0] == "forward"
            else -1
            for _, storage in storages
        }
        at = max(moments)
        may_be_held = any(self._source(use) in held for use in tensor.uses for held in self._held.values())
        if len(moments) == 1 and at >= 0 and at not in layers and at != tensor.storage.allocated_in and not may_be_held:
            for run, storage in storages:
                if storage.is_freed_after_peak:
                    run.phases.count_as_freed_before_peak(storage)

    def _source(self, use: Use) -> Use:
        """The use that was measured in place of this one."""
        return self._representative(use[0]), use[1], use[2]

    def _is_freed_before_peak(self, tensor: TrackedTensor, strategy: Strategy) -> bool:
        return self._passes[strategy].tensors[tensor.first].storage.is_freed_before_peak

    def _frees(self, tensor: TrackedTensor) -> list[tuple[Strategy, PhaseName | None]]:
        """By strategy: when the tensor was freed."""
        return [(strategy, run.tensors[tensor.first].storage.freed) for strategy, run in self._passes.items()]

    def records(self, offered: Sequence[Collection[str]]) -> tuple[SharedTensor, ...]:
        """`offered`: by call, the strategies that a plan may choose."""
        found = [self._record(tensor, offered) for tensor in self._tensors.values() if tensor.first[1] != "saved"]
        found += self._unused_graphs(len(offered))
        # A tensor that lives from the beginning to the end needs no record.
        needed = [record for record in found if record.allocated_in >= 0 or record.freed_in >= 0]
        return tuple(sorted(needed, key=lambda r: (r.call, r.role, r.number)))

    def _record(self, tensor: TrackedTensor, offered: Sequence[Collection[str]]) -> SharedTensor:
        call, role, number = tensor.first
        # The output of a skipped layer may have another size than the real one.
        measured = self._tensors.get((self._representative(call), role, number), tensor) if role == "output" else tensor
        freed_in = self._freed_in(tensor, len(offered))
        record = SharedTensor(
            call=call,
            role=role,
            number=number,
            num_bytes=measured.storage.num_bytes,
            allocated_in=tensor.storage.allocated_in,
            freed_in=freed_in,
        )
        if freed_in < 0:
            return record
        held, sent = dict(self._other_holders.get(tensor.first, {})), {}
        early = {
            v: under
            for v, under in held.items()
            if all(
                self._is_freed_before_peak(tensor, s) for s, freed in self._frees(tensor) if freed == ("backward", v)
            )
        }
        for use in tensor.uses:
            own = [s for s in self._passes if s in offered[use[0]]]
            if under := tuple(s for s in own if self._source(use) in self._held[s]):
                held[use[0]] = under
            if under := tuple(s for s in own if self._source(use) in self._freed_early[s]):
                early[use[0]] = under
            if under := tuple(s for s in own if self._source(use) in self._passes[s].sent):
                sent[use[0]] = under
        held_by, freed_early_in, sent_by = (tuple(sorted(holders.items())) for holders in (held, early, sent))
        return replace(record, held_by=held_by, freed_early_in=freed_early_in, sent_by=sent_by)

    def _freed_in(self, tensor: TrackedTensor, num_calls: int) -> int:
        """The call whose forward begins without the tensor if nothing holds or sends it. -1: none."""
        frees = [freed for _, freed in self._frees(tensor)]
        if None in frees:
            return -1
        in_forward = [freed[1] for freed in frees if freed is not None and freed[0] == "forward"]
        if in_forward:
            in_forward += [self._freed_by_graph(use, num_calls) for use in tensor.uses]
        released = [min(freed[1] + 2, num_calls) for freed in frees if freed is not None and freed[0] == "release"]
        return max(in_forward) if in_forward else min(released, default=num_calls)

    def _freed_by_graph(self, use: Use, num_calls: int) -> int:
        """The call in whose forward the graph of a skipped call without backward frees this argument. -1: none does."""
        source = self._source(use)
        if source == use or source not in self._passes["keep"].held or source not in self._by_use:
            return -1
        storage = self._by_use[source].storage
        if storage.freed is None or storage.freed[0] != "forward":
            return -1
        # No phase was measured with it: it counts as freed after the peak of that forward.
        freed_in = storage.freed[1] + (not storage.is_freed_after_peak)
        return min(freed_in + self._shift(use[0]), num_calls)

    def _shift(self, call: int) -> int:
        """So many calls later than that of its representative the graph of this call is freed. 0 if it is freed with
        those of other calls: a pass over several layers whose outputs are detached.
        """
        source = self._representative(call)
        others = [v for v in self._measured.get(self._keys.get(call), ()) if v < source]
        if others and self._frees_of_graph(others[-1]) == self._frees_of_graph(source):
            return 0
        return call - source

    def _frees_of_graph(self, call: int) -> dict[int, int]:
        """Bytes that the graph of a call without a backward saved, by the call in whose forward they were freed."""
        found: dict[int, int] = {}
        for tensor in self._tensors.values():
            freed = tensor.storage.freed
            if tensor.first[:2] == (call, "saved") and freed is not None:
                found[freed[1]] = found.get(freed[1], 0) + tensor.storage.num_bytes
        return found

    def _unused_graphs(self, num_calls: int) -> Iterator[SharedTensor]:
        """Tensors that graphs of layers saved and nothing used, by the forward in which they were freed."""
        for call in range(num_calls):
            frees = self._frees_of_graph(self._representative(call))
            for number, (freed_in, num_bytes) in enumerate(sorted(frees.items())):
                yield SharedTensor(
                    call=call,
                    role="saved",
                    number=number,
                    num_bytes=num_bytes,
                    allocated_in=call,
                    freed_in=min(freed_in + self._shift(call), num_calls),
                    only_under=("keep",),
                )
