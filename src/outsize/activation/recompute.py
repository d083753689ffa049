"""Gradient checkpointing: autograd keeps none of the tensors that a forward saves. Backward runs the forward again when
it needs the first of them.

It does the same as torch.utils.checkpoint with less Python per saved tensor. In torch.utils.checkpoint this Python
takes longer than the forward itself, so a fast GPU becomes launch-bound (docs/decisions/0014).
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

from outsize.base.errors import DeviceOutOfMemory, ModelUnsupported
from outsize.compat import detect_fake_mode
from outsize.model.state import ModuleState
from outsize.model.tensors import tensors_in

_Kind = tuple[torch.Size, torch.dtype, torch.device]
_OWN_REFERENCES = 2
"""Our references to a handle while they are counted: the list and the argument."""


class _StopRecomputation(Exception):
    """Ends the second forward early: all saved tensors are computed, or one differs."""


def run_checkpointed(forward: Callable[[], Any], device: torch.device) -> Any:
    """Run `forward`. Backward runs it again up to its last saved tensor, with the same random numbers and autocast.
    `device`: the device whose random state is restored.
    """
    if not torch.is_grad_enabled():
        return forward()
    saved = _RecomputedTensors(forward, RngAndAutocastState(device))
    with saved_tensors_hooks(saved.pack, saved.unpack):
        return forward()


class _RecomputedTensors:
    """The tensors that autograd saves in one call: handles and kinds after forward, tensors in backward. Each tensor of
    a second forward is returned once.
    """

    def __init__(self, forward: Callable[[], Any], state: "RngAndAutocastState"):
        self._forward, self._state = forward, state
        self._handles: list[float] = []
        """What autograd keeps instead of each tensor: its number. Each float is an object of its own, so its references
        can be counted, and the garbage collector does not track it. A layer with windowed attention saves thousands of
        tensors; with larger objects the collector ran in every step."""
        self._kinds: list[_Kind] = []
        self._known: dict[_Kind, _Kind] = {}
        self._tensors: list[Tensor | None] = []

    def pack(self, tensor: Tensor) -> float:
        kind = (tensor.shape, tensor.dtype, tensor.device)
        self._kinds.append(self._known.setdefault(kind, kind))
        handle = float(len(self._handles))
        self._handles.append(handle)
        return handle

    def _is_needed(self, number: int) -> bool:
        """Whether autograd still holds the handle. If it does not, the tensor is never unpacked."""
        return sys.getrefcount(self._handles[number]) > _OWN_REFERENCES

    def unpack(self, handle: float) -> Tensor:
        number = int(handle)
        # The first tensor of a backward, a second backward over the same graph, or a tensor that is unpacked before the
        # forward has returned.
        if number >= len(self._tensors) or self._tensors[number] is None:
            self._recompute()
        tensor, self._tensors[number] = self._tensors[number], None
        assert tensor is not None
        return tensor

    def _recompute(self) -> None:
        wanted = len(self._kinds)
        tensors: list[Tensor | None] = []
        difference = f"{wanted} tensors are saved in forward and fewer in backward"

        def add(tensor: Tensor) -> Tensor:
            nonlocal difference
            value, was, now = tensor.detach(), self._kinds[len(tensors)], (tensor.shape, tensor.dtype, tensor.device)
            if was != now:
                difference = f"saved tensor {len(tensors)} is {_show(*was)} in forward and {_show(*now)} in backward"
                raise _StopRecomputation
            tensors.append(value if self._is_needed(len(tensors)) else None)
            if len(tensors) == wanted:
                difference = ""
                raise _StopRecomputation
            return value

        try:
            with self._state.restored(), torch.enable_grad(), saved_tensors_hooks(add, _identity):
                self._forward()
        except _StopRecomputation:
            pass
        if difference:  # raised here, because torch handles some errors that are raised inside an operator
            raise ModelUnsupported(
                f"A recomputed layer saves other tensors in its second forward: {difference}. Remove what changes from "
                "call to call from its forward (a counter, a cache, Python's random)."
            )
        self._tensors = tensors


def run_and_compare(
    forward: Callable[[], Any], device: torch.device, report: Callable[[str], None], module: nn.Module | None = None
) -> Any:
    """Run `forward`, keep what autograd saves, and compare with a second run in backward.

    The second run is the one that `run_checkpointed` would make. `report` receives the difference, or "" if there is
    none. Raising an error (other than running out of memory) and writing to the state of `module` are differences too.
    Gradients come from the first run.
    """
    if not torch.is_grad_enabled():
        return forward()
    run = _ComparedRun(forward, RngAndAutocastState(device), report, module)
    with saved_tensors_hooks(run.pack, run.unpack):
        outputs = forward()
    run.set_outputs(outputs)
    return outputs


def run_once(forward: Callable[[], Any], report: Callable[[str], None], module: nn.Module) -> Any:
    """Run `forward` once, where memory is too small for a comparison. `report` receives the difference that the first
    run shows a second one would have, or "" if it shows none.
    """
    before, python, numpy = ModuleState(module), random.getstate(), np.random.get_state()
    outputs = forward()
    if written := before.changed():
        report(f"the forward writes {written}, and a second one would write it twice")
    elif random.getstate() != python or not all(map(np.array_equal, np.random.get_state(), numpy)):
        report("the forward draws random numbers from Python's or numpy's generator")
    else:
        report("")
    return outputs


class _ComparedRun:
    """The kinds of the saved tensors and the outputs of one call. Backward compares them with a second run."""

    def __init__(
        self,
        forward: Callable[[], Any],
        state: "RngAndAutocastState",
        report: Callable[[str], None],
        module: nn.Module | None,
    ):
        self._forward, self._state, self._report, self._module = forward, state, report, module
        self._kinds: list[_Kind] = []
        self._outputs: list[tuple[Tensor, int]] | None = None
        """Outputs and their versions: outputs that the model writes to later are not compared. None until the first run
        has returned, and after the comparison."""

    def pack(self, tensor: Tensor) -> Tensor:
        self._kinds.append((tensor.shape, tensor.dtype, tensor.device))
        return tensor.detach()  # the graph of an output holds the returned tensor: the output itself would be a cycle

    def set_outputs(self, outputs: Any) -> None:
        self._outputs = [(tensor.detach(), tensor._version) for tensor in tensors_in(outputs)]

    def unpack(self, saved: Tensor) -> Tensor:
        if self._outputs is not None:
            outputs, self._outputs = self._outputs, None
            before = ModuleState(self._module) if self._module is not None else None
            difference = self._difference(outputs)
            if before is not None:
                written = before.changed()
                before.restore()
                if written and not difference:
                    difference = f"the forward writes {written}, and a second one would write it twice"
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

        second: list[Tensor] = []
        try:
            with self._state.restored(), torch.enable_grad(), saved_tensors_hooks(add, _identity):
                second += [tensor.detach() for tensor in tensors_in(self._forward())]
        except (torch.OutOfMemoryError, DeviceOutOfMemory):
            raise
        except Exception as error:  # any error of the model's code: training with `keep` does not run it
            return found or f"a second run raises {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        if found:  # the model's code has caught _StopRecomputation
            return found
        if count < len(self._kinds):
            return f"the first run saves {len(self._kinds)} tensors and the second {count}"
        pairs = zip(outputs, second, strict=False)
        is_same = all(one._version != version or _is_same(one, two) for (one, version), two in pairs)
        return "" if is_same and len(second) == len(outputs) else "the second run returns other values"


def _is_same(one: Tensor, two: Tensor) -> bool:
    """Whether two outputs are equal: bit for bit on a CPU, up to about bfloat16 rounding on a GPU, where some kernels
    sum in no fixed order.
    """
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    if one.layout != torch.strided or one.is_meta or detect_fake_mode() is not None or torch.equal(one, two):
        return True
    one, two = one.nan_to_num().double(), two.nan_to_num().double()
    tolerance = 0.0 if one.device.type == "cpu" else 1e-2
    return bool((one - two).norm() <= tolerance * one.norm())


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _show(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"


class RngAndAutocastState:
    """The random state, default device and autocast that a forward depends on beside its inputs. They are not set in
    autograd's threads.
    """

    def __init__(self, device: torch.device):
        self._device, self._default_device = device, torch.get_default_device()
        self._rng = self._rng_states()
        kinds = (kind for kind in {device.type, "cpu"} if torch.amp.is_autocast_available(kind))
        self._autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self._caches = torch.is_autocast_cache_enabled()

    def _rng_states(self) -> tuple[Tensor, Tensor | None]:
        if self._device.type in ("cpu", "meta") or not torch.accelerator.is_available():
            return torch.get_rng_state(), None
        return torch.get_rng_state(), torch.get_device_module(self._device).get_rng_state(self._device)

    def _set_rng(self, states: tuple[Tensor, Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            torch.get_device_module(self._device).set_rng_state(states[1], self._device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        with self.restored_rng(), self.restored_settings():
            yield

    @contextmanager
    def restored_rng(self) -> Iterator[None]:
        now = self._rng_states()
        self._set_rng(self._rng)
        try:
            yield
        finally:
            self._set_rng(now)

    @contextmanager
    def restored_settings(self, *, caches: bool = True) -> Iterator[None]:
        """The default device and autocast alone. `caches`: keep autocast's cache of casts, if it was on."""
        with ExitStack() as contexts:
            if torch.get_default_device() != self._default_device:
                contexts.enter_context(self._default_device)
            for kind, (enabled, dtype) in self._autocast.items():
                if enabled or torch.is_autocast_enabled(kind):
                    contexts.enter_context(
                        torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=caches and self._caches)
                    )
            yield
