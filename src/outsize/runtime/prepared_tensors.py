"""PreparedPart and PreparedTensor: classes whose `__torch_function__` redirects operators to a parameter's home.

[Note: Parameters between passes] A slot holds a streamed chunk only while a block that uses it runs. Between passes the
memory behind a streamed parameter belongs to another chunk, and the host may still be updating weights. So between
passes every trainable or streamed parameter has the class `PreparedParameter`. Its `__torch_function__` sees every use
of the parameter from Python: it waits for updates in flight and runs the operator on a tensor over the parameter's home
instead. On CUDA that tensor maps the pinned home into the GPU's address space, so nothing is copied and writes reach
the home. In a pass the class is `nn.Parameter` again. In the steady state this costs two class assignments per
parameter and pass: with the check for exchanged parameters 0.48 ms a step for the 146 parameters of a 1B model (H200,
benchmarks/results/between-steps-h200-2026-11-16.md). Tensors that quantization attaches to a parameter (scales) have
the class `PreparedPart`, in the same way. A tensor subclass that consists of other tensors (torchao) is over the homes
of its inner tensors.

`p.data`, `p.detach()` and views of them are `PreparedTensor`s: tensors over the same memory that synchronize in the
same way and record writes. `p.grad` is a `PreparedTensor` over the gradient that waits for `step()`.
"""

import copy
import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from outsize.base.errors import READS_OUTSIDE_FORWARD, EngineMisuse, ModelUnsupported, StaleParameter
from outsize.compat import is_traceable_wrapper_subclass, with_torch_function, without_torch_function
from outsize.runtime import tensor_functions as functions

T = TypeVar("T")


class ParameterOwner(Protocol):
    """The part of an engine that a prepared parameter uses. `name`: the parameter's name."""

    def open(self, handle: "Handle") -> None:
        """Wait until the memory of a handle can be read. Raises StaleParameter if it is no longer the parameter's."""

    def weight(self, name: str) -> Tensor:
        """The memory that holds the value, as a tensor on the device, after all updates in flight."""

    def loaded_weight(self, name: str) -> Tensor | None:
        """The parameter's own memory on the device, if it holds the value now."""

    def gradient(self, name: str) -> "PreparedTensor | None": ...
    def set_gradient(self, name: str, value: Tensor | None) -> None: ...
    def replace_data(self, name: str, value: Tensor) -> None:
        """`p.data = value`."""

    def write(self, names: list[str], run: Callable[[], T]) -> T:
        """Run an operator that writes these weights."""

    def written(self, name: str) -> None:
        """Record that an operator of unknown effect has written this weight."""

    def hand_out(self, memory: Tensor, handle: "Handle") -> "PreparedTensor": ...
    def add_gradient_hook(self, name: str, register: Callable[[], Any]) -> Any: ...


_OWNERS: dict[int, tuple["weakref.ref[Tensor]", "weakref.ref[ParameterOwner]", str]] = {}
"""Parameters of prepared models, by id."""


def set_owner(param: Tensor, owner: ParameterOwner, name: str) -> None:
    _OWNERS[id(param)] = (weakref.ref(param), weakref.ref(owner), name)


def remove_owner(param: Tensor) -> None:
    _OWNERS.pop(id(param), None)


def owner_of(tensor: Tensor) -> tuple[ParameterOwner, str] | None:
    """The prepared model that a parameter belongs to, and the parameter's name there. None if there is none."""
    entry = _OWNERS.get(id(tensor))
    if entry is None or entry[0]() is not tensor or (owner := entry[1]()) is None:
        return None
    return owner, entry[2]


@dataclass(frozen=True, slots=True)
class Handle:
    """Identifies the memory of a prepared model that a tensor is over."""

    owner: "weakref.ref[ParameterOwner]"
    kind: Literal["weight", "gradient"]
    name: str
    generation: int = 0
    """For a gradient; see `Gradients.generation`."""

    def open(self) -> ParameterOwner:
        owner = self.owner()
        if owner is None:
            raise self.stale()
        owner.open(self)
        return owner

    def stale(self) -> StaleParameter:
        return StaleParameter(
            f"{self.name}: this tensor is over memory of an engine that was detached or has re-planned. Read the "
            "parameter again, or clone() a value that is kept."
        )


class PreparedPart(Tensor):
    """A parameter of a prepared model, or a tensor that quantization attaches to one (model/parts.py), while no pass
    runs. See [Note: Parameters between passes].
    """

    own_class: ClassVar[type[Tensor]] = Tensor
    """The class in passes."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = self._copied(memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._copied({}).__reduce_ex__(protocol)

    def _copied(self, memo: dict[int, Any]) -> Tensor:
        """A copy of the class that this tensor has in passes."""
        value = copy.deepcopy(plain(self))
        return nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value


class PreparedParameter(PreparedPart, nn.Parameter):
    """A PreparedPart whose class in passes is nn.Parameter, or a subclass of it."""

    own_class = nn.Parameter

    def _copied(self, memo: dict[int, Any]) -> Tensor:
        value = plain(self.data).clone()
        if self.own_class is nn.Parameter:
            return nn.Parameter(value, self.requires_grad)
        copied = value.as_subclass(self.own_class).requires_grad_(self.requires_grad)
        copied.__dict__.update(  # as of bitsandbytes' Params4bit, which knows its module
            {k: v if isinstance(v, nn.Module) else copy.deepcopy(v, memo) for k, v in vars(self).items()}
        )
        return copied


class PreparedTensor(Tensor):
    """A tensor over the memory of a prepared parameter or of its gradient."""

    handle: Handle

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _dispatch(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = memo[id(self)] = plain(self).clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).clone().__reduce_ex__(protocol)


_KNOWN_OPERATORS = {"Params4bit"}
"""Classes of bitsandbytes whose `__torch_function__` only passes attributes on to the results of `chunk` and `split`.
Between passes the results are plain tensors of packed bytes."""


@functools.cache
def prepared_class(own_class: type[Tensor]) -> type[PreparedPart]:
    """The class of a parameter or part between passes, by its class in passes."""
    if own_class in (Tensor, nn.Parameter):
        return PreparedPart if own_class is Tensor else PreparedParameter
    bases: tuple[type, ...] = (PreparedParameter, own_class)
    if hasattr(own_class, "__tensor_flatten__"):  # operators run on a tensor of this class over the homes of its parts
        bases = (PreparedPart, own_class)
    elif own_class.__name__ not in _KNOWN_OPERATORS and (
        own_class.__torch_function__ is not nn.Parameter.__torch_function__ or "__torch_dispatch__" in vars(own_class)
    ):
        raise ModelUnsupported(
            f"Parameters of class {own_class.__name__} define operators of their own, which a prepared parameter "
            "cannot keep. Prepare the model with plain nn.Parameters."
        )
    return type(f"Prepared{own_class.__name__}", bases, {"own_class": own_class})


def prepared(memory: Tensor, handle: Handle) -> PreparedTensor:
    """The same memory as a PreparedTensor, with the same autograd graph if it has one."""
    with without_torch_function():
        made = (memory if memory.requires_grad else memory.detach()).as_subclass(PreparedTensor)
    made.handle = handle
    return made


def plain(tensor: Tensor) -> Tensor:
    """The same memory as an ordinary tensor, after the updates in flight."""
    if isinstance(tensor, PreparedPart) and (owner := owner_of(tensor)) is not None:
        return owner[0].weight(owner[1])
    if isinstance(tensor, PreparedTensor):
        tensor.handle.open()
    with without_torch_function():
        return tensor.as_subclass(Tensor) if isinstance(tensor, (PreparedTensor, PreparedPart)) else tensor


class _OutsideForward(torch.autograd.Function):
    """A weight in an autograd graph that was built outside of the model's forward. Its backward raises."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, value: Tensor, name: str) -> Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise EngineMisuse(
            f"{ctx.name}: a loss that reads this weight outside of the model's forward was differentiated. "
            f"{READS_OUTSIDE_FORWARD}"
        )


@dataclass(frozen=True, slots=True)
class _Source:
    """A prepared tensor among the arguments of an operator."""

    original: Tensor
    memory: Tensor
    """The tensor that replaces it in the call: over the parameter's memory, perhaps with an autograd graph."""
    handle: Handle
    owner: ParameterOwner


def _source(tensor: Tensor, func: Any, *, is_target: bool) -> _Source | None:
    if isinstance(tensor, PreparedTensor):
        return _Source(tensor, tensor.as_subclass(Tensor), tensor.handle, tensor.handle.open())
    if (found := owner_of(tensor)) is None:
        return None
    owner, name = found
    handle = Handle(weakref.ref(owner), "weight", name)
    if func in functions.COMPUTES and not torch.is_grad_enabled() and (loaded := owner.loaded_weight(name)) is not None:
        return _Source(tensor, loaded, handle, owner)
    memory = owner.weight(name)
    # torch.nn.init turns grad off itself.
    records = torch.is_grad_enabled() and getattr(func, "__module__", None) != "torch.nn.init"
    if tensor.requires_grad and records and func != functions.DATA_GET and func != Tensor.detach:
        if is_target:
            raise RuntimeError(
                f"{name}: a leaf Variable that requires grad is being used in an in-place operation. Use "
                "torch.no_grad()."
            )
        memory = _OutsideForward.apply(tensor, memory, name)
    return _Source(tensor, memory, handle, owner)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator with the memory of prepared parameters in their place."""
    name = getattr(func, "__name__", "")
    first = args[0] if args else None
    with without_torch_function():
        if func in functions.METADATA:
            return func(*args, **kwargs)
        if isinstance(first, PreparedPart) and (found := owner_of(first)) is not None:
            owner, key = found
            if func == functions.GRAD_GET:
                return owner.gradient(key)
            if func == functions.GRAD_SET:
                return owner.set_gradient(key, args[1])
            if func == functions.GRAD_DELETE:
                return owner.set_gradient(key, None)
            if func == functions.DATA_SET:
                return owner.replace_data(key, args[1])
            if func == Tensor.register_post_accumulate_grad_hook:
                return owner.add_gradient_hook(key, lambda: func(*args, **kwargs))
        if isinstance(first, PreparedTensor):
            if func == functions.DATA_SET:  # `p.grad.data = ...` writes into the memory
                return _dispatch(Tensor.copy_, args, {})
            if func in (functions.GRAD_GET, functions.GRAD_SET, functions.GRAD_DELETE):
                return func(*args, **kwargs)  # the user has made a leaf of the tensor
        if func is torch.autograd.grad or func is torch.autograd.backward:
            raise EngineMisuse(
                f"torch.autograd.{name}: the gradients of prepared parameters are collected by the engine. Call "
                "loss.backward() and read p.grad."
            )
        if name in functions.REBINDS and isinstance(first, (PreparedTensor, PreparedPart)):
            raise EngineMisuse(f"{name}: a prepared parameter keeps its memory. Call engine.detach() first.")
        return _run(func, name, args, kwargs)


def _run(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = (args[0] if args else list(kwargs.values())) if functions.writes_first(func, name, kwargs) else None
    targets = {id(tensor) for tensor in functions.tensors_among((target, kwargs.get("out")))}
    sources: dict[int, _Source] = {}
    for tensor in functions.tensors_among((args, kwargs)):
        if (
            isinstance(tensor, (PreparedTensor, PreparedPart))
            and id(tensor) not in sources
            and (source := _source(tensor, func, is_target=id(tensor) in targets)) is not None
        ):
            sources[id(tensor)] = source
    memory = {key: source.memory for key, source in sources.items()}
    call = lambda: func(*functions.replaced(args, memory), **functions.replaced(kwargs, memory))
    if any(is_traceable_wrapper_subclass(tensor) for tensor in memory.values()):
        call = functools.partial(_with_own_operators, call)
    weights = {key: source for key, source in sources.items() if source.handle.kind == "weight"}
    written: dict[ParameterOwner, list[str]] = {}
    for key, source in weights.items():
        if key in targets:
            written.setdefault(source.owner, []).append(source.handle.name)
    for owner, names in written.items():
        call = functools.partial(owner.write, names, call)
    versions = {key: source.memory._version for key, source in weights.items() if key not in targets}
    result = call()
    for key, version in versions.items():
        if weights[key].memory._version != version:
            weights[key].owner.written(weights[key].handle.name)
    return _wrapped(result, list(sources.values()))


def _with_own_operators(call: Callable[[], T]) -> T:
    with with_torch_function():
        return call()


def _wrapped(result: Any, sources: list[_Source]) -> Any:
    """The result of an operator. If it is over the memory of a parameter, it becomes a PreparedTensor; an operator that
    returned its argument returns the user's own object.
    """
    if type(result) is tuple or type(result) is list:
        return type(result)(_wrapped(item, sources) for item in result)
    if isinstance(result, np.ndarray) and any(source.memory.device.type == "cpu" for source in sources):
        result.flags.writeable = False  # it may share the weight's memory, and writes into it could not be seen
    if type(result) is not Tensor or not sources:
        return result
    for source in sources:
        if result is source.memory:
            return source.original
    if not result.numel() or result.layout is not torch.strided:
        return result
    for source in sources:  # the memory of each source is a storage of its own, except of a wrapper, which has none
        memory = source.memory
        if is_traceable_wrapper_subclass(memory):
            continue
        if (
            result.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
            and result.device == memory.device
        ):
            hand_out = source.owner.hand_out if source.handle.kind == "weight" else prepared
            return hand_out(result, source.handle)
    return result
