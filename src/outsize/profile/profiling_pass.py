"""ProfilingPass: one forward and backward of the profiling run under one strategy, measured call by call."""

import sys
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outsize.activation.attention import find_attention, timed_attention
from outsize.activation.recompute import run_once
from outsize.activation.strategies import RUN, keep_and_compare
from outsize.activation.user_checkpointing import is_in_backward, rerun_in_backward
from outsize.base.errors import SEVERAL_FORWARDS, ModelUnsupported
from outsize.compat import next_node_number, storage_id
from outsize.device.device import Device, Meter
from outsize.device.observer import parts_of
from outsize.model.arguments import MovedArguments
from outsize.model.discover import Layer
from outsize.model.state import BoundAttributes
from outsize.model.strategies import STRATEGY, Strategy
from outsize.model.tensors import named_tensors, tensors_in
from outsize.profile.arguments import SharedArguments
from outsize.profile.attention_kernels import AttentionCall
from outsize.profile.kept_state import KeptState
from outsize.profile.lifetimes import Lifetimes
from outsize.profile.phases import Phases
from outsize.profile.skipped_layers import StandIn, stand_in_for
from outsize.progress import Bar
from outsize.transfer.offloaded_tensors import OffloadedTensors


class PassContext(Protocol):
    """The part of a Tracer that a pass uses."""

    layers: tuple[Layer, ...]
    device: Device
    spill_device: torch.device
    """The device that activations are copied to under offload and swap."""

    progress: Bar
    """Counts the calls of all passes."""

    kept: KeptState

    compares: bool
    """Discovery passes compare a second run of each layer's forward with the first."""

    def place(self, module: nn.Module) -> None: ...

    def is_static(self, tensor: Tensor) -> bool: ...

    def context_key(self, call: int) -> Any:
        """Identifies the code before and after a layer call: code before it may hold its input, and code after it is
        measured with it.
        """
        ...

    def note_arguments(self, call: int, tensors: list[Tensor]) -> None: ...

    def may_run_twice(self, layer: Layer) -> bool:
        """Whether backward may run the layer's forward again."""
        ...

    def has_backward(self, call: int) -> bool:
        """Whether the call has a backward, and so a strategy. Otherwise it runs as with `keep`, and its allocations are
        freed in forward.
        """
        ...

    def must_run(self, call: int) -> bool:
        """Whether the call may not be skipped, since other work is measured with it: the code after it, or the gradient
        of a weight that calls share.
        """
        ...


class ProfilingPass:
    """A listener of the BlockTracker (model/block_tracker.py)."""

    def __init__(
        self,
        context: PassContext,
        strategy: Strategy,
        meter: Meter | None,
        *,
        is_discovery: bool = False,
        ahead: bool = True,
    ):
        """`is_discovery`: also find which layers have which tensors as arguments, and compare second runs of layers'
        forwards with the first. The bytes of such a pass are not used.
        """
        self.context, self.strategy, self.meter, self.is_discovery = context, strategy, meter, is_discovery
        self.phases = Phases(meter, context.device, ahead=ahead)
        self.arguments = SharedArguments()
        self.lifetimes = Lifetimes(self.phases, context.device.torch_device.type, context.is_static)
        self._tracks = meter is not None and not is_discovery
        self.attention_calls: Counter[AttentionCall] = Counter()
        """Of layers that ran in a discovery pass."""
        self._times_attention = meter is None and ahead
        self._attention_marks: dict[int, list[tuple[Any, Any]]] = {}
        """By call: before and after each attention kernel."""
        self.layer_of: list[int | None] = []
        """By call: the layer, None for a region."""
        self._arguments: MovedArguments | None = None
        self.is_forward = False
        self.forward_nodes = range(0)
        """Numbers of the autograd nodes that the forward made."""
        self._is_unmeasured = False
        """The forward runs without grad (a reference pass in a loss). It is measured only as part of that loss."""
        self.argument_storages: set[int] | None = None
        """While a layer's forward runs: the storages of its arguments."""
        self.skipped: set[int] = set()
        self.without_grad: set[int] = set()
        """Calls whose layer ran without grad. What runs after the layer in the same call may have a backward."""
        self.completions: dict[int, set[int]] = {}
        """By id of a parameter: the calls in whose backward its gradient was complete. -1: before that of any call."""
        self.backward: list[int] = []
        """Calls that ran, in the order in which their backward began."""
        self.reached: set[int] = set()
        """Calls that a gradient reached, skipped ones too."""
        self.keys: dict[int, Any] = {}
        """By call of a layer: equal for calls that cost the same."""
        self._num_runs: dict[Any, int] = {}
        self._stand_ins: dict[Any, StandIn | None] = {}
        self._offloaded: dict[int, OffloadedTensors] = {}
        self._arenas: dict[int, Tensor] = {}
        self._returned: Tensor | None = None
        self._input_of: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        """By id of a tensor: the call that had it as its input."""
        self._output_of: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        """By id of a tensor: the call that returned it."""
        self.shared_inputs: list[tuple[int, int]] = []
        """Pairs of calls that had the same input."""
        self.continues_in: dict[int, int] = {}
        """Calls whose output is the input of a later layer, unchanged, with the call of that layer."""
        self.differences: dict[str, str] = {}
        """By structure of a layer: how a second run of its forward differs from the first."""

    def _note_attention(self, func: Any, args: Any, kwargs: Any) -> None:
        self.attention_calls[AttentionCall.of(func, args, kwargs)] += 1

    def attention_seconds(self, call: int) -> float:
        """Seconds of the attention kernels that a layer need not run again. 0 if they are not timed in this pass."""
        return sum(self.context.device.between(start, end) for start, end in self._attention_marks.get(call, ()))

    def representative(self, call: int) -> int:
        """The call that ran in place of this one: itself, or the last equal call before it."""
        if call not in self.skipped:
            return call
        return next(v for v in range(call - 1, -1, -1) if v not in self.skipped and self.keys.get(v) == self.keys[call])

    def forward_peaks(self) -> dict[int, int]:
        """The peaks of the forwards of all calls that ran."""
        return {v: phase.peak_bytes for v, phase in enumerate(self.phases.forward) if v not in self.skipped}

    # Forward.

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._is_unmeasured = not torch.is_grad_enabled()
        if not self._is_unmeasured:
            if self.layer_of:
                raise ModelUnsupported(
                    "loss= calls the model a second time with grad before a backward: the plan keeps the activations "
                    f"of one forward. {SEVERAL_FORWARDS} Run forwards that need no backward under torch.no_grad()."
                )
            self.is_forward = True
            self.forward_nodes = range(next_node_number(), sys.maxsize)
            self.context.progress.advance()
            self.phases.open_forward()
        self._arguments = MovedArguments(self.context.device.put, args, kwargs)
        return self._arguments.args, self._arguments.kwargs

    def call_of_layer(self, layer: int, after: int) -> int:
        return after + 1

    def call_of_module(self, module: nn.Module, call: int) -> int:
        return call

    def forward_enters(self, call: int, layer: int | None) -> None:
        if call < 0:
            assert layer is not None
            self._require_callable_alone(self.context.layers[layer].name)
        if self._is_unmeasured or call < 0:
            return
        if call > 0:
            self._close_forward(call - 1)
        self.layer_of.append(layer)
        if call > 0:
            self.context.progress.advance()  # between phases, since drawing takes time
            self.phases.open_forward()

    def _require_callable_alone(self, layer: str) -> None:
        """Check a call outside of the model's forward, with the same rules as the engine."""
        if is_in_backward():
            raise ModelUnsupported(rerun_in_backward(layer))
        if torch.is_grad_enabled():
            raise ModelUnsupported(
                f"{layer} is called with grad outside of the model's forward. Call it inside the forward of the "
                "module that is prepared, or under torch.no_grad()."
            )

    def run_layer(
        self, call: int, layer: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        facts = self.context.layers[layer]
        if call < 0:
            self.context.place(facts.module)
            return forward(*args, **kwargs)
        named = list(named_tensors((args, kwargs)))
        inputs = [tensor for _, tensor in named]
        if inputs and not self._is_unmeasured:
            self._note_arguments(call, inputs)
        key = self._key(call, facts, inputs)
        may_skip = self._num_runs.get(key, 0) >= 2 and not facts.is_last and not self.context.must_run(call)
        if may_skip and (stand_in := self._stand_ins.get(key)) is not None:
            return self._skip_layer(call, facts, stand_in, inputs)
        self._num_runs[key] = self._num_runs.get(key, 0) + 1
        self.context.place(facts.module)
        argument_storages = _storages_of(inputs)
        bound = None
        if self.is_discovery and facts.structure not in self.context.kept.of_layers:
            bound = BoundAttributes(facts.module)
        strategy = self._strategy_of(call, facts)
        if self._is_unmeasured:
            outputs = forward(*args, **kwargs)
        else:
            self.phases.restart_forward()
            self.argument_storages = argument_storages
            outputs = self._run_layer_under(strategy, call, facts, forward, args, kwargs)
            made = [*tensors_in(outputs), *_replacements(named[:1], args, kwargs)]
            self.argument_storages = None
            self._note_outputs(call, made)
        if bound is not None:
            bound.forward_ran(self.context.device.torch_device, self.context.is_static)
            self.context.kept.of_layers[facts.structure] = bound
        known = {id(t) for t in inputs}
        added = [t for t in tensors_in((args, kwargs)) if id(t) not in known]
        next_hidden = _replacements(named[:1], args, kwargs)
        written = [t for t in added if all(t is not hidden for hidden in next_hidden)]
        if self._tracks and not self._is_unmeasured:
            self.lifetimes.layer_returned(call, "output", [*tensors_in(outputs), *next_hidden], argument_storages)
            self.lifetimes.layer_returned(call, "written", written, argument_storages)
            self.lifetimes.layer_ran(call, strategy)
        if self.is_discovery and not self._is_unmeasured:
            self.arguments.layer_wrote(
                call, [t for t in written if t.layout == torch.strided and not self.context.is_static(t)]
            )
        with self.context.device.on_host(), self.phases.uncounted():
            # A layer that writes into its arguments always runs, since later layers may need the values.
            self._stand_ins[key] = stand_in_for(inputs, outputs, argument_storages) if inputs and not added else None
        return outputs

    def _note_arguments(self, call: int, inputs: list[Tensor]) -> None:
        if self._tracks:
            self.lifetimes.layer_called(call, inputs)
        if self.is_discovery:
            # Weights and buffers among the arguments live until the end and are not tracked.
            others = [t for t in inputs[1:] if not self.context.is_static(t)]
            self.arguments.layer_called(call, inputs[0], others)
            self._note_input(call, inputs[0])
            self.context.note_arguments(call, inputs)

    def _key(self, call: int, layer: Layer, inputs: list[Tensor]) -> Any:
        ids = [id(t) for t in inputs]
        kinds = tuple((tuple(t.shape), t.dtype, t.requires_grad, ids.index(id(t))) for t in inputs)
        # Equal layers differ by the code before and after them, and by grad: X-LoRA's scaling pass first runs them
        # without grad, at another cost.
        grad = torch.is_grad_enabled()
        key = (layer.structure, kinds, self.context.context_key(call), self._is_unmeasured, grad)
        if not self._is_unmeasured:
            self.keys[call] = key
            if not grad:
                self.without_grad.add(call)
        return key

    def _skip_layer(self, call: int, layer: Layer, stand_in: StandIn, inputs: list[Tensor]) -> Any:
        if not self._is_unmeasured:
            self.skipped.add(call)
        outputs = stand_in(inputs)
        if self._tracks and not self._is_unmeasured:
            self.lifetimes.layer_returned(call, "output", tensors_in(outputs), _storages_of(inputs))
        self._note_outputs(call, outputs)
        if layer.structure in self.context.kept.of_layers:
            self.context.kept.of_layers[layer.structure].bind_to(layer.module)
        return outputs

    def _strategy_of(self, call: int, layer: Layer) -> Strategy:
        """The pass's strategy if the layer can run under it, else `keep`."""
        can_recompute = not STRATEGY[self.strategy].recomputes or self.context.may_run_twice(layer)
        return self.strategy if self.context.has_backward(call) and can_recompute else "keep"

    def _run_layer_under(
        self,
        strategy: Strategy,
        call: int,
        layer: Layer,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        offloaded = self._offloaded[call] = OffloadedTensors()
        if self.is_discovery:
            report = partial(self._note_difference, layer.structure)
            with find_attention(layer.module, note=self._note_attention):
                if self.context.compares:
                    return keep_and_compare(forward, args, kwargs, report, layer.module)
                return run_once(lambda: forward(*args, **kwargs), report, layer.module)
        if self._times_attention and strategy == "keep":
            with timed_attention(layer.module, self.context.device.mark) as self._attention_marks[call]:
                return forward(*args, **kwargs)
        with self.lifetimes.noting_saved() if self._tracks and strategy == "keep" else nullcontext():
            return RUN[strategy](forward, args, kwargs, offloaded, self.context.is_static, layer.module)

    def _note_difference(self, structure: str, difference: str) -> None:
        if difference:
            self.differences.setdefault(structure, difference)

    def _note_input(self, call: int, hidden: Tensor) -> None:
        earlier, made = self._input_of.get(id(hidden)), self._output_of.get(id(hidden))
        if earlier is not None and earlier[1]() is hidden:
            self.shared_inputs.append((earlier[0], call))
        if made is not None and made[1]() is hidden:
            self.continues_in.setdefault(made[0], call)
        self._input_of[id(hidden)] = (call, weakref.ref(hidden))

    def _note_outputs(self, call: int, outputs: Any) -> None:
        if self.is_discovery and not self._is_unmeasured:
            self._output_of.update({id(tensor): (call, weakref.ref(tensor)) for tensor in tensors_in(outputs)})

    def _close_forward(self, call: int) -> None:
        phase = self.phases.close_forward()
        offloaded = self._offloaded.get(call)
        if offloaded is not None and offloaded.num_bytes:
            with self.context.device.on_host(), self.phases.uncounted():
                arena = self._arenas[call] = torch.empty(
                    offloaded.num_bytes, dtype=torch.uint8, device=self.context.spill_device
                )
                offloaded.copy_to(arena)
            phase.sent_bytes = offloaded.num_bytes
            self.lifetimes.layer_sent(call, offloaded.holds)
        self._release(call - 1)

    def _release(self, call: int) -> None:
        offloaded = self._offloaded.get(call)
        if offloaded is not None and offloaded.items:
            self.phases.release(call, offloaded.free_device_copy)

    def forward_ends(self, outputs: list[Tensor], *, failed: bool) -> None:
        arguments, self._arguments = self._arguments, None
        if arguments is not None and not failed:
            arguments.write_back()
        self.is_forward = False
        if not failed and not self._is_unmeasured:
            self.forward_nodes = range(self.forward_nodes.start, next_node_number())
            last = len(self.layer_of) - 1
            self._close_forward(last)
            self._release(last)

    # Backward.

    def backward_enters(self, call: int, forward_id: int) -> None:
        self.reached.add(call)
        if call in self.skipped or call in self.backward:
            return
        self.backward_ends()
        self.backward.append(call)
        if call in self._arenas:
            with self.phases.uncounted():
                self._returned = self._arenas.pop(call).to(self.context.device.torch_device)
            self._offloaded[call].attach_buffer(self._returned)
        self._offloaded.pop(call, None)
        self.phases.open_backward(call)

    def backward_ends(self) -> None:
        self.phases.close_backward()
        self._returned = None

    def gradient_completed(self, param: Tensor) -> None:
        """A hook on parameters, called when the gradient of one is complete."""
        self.completions.setdefault(id(param), set()).add(self.backward[-1] if self.backward else -1)
        param.grad = None


def _storages_of(tensors: list[Tensor]) -> set[int]:
    return {storage_id(part.untyped_storage()) for tensor in tensors for part in parts_of(tensor)}


def _replacements(named: list[tuple[str, Tensor]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Tensors that a layer has put among its arguments in place of these: a hidden state in an object, for example."""
    now = dict(named_tensors((args, kwargs)))
    return [now[path] for path, tensor in named if path in now and now[path] is not tensor]
