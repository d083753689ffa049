"""Attention computed once: a recomputed layer does not run its attention kernels again.

A dispatch mode below autograd takes the outputs of attention operators in forward (the result and the log-sum-exp). In
the recomputation another mode returns them. Autograd makes its node for the operator and saves them, but the kernel
does not run. The modes are active only while a module runs that calls attention itself: around a whole layer they would
make its Python much slower. The first forward of a layer finds these modules.

An operator that draws random numbers (dropout) or writes to an argument runs again, as does one that is not known here.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from outsize.compat import TorchDispatchMode, is_traceable_wrapper_subclass
from outsize.transfer.offloaded_tensors import OffloadedTensors, PackedTensor
from outsize.transfer.transfer_queue import Transfer

Offloaded = OffloadedTensors | Transfer
"""Collects the tensors of a layer that are copied to the host: by a plan, or by a TransferQueue."""

_OPERATORS = {
    *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    *("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
    *("aten::_scaled_dot_product_fused_attention_overrideable", "aten::_flash_attention_forward"),
    *("aten::_efficient_attention_forward", "aten::_cudnn_attention_forward"),
    *("torch_attn::_varlen_attn", "outsize::packed_attention"),
}
_FLASH_ATTN = {"_flash_attn_forward", "_flash_attn_varlen_forward", "fwd", "varlen_fwd"}
"""Operators of the package flash-attn, in its namespaces: flash_attn, flash_attn_3, and those of kernels from the hub.
"""

_modules: "WeakKeyDictionary[nn.Module, tuple[str, ...]]" = WeakKeyDictionary()
"""By layer: the names of its modules that call attention. A layer is missing until its first forward."""


def saves_attention(layer: nn.Module) -> bool:
    """Whether the layer calls attention operators whose outputs can be saved. False before its first forward."""
    return bool(_modules.get(layer))


def with_attention_once(
    forward: Callable[[], Any], layer: nn.Module, offloaded: Offloaded | None = None
) -> Callable[[], Any]:
    """A function that runs `forward`, a call of `layer`, with its attention operators run in the first call only.

    Later calls are recomputations in backward. The outputs stay on the device, or are packed into `offloaded`. Each is
    returned once, so that autograd decides when it is freed: in a second backward over one graph the operators run.
    """
    outputs = _AttentionOutputs(offloaded)
    within: list[tuple[str, ...]] = []

    def run() -> Any:
        if within:
            outputs.position = 0
            with _active_in(layer, within[0], _Returning(outputs)):
                return forward()
        mode = _Recording(outputs.add)
        within.append(_modules.get(layer) or ())
        if layer in _modules:
            with _active_in(layer, within[0], mode):
                return forward()
        with find_attention(layer, outputs.add):
            result = forward()
        within[0] = _modules[layer]
        return result

    return run


@contextmanager
def find_attention(
    layer: nn.Module,
    add: Callable[[Any, Any], None] = lambda func, out: None,
    note: Callable[[Any, Any, Any], None] = lambda func, args, kwargs: None,
) -> Iterator[None]:
    """For the first forward of a layer: find its modules that call attention whose outputs can be saved. `add` receives
    these operators and their outputs, `note` every attention operator with its arguments.
    """
    running: list[str] = []
    found: dict[str, None] = {}

    def recorded(func: Any, out: Any) -> None:
        found[running[-1] if running else ""] = None
        add(func, out)

    def noting(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def around(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                running.append(name)
                try:
                    return forward(*args, **kwargs)
                finally:
                    running.pop()

            return run

        return around

    # A linear layer calls no attention. Fused LoRA layers take one with a forward of its own for another library's.
    inner = [(name, module) for name, module in layer.named_modules() if name and not isinstance(module, nn.Linear)]
    with _replaced_forwards((module, noting(name)) for name, module in inner), _Recording(recorded, note):
        yield
    _modules[layer] = tuple(found)


@contextmanager
def timed_attention(layer: nn.Module, mark: Callable[[], Any]) -> Iterator[list[tuple[Any, Any]]]:
    """For a forward of the layer: the marks before and after every operator whose outputs can be saved."""
    marks: list[tuple[Any, Any]] = []
    with _active_in(layer, _modules.get(layer) or (), _Timing(mark, marks)):
        yield marks


@contextmanager
def _active_in(layer: nn.Module, names: tuple[str, ...], mode: "_Mode") -> Iterator[None]:
    """The mode is active while these modules of the layer run. "": the layer itself."""
    if "" in names:
        with mode:
            yield
        return

    def around(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if mode.is_active:
                return forward(*args, **kwargs)
            mode.is_active = True
            try:
                with mode:
                    return forward(*args, **kwargs)
            finally:
                mode.is_active = False

        return run

    with _replaced_forwards((layer.get_submodule(name), around) for name in names):
        yield


@contextmanager
def _replaced_forwards(wrapped: Iterable[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Each module runs the function that its wrapper makes of its forward."""
    before: list[tuple[dict[str, Any], Any]] = []
    try:
        for module, around in wrapped:
            attributes, forward = module.__dict__, module.forward
            before.append((attributes, attributes.get("forward")))
            attributes["forward"] = around(forward)
        yield
    finally:
        for attributes, own in reversed(before):
            if own is None:
                del attributes["forward"]
            else:
                attributes["forward"] = own


class _AttentionOutputs:
    """What the attention operators of one layer call returned, in order."""

    def __init__(self, offloaded: Offloaded | None):
        self._offloaded = offloaded
        self._outputs: list[tuple[Any, Any] | None] = []
        self.position = 0
        """Of the next operator in a recomputation."""

    def add(self, func: Any, out: Any) -> None:
        device = (out if isinstance(out, Tensor) else out[0]).device
        self._outputs.append((func, _map(lambda tensor: self._keep(tensor, device), out)))

    def take(self, func: Any) -> Any:
        """The outputs of the operator that runs now. None if they were not saved, or were returned before."""
        number, self.position = self.position, self.position + 1
        saved = self._outputs[number] if number < len(self._outputs) else None
        if saved is None or saved[0] is not func:
            return None
        self._outputs[number] = None
        return _map(self._return, saved[1])

    def _keep(self, tensor: Tensor, device: torch.device) -> Any:
        is_sent = tensor.numel() and tensor.device == device and not is_traceable_wrapper_subclass(tensor)
        if self._offloaded is not None and is_sent:
            return self._offloaded.pack(tensor)
        return tensor.detach()  # autograd makes `tensor` itself part of the graph, which would hold itself

    def _return(self, saved: Tensor | PackedTensor) -> Tensor:
        if not isinstance(saved, PackedTensor):
            return saved
        assert self._offloaded is not None
        return self._offloaded.unpack(saved)


def _map(function: Callable[[Any], Any], out: Any) -> Any:
    if isinstance(out, (tuple, list)):
        return type(out)(function(item) if isinstance(item, (Tensor, PackedTensor)) else item for item in out)
    return function(out)


class _Mode(TorchDispatchMode):
    is_active = False
    """While a module that calls attention runs: it may run others of them."""


class _Recording(_Mode):
    def __init__(
        self, add: Callable[[Any, Any], None], note: Callable[[Any, Any, Any], None] = lambda func, args, kwargs: None
    ):
        super().__init__()
        self._add, self._note = add, note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_attention(func):
            self._note(func, args, kwargs or {})
            if _is_repeatable(func, args, kwargs or {}):
                self._add(func, out)
        return out


class _Timing(_Mode):
    def __init__(self, mark: Callable[[], Any], marks: list[tuple[Any, Any]]):
        super().__init__()
        self._mark, self._marks = mark, marks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_attention(func) or not _is_repeatable(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        start = self._mark()
        out = func(*args, **(kwargs or {}))
        self._marks.append((start, self._mark()))
        return out


class _Returning(_Mode):
    def __init__(self, outputs: _AttentionOutputs):
        super().__init__()
        self._outputs = outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_attention(func) and _is_repeatable(func, args, kwargs or {}):
            out = self._outputs.take(func)
            if out is not None:
                return out
        return func(*args, **(kwargs or {}))


@cache
def is_attention(func: Any) -> bool:
    """Whether an operator is a known attention forward."""
    namespace, _, name = func._schema.name.partition("::")
    return func._schema.name in _OPERATORS or (namespace.lstrip("_").startswith("flash_attn") and name in _FLASH_ATTN)


def _is_repeatable(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the operator draws no random numbers and writes to none of its arguments."""
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if value is None:
            continue
        if "dropout" in argument.name and value:
            return False
        if argument.alias_info is not None and argument.alias_info.is_write:
            return False
    return True
