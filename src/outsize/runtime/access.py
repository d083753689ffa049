"""ParameterAccess: the engine's side of parameters that user code reads and writes between passes.

The classes that redirect operators to it are in prepared_tensors.py: see [Note: Parameters between passes] there.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from outsize.base.errors import EngineMisuse, StaleParameter
from outsize.compat import without_torch_function
from outsize.model.parts import rewrapped
from outsize.runtime.gradients import Gradients
from outsize.runtime.prepared_tensors import (
    Handle,
    PreparedPart,
    PreparedTensor,
    T,
    owner_of,
    plain,
    prepared,
    prepared_class,
    remove_owner,
    set_owner,
)
from outsize.runtime.state import EngineState
from outsize.runtime.store import Store


class ParameterAccess:
    """The parameters of one prepared model, as user code reaches them between passes."""

    def __init__(
        self,
        store: Store,
        gradients: Gradients,
        *,
        pass_state: Callable[[], EngineState],
        drain: Callable[[], None],
        before_write: Callable[[], None],
        before_grad: Callable[[], None],
    ):
        """`drain` waits for all lanes, `before_write` for a background save. `before_grad` raises or applies what a
        read of `.grad` must see.
        """
        self._store, self.gradients = store, gradients
        self._pass_state, self._drain = pass_state, drain
        self._before_write, self.before_grad = before_write, before_grad
        self._wrappers = store.wrappers
        place = store.place
        moves = {
            piece.name
            for chunk in place.layout.chunks
            if place.is_updated(chunk.index) or place.has_host_weights(chunk.index)
            for piece in chunk.pieces
        }
        managed = [param for name, param in store.params.items() if name in moves]
        managed += [wrapper for wrapper, parts in self._wrappers.values() if not moves.isdisjoint(parts)]
        self._managed = [(param, type(param), prepared_class(type(param))) for param in managed]
        """Parameters with their two classes: in a pass, and between passes."""
        self._split = {
            piece.name
            for chunk in place.layout.chunks
            if place.has_split_masters(chunk.index)
            for piece in chunk.pieces
        }
        self._is_drained = False
        self._touched: set[int] = set()
        """Chunks whose memory was handed out since the last pass."""
        self._handed_out: dict[str, list[weakref.ref[PreparedTensor]]] = {}
        """Tensors over weights that users may hold, by parameter."""
        self._exported: dict[str, tuple[Tensor, int]] = {}
        """The plain tensor of each parameter in the last state dict, with its version, which shows writes."""
        for name, param in self._owned():
            set_owner(param, self, name)

    def _owned(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._store.params.items()
        yield from ((name, wrapper) for name, (wrapper, _) in self._wrappers.items())

    # Called by the engine around passes.

    def begin_pass(self) -> None:
        """Give parameters their own class. Waits for the user's operators on their memory, if any."""
        self.apply_user_writes()
        for param, own_class, _ in self._managed:
            param.__class__ = own_class

    def end_pass(self) -> None:
        for param, _, between_passes in self._managed:
            param.__class__ = between_passes

    def apply_user_writes(self) -> None:
        """Wait for the user's operators, and apply their writes to every copy of a weight. Runs before the engine reads
        or writes weights.
        """
        self._is_drained = False
        for name, (tensor, version) in self._exported.items():
            if tensor._version != version:
                self._written_unseen(name)
                self._exported[name] = (tensor, tensor._version)
        if self._touched:
            self._drain()
            for index in self._touched:
                self._store.refresh_copies(index)
            self._touched.clear()

    def release(self) -> None:
        self._exported.clear()
        for param, own_class, _ in self._managed:
            param.__class__ = own_class
        for _, param in self._owned():
            remove_owner(param)

    # Called for the user.

    def synchronize(self) -> None:
        if not self._is_drained:
            self._drain()
            self._is_drained = self._pass_state() in (EngineState.IDLE, EngineState.HELD)

    def open(self, handle: Handle) -> None:
        name, found = handle.name, owner_of(self._store.params[handle.name])
        if found is None or found[0] is not self:
            raise handle.stale()
        if handle.kind == "gradient":
            if self.gradients.generation(name) != handle.generation or not self.gradients.has(name):
                raise StaleParameter(
                    f"{name}.grad: this gradient was cleared by zero_grad() or used up by an update. clone() it to "
                    "keep it."
                )
            self.before_grad()
        self.synchronize()
        if handle.kind == "weight":
            self._touched.add(self._chunk_of(name))

    def _chunk_of(self, name: str) -> int:
        return self._store.place.layout.location[name][0]

    def weight(self, name: str) -> Tensor:
        """The memory that holds a parameter's value, as a tensor on the device."""
        if name in self._wrappers:
            return rewrapped(self._wrappers[name][0], self._weight_of)
        self.synchronize()
        self._touched.add(self._chunk_of(name))
        with torch.inference_mode(False):  # it may be written later
            return self._store.value(name, on_device=True)

    def _weight_of(self, part: Tensor) -> Tensor:
        found = owner_of(part)
        assert found is not None
        return self.weight(found[1])

    def loaded_weight(self, name: str) -> Tensor | None:
        """The parameter's own memory on the device, if it holds the value now. For modules called by themselves."""
        if name in self._wrappers:
            return None
        index, store = self._chunk_of(name), self._store
        if index in self._touched or (
            store.place.streams(index) and store.slot_contents[store.place.slots.slot_of[index]] != index
        ):
            return None
        self.synchronize()
        return store.params[name].detach()

    def export(self, name: str) -> Tensor:
        """A plain tensor over the parameter's home, for state dicts."""
        made = self._store.value(name)
        self._exported[name] = (made, made._version)
        return made

    def gradient(self, name: str) -> PreparedTensor | None:
        self._require_own_gradient(name)
        self.before_grad()
        if not self.gradients.has(name):
            return None
        self.synchronize()
        with torch.inference_mode(False):
            memory = self.gradients.hand_out(name)
            return prepared(memory, Handle(weakref.ref(self), "gradient", name, self.gradients.generation(name)))

    def _require_own_gradient(self, name: str) -> None:
        if not self.gradients.has_own_shape(name):
            raise EngineMisuse(
                f"{name}.grad: this weight is trained in coordinates, and the gradient that is kept is theirs. Clip "
                "with engine.clip_grad_norm_(...) or max_grad_norm; a tensor hook on the parameter sees the gradient "
                "of the weight."
            )

    def set_gradient(self, name: str, value: Tensor | None) -> None:
        if value is not None:
            self._require_own_gradient(name)
        self.before_grad()
        self.synchronize()
        if value is None:
            self.gradients.remove(name)
        else:
            self.gradients.assign(name, plain(value))

    def write(self, names: list[str], run: Callable[[], T]) -> T:
        """Run an operator that writes these weights. A bf16 value that changes becomes its own master weight."""
        self._require_writable(names[0])
        self._before_write()
        split = [name for name in names if name in self._split]
        # One weight is compared on the device; many at once would take too much of its memory.
        value = functools.partial(self._store.value, on_device=len(split) == 1)
        before = {name: value(name).clone() for name in split}
        result = run()
        if before:
            self._drain()
        for name, old in before.items():
            changed = old != value(name)
            if bool(changed.any()):
                self._store.clear_lower_halves(name, changed)
        return result

    def _require_plain(self, name: str) -> None:
        if name in self._wrappers:
            raise EngineMisuse(
                f"{name}: a quantized weight that consists of several tensors was written, and only these can be "
                "written. Call engine.detach(), change the weight and prepare the model again."
            )

    def _require_writable(self, name: str) -> None:
        self._require_plain(name)
        self._store.require_elementwise(name)
        if self._pass_state() is EngineState.HELD:
            raise EngineMisuse(
                f"{name}: it was written between a forward and its backward, which still needs the old value. "
                "Write weights after backward, or after step()."
            )

    def written(self, name: str) -> None:
        """Record that an operator of unknown effect has written a weight: the whole weight becomes its own master."""
        self._require_writable(name)
        self._written_unseen(name)

    def _written_unseen(self, name: str) -> None:
        self._store.require_elementwise(name)
        self._touched.add(self._chunk_of(name))
        if name in self._split:
            self._drain()
            self._store.clear_lower_halves(name)

    def hand_out(self, memory: Tensor, handle: Handle) -> PreparedTensor:
        made = prepared(memory, handle)
        held = self._handed_out.setdefault(handle.name, [])
        held[:] = [ref for ref in held if ref() is not None]
        held.append(weakref.ref(made))
        return made

    def _give_own_memory(self, name: str) -> None:
        """Give tensors that were handed out a copy of the present value, as in torch when `p.data` is replaced."""
        held = [made for ref in self._handed_out.pop(name, []) if (made := ref()) is not None]
        if not held:
            return
        old = _flat(self._store.value(name, on_device=True)).clone()
        for made in held:
            own = old.as_strided(made.size(), made.stride(), made.storage_offset())
            tensor: Any = made
            tensor.__class__ = Tensor
            tensor.data = own

    def replace_data(self, name: str, value: Tensor) -> None:
        """`p.data = value`: copies the value into the parameter's memory."""
        self._require_plain(name)
        mine = self._store.params[name]
        is_weight = isinstance(value, PreparedTensor) and value.handle.kind == "weight"
        if isinstance(value, PreparedTensor) and is_weight and value.handle.name == name:
            value.handle.open()
            if value.data_ptr() == self._store.value(name, on_device=True).data_ptr() and value.shape == mine.shape:
                return  # its own memory
        if is_weight or isinstance(value, PreparedPart):
            raise EngineMisuse(
                f"{name}.data: it was set to the memory of another prepared parameter. Copy the value "
                "(p.data.copy_(q.data)); to tie two parameters, do so before outsize.prepare. A wrapper that takes "
                "over a model's memory (FullyShardedDataParallel) cannot be used on a prepared model."
            )
        value = plain(value)
        with without_torch_function():
            mine_is, theirs = (mine.shape, mine.dtype, mine.device), (value.shape, value.dtype, value.device)
        if mine_is[:2] != theirs[:2] or mine_is[2].type != theirs[2].type:
            raise EngineMisuse(
                f"{name}.data: a prepared parameter keeps its shape, dtype and device ({_show(*mine_is)}), but "
                f"{_show(*theirs)} was assigned. Call engine.detach(), change the model and prepare it again."
            )
        self._require_writable(name)
        self.synchronize()
        self._give_own_memory(name)
        self.write([name], lambda: self.weight(name).copy_(value))

    def add_gradient_hook(self, name: str, register: Callable[[], Any]) -> Any:
        return self.gradients.hook_before_ours(name, register)


def _flat(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor that owns its storage."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def _show(shape: Any, dtype: Any, device: Any) -> str:
    return f"{tuple(shape)} {dtype} on {device}"
