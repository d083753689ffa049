"""A forward that is made again in backward: autograd keeps nothing of what it saved, and the first tensor that backward
asks for has all of them made.

What torch.utils.checkpoint does, with less Python for every saved tensor: there it costs more than the forward itself
(docs/decisions/0014), and a GPU that is fast waits for Python.
"""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from outsize.base.errors import DeviceOutOfMemory, ModelUnsupported, tell
from outsize.compat import detect_fake_mode
from outsize.model.state import ModuleState, generators_of
from outsize.model.tensors import tensors_in

_Kind = tuple[torch.Size, torch.dtype, torch.device]
_OUR_REFERENCES = 2
"""To a handle, while they are counted: the list's and the argument's."""


class _StopRecomputation(Exception):
    """All that backward will ask for is there, or something else than it will ask for: the rest of the forward need not
    run.
    """


def run_checkpointed(forward: Callable[[], Any], device: torch.device) -> Any:
    """Run `forward`, and have backward run it again: with the same random numbers and autocast, as far as its last
    saved tensor. `device`: whose numbers.
    """
    if not torch.is_grad_enabled():
        return forward()
    saved = _Saved(forward, _RngAndAutocastState(device))
    with saved_tensors_hooks(saved.note, saved.get):
        return forward()


class _Saved:
    """Of one call: what autograd saved, first as handles and kinds, in backward as tensors, each given away once."""

    def __init__(self, forward: Callable[[], Any], surroundings: "_RngAndAutocastState"):
        self._forward, self._surroundings = forward, surroundings
        self._tickets: list[float] = []
        """What autograd keeps of each tensor, its number. Floats: every one is an object of its own, so it can be told
        whether autograd still has it, and the garbage collector does not count them. A layer with windows of attention
        saves thousands of tensors, and objects for each had it come in every step."""
        self._kinds: list[_Kind] = []
        self._known: dict[_Kind, _Kind] = {}
        self._tensors: list[Tensor | None] = []

    def note(self, tensor: Tensor) -> float:
        kind = (tensor.shape, tensor.dtype, tensor.device)
        self._kinds.append(self._known.setdefault(kind, kind))
        handle = float(len(self._tickets))
        self._tickets.append(handle)
        return handle

    def _is_kept(self, number: int) -> bool:
        """If autograd has let go of a handle, nobody will ask for the tensor."""
        return sys.getrefcount(self._tickets[number]) > _OUR_REFERENCES

    def get(self, handle: float) -> Tensor:
        number = int(handle)
        # The first one, or of another backward over the same graph, or asked for while the forward still runs.
        if number >= len(self._tensors) or self._tensors[number] is None:
            self._make()
        tensor, self._tensors[number] = self._tensors[number], None
        assert tensor is not None
        return tensor

    def _make(self) -> None:
        wanted = len(self._kinds)
        tensors: list[Tensor | None] = []
        found = f"{wanted} tensors were saved in forward and fewer in backward"

        def add(tensor: Tensor) -> Tensor:
            nonlocal found
            value, was, now = tensor.detach(), self._kinds[len(tensors)], (tensor.shape, tensor.dtype, tensor.device)
            if was != now:
                found = f"number {len(tensors)} was {_show(*was)} and is {_show(*now)}"
                raise _StopRecomputation
            tensors.append(value if self._is_kept(len(tensors)) else None)
            if len(tensors) == wanted:
                found = ""
                raise _StopRecomputation
            return value

        try:
            with self._surroundings.again(), torch.enable_grad(), saved_tensors_hooks(add, _itself):
                self._forward()
        except _StopRecomputation:
            pass
        if found:  # not raised in the middle of an operator: torch takes some errors there for its own
            do = "Take out of its forward what varies from call to call (a counter, a cache, Python's random)"
            raise ModelUnsupported(tell("a layer that is recomputed saves the same tensors both times", found, do))
        self._tensors = tensors


def compared(
    forward: Callable[[], Any], device: torch.device, report: Callable[[str], None], module: nn.Module | None = None
) -> Any:
    """Run `forward`, keep what autograd saves, and compare that run with a second one in backward.

    The second run is as `run_checkpointed` would run it. `report` gets how it differs, "" if it does not. Gradients
    come from the first run. A second run that raises is reported too, unless memory ran out; so is one that writes to
    the state of `module`.
    """
    if not torch.is_grad_enabled():
        return forward()
    run = _Compared(forward, _RngAndAutocastState(device), report, module)
    with saved_tensors_hooks(run.note, run.get):
        outputs = forward()
    run.returned(outputs)
    return outputs


def run_once(forward: Callable[[], Any], report: Callable[[str], None], module: nn.Module) -> Any:
    """Where there is no memory to compare a second run: `report` gets what the first one shows of how it would differ,
    "" if nothing.
    """
    before, numbers = ModuleState(module), _other_numbers(module)
    outputs = forward()
    written = before.changed()
    if written:
        report(f"the forward writes {written}, and a second one would write it twice")
    elif not _equal_numbers(numbers, _other_numbers(module)):
        report("the forward draws random numbers from other generators than torch's own")
    else:
        report("")
    return outputs


def _other_numbers(module: nn.Module) -> tuple[Any, ...]:
    """Where random generators stand that a second run does not set back."""
    return random.getstate(), np.random.get_state(), [generator.get_state() for generator in generators_of(module)]


def _equal_numbers(one: tuple[Any, ...], two: tuple[Any, ...]) -> bool:
    of_numpy = all(np.array_equal(a, b) for a, b in zip(one[1], two[1], strict=True))
    return (
        one[0] == two[0]
        and of_numpy
        and all(torch.equal(a, b) for a, b in zip(one[2], two[2], strict=False))
        and len(one[2]) == len(two[2])
    )


class _Compared:
    """Of one call: kinds of what autograd saved, and the outputs, until backward has compared them with a
    second run.
    """

    def __init__(
        self,
        forward: Callable[[], Any],
        surroundings: "_RngAndAutocastState",
        report: Callable[[str], None],
        module: nn.Module | None,
    ):
        self._forward, self._surroundings, self._report, self._module = forward, surroundings, report, module
        self._kinds: list[_Kind] = []
        self._outputs: list[tuple[Tensor, int]] | None = None
        """With their versions: what the model writes into them afterwards is no difference. None before the first run
        has returned, and after the comparison."""

    def note(self, tensor: Tensor) -> Tensor:
        self._kinds.append((tensor.shape, tensor.dtype, tensor.device))
        return tensor.detach()  # the tensor itself may be an output, whose graph holds what is returned here

    def returned(self, outputs: Any) -> None:
        self._outputs = [(tensor.detach(), tensor._version) for tensor in tensors_in(outputs)]

    def get(self, saved: Tensor) -> Tensor:
        if self._outputs is not None:
            outputs, self._outputs = self._outputs, None
            before = ModuleState(self._module) if self._module is not None else None
            difference = self._difference(outputs)
            if before is not None:
                written = before.changed()
                before.restore()
                difference = difference or (
                    f"the forward writes {written}, and a second one would write it twice" if written else ""
                )
            self._report(difference)
        return saved

    def _difference(self, outputs: list[tuple[Tensor, int]]) -> str:
        count, found = 0, ""

        def add(tensor: Tensor) -> Tensor:
            nonlocal count, found
            now = (tensor.shape, tensor.dtype, tensor.device)
            if not found and count < len(self._kinds) and self._kinds[count] != now:
                was = _show(*self._kinds[count])
                found = f"saved tensor {count} is {was} in the first run and {_show(*now)} in the second"
                raise _StopRecomputation
            count += 1
            return tensor.detach()

        again: list[Tensor] = []
        try:
            with self._surroundings.again(), torch.enable_grad(), saved_tensors_hooks(add, _itself):
                again += [tensor.detach() for tensor in tensors_in(self._forward())]
        except (torch.OutOfMemoryError, DeviceOutOfMemory):
            raise
        except Exception as error:  # whatever the model's code raises, training with `keep` does not meet it
            return found or f"a second run raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if found:  # and the model's code caught our exception
            return found
        if count < len(self._kinds):
            return f"the first run saves {len(self._kinds)} tensors and the second {count}"
        pairs = zip(outputs, again, strict=False)
        is_same = all(one._version != version or _is_same(one, two) for (one, version), two in pairs)
        return "" if is_same and len(again) == len(outputs) else "the second run returns other values"


def _is_same(one: Tensor, two: Tensor) -> bool:
    """Whether outputs are equal to the bit. On a GPU some kernels add up in any order: there, to about the rounding of
    bfloat16.
    """
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if one.layout != torch.strided or one.is_meta or detect_fake_mode() is not None or torch.equal(one, two):
        return True
    one, two = one.nan_to_num().double(), two.nan_to_num().double()
    tolerance = 0.0 if one.device.type == "cpu" else 1e-2
    return bool((one - two).norm() <= tolerance * one.norm())


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _show(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"


class _RngAndAutocastState:
    """What a forward depends on beside its inputs: random state, the default device, and autocast, which no thread of
    autograd has by itself.
    """

    def __init__(self, device: torch.device):
        self._device, self._default = device, torch.get_default_device()
        self._random = self._states()
        kinds = (kind for kind in {device.type, "cpu"} if torch.amp.is_autocast_available(kind))
        self._autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self._caches = torch.is_autocast_cache_enabled()

    def _states(self) -> tuple[Tensor, Tensor | None]:
        has_own = self._device.type not in ("cpu", "meta") and torch.accelerator.is_available()
        return torch.get_rng_state(), torch.get_device_module(self._device).get_rng_state(
            self._device
        ) if has_own else None

    def _set(self, states: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)

    @contextmanager
    def again(self) -> Iterator[None]:
        now = self._states()
        self._set(self._random)
        try:
            with ExitStack() as contexts:
                if torch.get_default_device() != self._default:
                    contexts.enter_context(self._default)
                for kind, (enabled, dtype) in self._autocast.items():
                    if enabled or torch.is_autocast_enabled(kind):
                        contexts.enter_context(
                            torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=self._caches)
                        )
                yield
        finally:
            self._set(now)
