"""Reads and writes of a prepared model's parameters while no forward or backward runs.

[Note: Parameters between passes] A slot holds a streamed chunk only while a block that uses it runs. Between passes the
memory behind a streamed parameter belongs to another chunk, and the host may still be updating weights. So between
passes every trainable or streamed parameter has the class `PreparedParameter`. Its `__torch_function__` sees every use
of the parameter from Python: it waits for updates in flight and runs the operator on a tensor over the parameter's home
instead. On CUDA that tensor maps the pinned home into the GPU's address space, so nothing is copied and writes reach
the home. In a pass the class is `nn.Parameter` again. In the steady state this costs two class assignments per
parameter and pass: with the check for exchanged parameters 0.48 ms a step for the 146 parameters of a 1B model (H200,
benchmarks/results/between-steps-h200-2026-11-16.md).

`p.data`, `p.detach()` and views of them are `PreparedTensor`s: tensors over the same memory that synchronize in the
same way and record writes. `p.grad` is a `PreparedTensor` over the gradient that waits for `step()`.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsize.base.errors import EngineMisuse, ModelUnsupported, StaleParameter
from outsize.compat import OpOverload, TensorBase, without_torch_function
from outsize.runtime.executor import Stage
from outsize.runtime.gradients import Gradients
from outsize.runtime.store import Store

T = TypeVar("T")


class ParameterAccess:
    """The parameters of one prepared model, as user code reaches them between passes."""

    def __init__(
        self,
        store: Store,
        gradients: Gradients,
        *,
        stage: Callable[[], Stage],
        drain: Callable[[], None],
        before_write: Callable[[], None],
        before_grad: Callable[[], None],
    ):
        """`drain` waits for all lanes, `before_write` for a background save. `before_grad` raises or applies what a
        read of `.grad` must see.
        """
        self._store, self.gradients = store, gradients
        self._stage, self._drain, self._before_write, self.before_grad = stage, drain, before_write, before_grad
        place = store.place
        moves = {
            piece.name
            for chunk in place.layout.chunks
            if place.is_updated(chunk.index) or place.has_host_weights(chunk.index)
            for piece in chunk.pieces
        }
        self._managed = [(p, type(p), prepared_class(type(p))) for name, p in store.params.items() if name in moves]
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
        """The plain tensor of each parameter in the last state dict, and its version: a write into it is found
        by that.
        """
        for name, param in store.params.items():
            _OWNERS[id(param)] = (weakref.ref(param), weakref.ref(self), name)

    # Called by the engine around passes.

    def begin_pass(self) -> None:
        """Make parameters plain ones. Waits for the user's own operators on their memory, if any."""
        self.apply_user_writes()
        for param, plain, _ in self._managed:
            param.__class__ = plain

    def end_pass(self) -> None:
        for param, _, prepared in self._managed:
            param.__class__ = prepared

    def apply_user_writes(self) -> None:
        """Wait for the user's operators and copy what they wrote to every copy of a weight. Runs before the engine
        reads or writes weights.
        """
        self._is_drained = False
        for name, (tensor, version) in self._exported.items():
            if tensor._version != version:
                self._exported[name] = (tensor, tensor._version)
                self._written_unseen(name)
        if self._touched:
            self._drain()
            for index in self._touched:
                self._store.refresh_copies(index)
            self._touched.clear()

    def release(self) -> None:
        self._exported.clear()
        for param, plain, _ in self._managed:
            param.__class__ = plain
        for param in self._store.params.values():
            _OWNERS.pop(id(param), None)

    # Called for the user.

    def synchronize(self) -> None:
        if not self._is_drained:
            self._drain()
            self._is_drained = self._stage() in (Stage.IDLE, Stage.WAITING)

    def weight(self, name: str) -> Tensor:
        """The memory that holds a parameter's value, as a tensor on the device."""
        self.synchronize()
        self._touched.add(self._store.place.layout.place[name][0])
        with torch.inference_mode(False):  # it may be written later
            return self._store.device_view(name)

    def loaded_weight(self, name: str) -> Tensor | None:
        """The parameter's own memory on the device if it holds the value now: the module is called by itself."""
        index, store = self._store.place.layout.place[name][0], self._store
        if index in self._touched or (
            store.place.streams(index) and store.slot_contents[store.place.slots.slot_of[index]] != index
        ):
            return None
        self.synchronize()
        return store.params[name].detach()

    def export(self, name: str) -> Tensor:
        """A plain tensor over the parameter's home, for state dicts."""
        made = self._store.read(name, owns=True)
        self._exported[name] = (made, made._version)
        return made

    def gradient(self, name: str) -> "PreparedTensor | None":
        self.before_grad()
        if not self.gradients.has(name):
            return None
        self.synchronize()
        with torch.inference_mode(False):
            memory = self.gradients.hand_out(name)
            return _hand_out(memory, _Handle(weakref.ref(self), "gradient", name, self.gradients.generation(name)))

    def set_gradient(self, name: str, value: Tensor | None) -> None:
        self.before_grad()
        self.synchronize()
        if value is None:
            self.gradients.remove(name)
        else:
            self.gradients.assign(
                name, _plain(value) if isinstance(value, (PreparedTensor, PreparedParameter)) else value
            )

    def write(self, names: list[str], run: Callable[[], T]) -> T:
        """Run an operator that writes these weights. A bf16 value that changes becomes its own master weight."""
        self._require_writable(names[0])
        self._before_write()
        split = [name for name in names if name in self._split]
        # One weight is compared on the device; many at once would take too much of its memory.
        value = self._store.device_view if len(split) == 1 else self._store.read
        before = {name: value(name).clone() for name in split}
        result = run()
        if before:
            self._drain()
        for name, old in before.items():
            changed = old != value(name)
            if bool(changed.any()):
                self._store.clear_remainders(name, changed)
        return result

    def _require_writable(self, name: str) -> None:
        if self._stage() is Stage.WAITING:
            raise EngineMisuse(
                f"{name}: it was written between a forward and its backward, which still needs the old value. "
                "Write weights after backward, or after step()."
            )

    def written(self, name: str) -> None:
        """An operator that is not known to write has written a weight: the whole weight becomes its own master."""
        self._require_writable(name)
        self._written_unseen(name)

    def _written_unseen(self, name: str) -> None:
        self._touched.add(self._store.place.layout.place[name][0])
        if name in self._split:
            self._drain()
            value = self._store.read(name)
            self._store.clear_remainders(name, torch.ones(value.shape, dtype=torch.bool, device=value.device))

    def hand_out(self, memory: Tensor, handle: "_Handle") -> "PreparedTensor":
        made = _hand_out(memory, handle)
        held = self._handed_out.setdefault(handle.name, [])
        held[:] = [ref for ref in held if ref() is not None]
        held.append(weakref.ref(made))
        return made

    def _give_own_memory(self, name: str) -> None:
        """Give tensors that were handed out a copy of the present value, as in torch when `p.data` is replaced."""
        held = [made for ref in self._handed_out.pop(name, []) if (made := ref()) is not None]
        if not held:
            return
        old = _flat(self._store.device_view(name)).clone()
        for made in held:
            own = old.as_strided(made.size(), made.stride(), made.storage_offset())
            plain: Any = made
            plain.__class__ = Tensor
            plain.data = own

    def replace_data(self, name: str, value: Tensor) -> None:
        """`p.data = value`: copies the value into the parameter's memory."""
        mine = self._store.params[name]
        if isinstance(value, PreparedTensor) and value._handle.kind == "weight" and value._handle.name == name:
            value._handle.open()
            if value.data_ptr() == self._store.device_view(name).data_ptr() and value.shape == mine.shape:
                return  # its own memory
        if isinstance(value, PreparedParameter) or (
            isinstance(value, PreparedTensor) and value._handle.kind == "weight"
        ):
            raise EngineMisuse(
                f"{name}.data: it was set to the memory of another prepared parameter. Copy the value "
                "(p.data.copy_(q.data)); to tie two parameters, do so before outsize.prepare. A wrapper that takes "
                "over a model's memory (FullyShardedDataParallel) cannot be used on a prepared model."
            )
        value = _plain(value)
        with without_torch_function():
            mine_is, theirs = (mine.shape, mine.dtype, mine.device), (value.shape, value.dtype, value.device)
        if mine_is[:2] != theirs[:2] or mine_is[2].type != theirs[2].type:
            raise EngineMisuse(
                f"{name}.data: a prepared parameter keeps its shape, dtype and device ({_show(*mine_is)}), but "
                f"{_show(*theirs)} was assigned. Call "
                "engine.detach(), change the model and prepare it again."
            )
        self._require_writable(name)
        self.synchronize()
        self._give_own_memory(name)
        self.write([name], lambda: self.weight(name).copy_(value))

    def add_gradient_hook(self, name: str, register: Callable[[], Any]) -> Any:
        return self.gradients.hook_before_ours(name, register)


_OWNERS: dict[int, tuple["weakref.ref[nn.Parameter]", "weakref.ref[ParameterAccess]", str]] = {}
"""Parameters of prepared models, by id."""


def owner_of(tensor: Tensor) -> tuple[ParameterAccess, str] | None:
    """The prepared model that a parameter belongs to, and the parameter's name there. None if there is none."""
    entry = _OWNERS.get(id(tensor))
    if entry is None or entry[0]() is not tensor or (access := entry[1]()) is None:
        return None
    return access, entry[2]


@dataclass(frozen=True, slots=True)
class _Handle:
    """Whose memory a handed-out tensor is over."""

    access: "weakref.ref[ParameterAccess]"
    kind: Literal["weight", "gradient"]
    name: str
    generation: int = 0

    def open(self) -> ParameterAccess:
        """Wait until the memory can be read. Raises if it is no longer the parameter's."""
        access = self.access()
        owner = owner_of(access._store.params[self.name]) if access is not None else None
        if access is None or owner is None or owner[0] is not access:
            raise StaleParameter(
                f"{self.name}: this tensor is over memory of an engine that was detached or has re-planned. Read the "
                "parameter again, or clone() a value that is kept."
            )
        if self.kind == "gradient":
            if access.gradients.generation(self.name) != self.generation or not access.gradients.has(self.name):
                raise StaleParameter(
                    f"{self.name}.grad: this gradient was cleared by zero_grad() or used up by an update. clone() it "
                    "to keep it."
                )
            access.before_grad()
        access.synchronize()
        if self.kind == "weight":
            access._touched.add(access._store.place.layout.place[self.name][0])
        return access


class _OutsideForward(torch.autograd.Function):
    """A weight in an autograd graph that was built outside of the model's forward. Its backward raises."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, value: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise EngineMisuse(
            f"{ctx.name}: a loss that reads this weight outside of the model's forward was differentiated. Compute "
            "that part of the loss inside the forward of the prepared model; for an L2 penalty use weight_decay; for "
            "logging use torch.no_grad()."
        )


def _descriptors(*names: str) -> set[Any]:
    return {descriptor.__get__ for name in names if (descriptor := getattr(Tensor, name, None)) is not None}


_METADATA: set[Any] = {
    *_descriptors(
        "shape",
        "dtype",
        "device",
        "layout",
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "ndim",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "is_mps",
        "is_xpu",
        "is_mkldnn",
        "nbytes",
        "itemsize",
        "names",
        "name",
        "output_nr",
        "retains_grad",
        "_version",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
        "_base",
        "_grad_fn",
    ),
    vars(TensorBase)["requires_grad"].__set__,
    Tensor.requires_grad_,
    Tensor.size,
    Tensor.dim,
    Tensor.ndimension,
    Tensor.numel,
    Tensor.nelement,
    Tensor.element_size,
    Tensor.stride,
    Tensor.is_contiguous,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.is_signed,
    Tensor.get_device,
    Tensor.register_hook,
    Tensor.is_inference,
    Tensor.__len__,
    Tensor.detach_,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
}
"""Functions that do not access a parameter's memory."""
_REBINDS = {"set_", "resize_", "resize_as_", "share_memory_", "swap_tensors"}
_data: Any = Tensor.data
_grad: Any = Tensor.grad
_DATA_GET, _DATA_SET = _data.__get__, _data.__set__
_GRAD_GET, _GRAD_SET, _GRAD_DELETE = _grad.__get__, _grad.__set__, _grad.__delete__
_COMPUTES = {F.linear, F.embedding, F.conv1d, F.conv2d, F.conv3d, F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm}
"""Operators of modules on their weights whose results are not views of them."""
_INPLACE_DUNDERS = {
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor", "lshift", "rshift")
}


class PreparedParameter(nn.Parameter):
    """A parameter of a prepared model while no pass runs. See [Note: Parameters between passes]."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copied = memo[id(self)] = nn.Parameter(_plain(self.data).clone(), self.requires_grad)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(_plain(self.data).clone(), self.requires_grad).__reduce_ex__(protocol)


class PreparedTensor(Tensor):
    """A tensor over the memory of a prepared parameter or of its gradient."""

    _handle: _Handle

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = _plain(self).clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).clone().__reduce_ex__(protocol)


@functools.cache
def prepared_class(plain: type[nn.Parameter]) -> type[nn.Parameter]:
    """The class of a parameter between passes, by its own class."""
    if plain is nn.Parameter:
        return PreparedParameter
    if plain.__torch_function__ is not nn.Parameter.__torch_function__ or "__torch_dispatch__" in vars(plain):
        raise ModelUnsupported(
            f"parameters of class {plain.__name__} define operators of their own, which a prepared parameter cannot "
            "keep. Prepare the model with plain nn.Parameters."
        )
    return type(f"Prepared{plain.__name__}", (PreparedParameter, plain), {})


def _hand_out(memory: Tensor, handle: _Handle) -> PreparedTensor:
    """The same memory, and the same autograd graph if it has one."""
    with without_torch_function():
        made = (memory if memory.requires_grad else memory.detach()).as_subclass(PreparedTensor)
    made._handle = handle
    return made


def _flat(tensor: Tensor) -> Tensor:
    """The whole storage of a tensor that owns its storage."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)


def _plain(tensor: Tensor) -> Tensor:
    """The same memory as an ordinary tensor, synchronized."""
    if isinstance(tensor, PreparedParameter):
        owner = owner_of(tensor)
        if owner is not None:
            return owner[0].weight(owner[1])
    if isinstance(tensor, PreparedTensor):
        tensor._handle.open()
    with without_torch_function():
        return tensor.as_subclass(Tensor) if isinstance(tensor, (PreparedTensor, PreparedParameter)) else tensor


@dataclass(frozen=True, slots=True)
class _Source:
    original: Tensor
    memory: Tensor
    """Its replacement in the call: over the parameter's memory, perhaps with an autograd graph."""
    handle: _Handle
    access: ParameterAccess


def _source(tensor: Tensor, func: Any, *, is_target: bool) -> _Source | None:
    if isinstance(tensor, PreparedTensor):
        access = tensor._handle.open()
        return _Source(tensor, tensor.as_subclass(Tensor), tensor._handle, access)
    if (owner := owner_of(tensor)) is None:
        return None
    access, name = owner
    if func in _COMPUTES and not torch.is_grad_enabled() and (loaded := access.loaded_weight(name)) is not None:
        return _Source(tensor, loaded, _Handle(weakref.ref(access), "weight", name), access)
    memory = access.weight(name)
    # torch.nn.init turns grad off itself.
    records = torch.is_grad_enabled() and getattr(func, "__module__", None) != "torch.nn.init"
    if tensor.requires_grad and records and func != _DATA_GET and func != Tensor.detach:
        if is_target:
            raise RuntimeError(
                f"{name}: a leaf Variable that requires grad is being used in an in-place operation. Use "
                "torch.no_grad()."
            )
        memory = _OutsideForward.apply(tensor, memory, name)
    return _Source(tensor, memory, _Handle(weakref.ref(access), "weight", name), access)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with the memory of prepared parameters in their place."""
    name = getattr(func, "__name__", "")
    first = args[0] if args else None
    with without_torch_function():
        if func in _METADATA:
            return func(*args, **kwargs)
        owner = owner_of(first) if isinstance(first, PreparedParameter) else None
        if owner is not None:
            access, key = owner
            if func == _GRAD_GET:
                return access.gradient(key)
            if func == _GRAD_SET:
                return access.set_gradient(key, args[1])
            if func == _GRAD_DELETE:
                return access.set_gradient(key, None)
            if func == _DATA_SET:
                return access.replace_data(key, args[1])
            if func == Tensor.register_post_accumulate_grad_hook:
                return access.add_gradient_hook(key, lambda: func(*args, **kwargs))
        if func == _DATA_SET and isinstance(first, PreparedTensor):  # `p.grad.data = ...` writes into the memory
            return _dispatch(Tensor.copy_, args, {})
        if isinstance(first, PreparedTensor) and func in (_GRAD_GET, _GRAD_SET, _GRAD_DELETE):
            return func(*args, **kwargs)  # of a leaf that the user made of it
        if func is torch.autograd.grad or func is torch.autograd.backward:
            raise EngineMisuse(
                f"torch.autograd.{name}: the gradients of prepared parameters are collected by the engine. Call "
                "loss.backward() and read p.grad."
            )
        writes = _writes(func, name, kwargs)
        targets = {
            id(t) for t in _tensors(((first if args else list(kwargs.values())) if writes else None, kwargs.get("out")))
        }
        if name in _REBINDS and isinstance(first, (PreparedTensor, PreparedParameter)):
            raise EngineMisuse(f"{name}: a prepared parameter keeps its memory. Call engine.detach() first.")
        sources: dict[int, _Source] = {}
        for tensor in _tensors((args, kwargs)):
            if not isinstance(tensor, (PreparedTensor, PreparedParameter)) or id(tensor) in sources:
                continue
            if (found := _source(tensor, func, is_target=id(tensor) in targets)) is not None:
                sources[id(tensor)] = found
        call = lambda: func(*_replaced(args, sources), **_replaced(kwargs, sources))
        for access, names in _written(sources, targets).items():
            call = _writing(access, names, call)
        versions = {number: source.memory._version for number, source in sources.items()}
        result = call()
        for number, source in sources.items():
            if source.handle.kind == "weight" and number not in targets and source.memory._version != versions[number]:
                source.access.written(source.handle.name)
        return _wrapped(result, list(sources.values()))


def _writes(func: Any, name: str, kwargs: dict[str, Any]) -> bool:
    """Whether an operator is known to write its first argument. Other writes are found by the tensor's version."""
    if isinstance(func, OpOverload):
        return func._schema.is_mutable
    return (
        name == "__setitem__"
        or name in _INPLACE_DUNDERS
        or (name.endswith("_") and not name.endswith("__"))
        or kwargs.get("inplace") is True
    )


def _written(sources: dict[int, _Source], targets: set[int]) -> dict[ParameterAccess, list[str]]:
    found: dict[ParameterAccess, list[str]] = {}
    for key, source in sources.items():
        if key in targets and source.handle.kind == "weight":
            found.setdefault(source.access, []).append(source.handle.name)
    return found


def _writing(access: ParameterAccess, names: list[str], call: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: access.write(names, call)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _replaced(value: Any, sources: dict[int, _Source]) -> Any:
    if isinstance(value, Tensor):
        return sources[id(value)].memory if id(value) in sources else value
    if isinstance(value, (list, tuple)):
        items = [_replaced(item, sources) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a named tuple, or torch.Size
    if isinstance(value, dict):
        return {key: _replaced(item, sources) for key, item in value.items()}
    return value


def _wrapped(result: Any, sources: list[_Source]) -> Any:
    """Results over the memory of a parameter stay connected to it; an operator that returned its argument returns the
    user's own object.
    """
    if type(result) is tuple or type(result) is list:
        return type(result)(_wrapped(item, sources) for item in result)
    if isinstance(result, np.ndarray) and any(source.memory.device.type == "cpu" for source in sources):
        result.flags.writeable = False  # a write into it could not be seen; it may share the weight's memory
    if type(result) is not Tensor or not sources:
        return result
    for source in sources:
        if result is source.memory:
            return source.original
    if not result.numel() or result.layout is not torch.strided:
        return result
    for source in sources:  # what is handed out owns its storage
        if (
            result.untyped_storage().data_ptr() == source.memory.untyped_storage().data_ptr()
            and result.device == source.memory.device
        ):
            return (
                source.access.hand_out(result, source.handle)
                if source.handle.kind == "weight"
                else _hand_out(result, source.handle)
            )
    return result


def _show(shape: Any, dtype: Any, device: Any) -> str:
    return f"{tuple(shape)} {dtype} on {device}"
