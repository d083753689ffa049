"""ProfilingPass: one forward and backward of a trial run under one strategy, listening to the model's tracker and
measuring it.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outsize.activation.offloaded_tensors import OffloadedTensors
from outsize.activation.recompute import run_once
from outsize.activation.strategies import RUN, RUNS_TWICE, keep_and_compare
from outsize.activation.user_checkpointing import is_in_backward, rerun_in_backward
from outsize.base.errors import SEVERAL_FORWARDS, ModelUnsupported
from outsize.compat import storage_id
from outsize.device.device import Device, Meter
from outsize.device.observer import parts_of
from outsize.model.arguments import MovedArguments
from outsize.model.discover import Layer
from outsize.model.state import LeftValues
from outsize.model.tensors import map_tensors, named_tensors, tensors_in
from outsize.model.work import Strategy
from outsize.profile.arguments import Arguments
from outsize.profile.lifetimes import Lifetimes
from outsize.profile.phases import Phases
from outsize.progress import Bar


class Trial(Protocol):
    """What a pass needs of the tracer."""

    layers: tuple[Layer, ...]
    device: Device
    spill_device: torch.device
    """Where activations go that a strategy sends away."""

    progress: Bar
    """Calls of all passes."""

    def bring(self, module: nn.Module) -> None: ...
    def is_static(self, tensor: Tensor) -> bool: ...
    def context_key(self, call: int) -> Any:
        """What is known of the time before a layer and after it: what comes before may hold its input, what comes after
        is measured with it.
        """
        ...

    left: dict[str, LeftValues]
    """By structure of a layer: values that its forward leaves in attributes. A layer that is skipped gets them too."""

    compares: bool
    """Scouts compare a second run of each layer's forward with the first."""

    def takes(self, call: int, tensors: list[Tensor]) -> None:
        """The inputs of a layer."""
        ...

    def may_run_twice(self, layer: Layer) -> bool:
        """Backward may run its forward again."""
        ...

    def has_backward(self, call: int) -> bool:
        """Plans choose a strategy for it; else it runs as with `keep`, and what it allocates dies in forward."""
        ...

    def must_run(self, call: int) -> bool:
        """Others are measured with it: what runs after it, or the gradient of a weight that they share."""
        ...


class ProfilingPass:
    """One forward and backward under one strategy, listening to the model's tracker."""

    def __init__(
        self, tracer: Trial, strategy: Strategy, meter: Meter | None, *, discovery: bool = False, ahead: bool = True
    ):
        """`discovery`: also find out which layer takes what which other made, and compare second runs of layers'
        forwards with the first. Its bytes are not to be used."""
        self.tracer, self.strategy, self.meter, self.discovery = tracer, strategy, meter, discovery
        self.phases = Phases(meter, tracer.device, ahead=ahead)
        self.arguments = Arguments()
        self.lifetimes = Lifetimes(self.phases, tracer.device.torch_device.type, tracer.is_static)
        self._follows = meter is not None and not discovery
        self.layer_of: list[int | None] = []
        """Per call: the layer, None for a region."""
        self._arguments: MovedArguments | None = None
        self.is_forward = False
        self._beside = False
        """A forward without grad is under way (a reference pass in a loss): it is let through, and measured only as
        part of that loss.
        """
        self.given: set[int] | None = None
        """While a layer's forward runs: the storages of its arguments."""
        self.skipped: set[int] = set()
        self.without_grad: set[int] = set()
        """Calls whose layer ran without grad. What comes after it in the same call may have a backward."""
        self.completions: dict[int, set[int]] = {}
        """By id of a parameter: the calls in whose backward a gradient of it came. -1: before that of any call."""
        self.backward: list[int] = []
        self.keys: dict[int, Any] = {}
        self._ran: dict[Any, int] = {}
        self._pass_through: dict[Any, Callable[[list[Tensor]], Any] | None] = {}
        self._offloaded: dict[int, OffloadedTensors] = {}
        self._arenas: dict[int, Tensor] = {}
        self._returned: Tensor | None = None
        self._taken: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        self._made: dict[int, tuple[int, weakref.ref[Tensor]]] = {}
        """By id: the call that took a tensor as its input, and that returned it."""
        self.shared_inputs: list[tuple[int, int]] = []
        """Two calls that took the same input."""
        self.continues_in: dict[int, int] = {}
        """Calls whose output a later layer took as its input, as it was, with that layer's call."""
        self.differs: dict[str, str] = {}
        """By structure of a layer: how a second run of its forward differs from the first."""

    # Forward.

    def forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._beside = not torch.is_grad_enabled()
        if not self._beside:
            if self.layer_of:
                raise ModelUnsupported(
                    "loss= calls the model a second time with grad before a backward: the plan keeps the activations "
                    f"of one forward. {SEVERAL_FORWARDS} "
                    "Run forwards that need no backward under torch.no_grad()."
                )
            self.is_forward = True
            self.tracer.progress.advance()
            self.phases.open_forward()
        self._arguments = MovedArguments(self.tracer.device.put, args, kwargs)
        return self._arguments.args, self._arguments.kwargs

    def finds(self, layer: int, after: int) -> int:
        return after + 1

    def reads(self, module: nn.Module, call: int) -> int:
        return call

    def forward_enters(self, call: int, layer: int | None) -> None:
        if call < 0:
            assert layer is not None
            self._require_callable_alone(self.tracer.layers[layer].name)
        if self._beside or call < 0:
            return
        if call > 0:
            self._close_forward(call - 1)
        self.layer_of.append(layer)
        if call > 0:
            self.tracer.progress.advance()  # between phases: drawing takes time
            self.phases.open_forward()

    def _require_callable_alone(self, layer: str) -> None:
        """Outside of the model's forward, as in the engine."""
        if is_in_backward():
            raise ModelUnsupported(rerun_in_backward(layer))
        if torch.is_grad_enabled():
            raise ModelUnsupported(
                f"{layer} is called with grad outside of the model's forward. Call it inside the forward of the "
                "module that is prepared, "
                "or under torch.no_grad()."
            )

    def runs(
        self, call: int, layer: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        facts = self.tracer.layers[layer]
        if call < 0:
            self.tracer.bring(facts.module)
            return forward(*args, **kwargs)
        named = list(named_tensors((args, kwargs)))
        inputs = [tensor for _, tensor in named]
        if inputs and not self._beside:
            if self._follows:
                self.lifetimes.takes(call, inputs)
            if self.discovery:
                # Inputs that are weights or buffers are there for good.
                self.arguments.takes(call, inputs[0], [t for t in inputs[1:] if not self.tracer.is_static(t)])
                self._takes(call, inputs[0])
                self.tracer.takes(call, inputs)
        # Layers that are the same modules differ by what runs around them.
        ids = [id(t) for t in inputs]
        kinds = tuple((tuple(t.shape), t.dtype, t.requires_grad, ids.index(id(t))) for t in inputs)
        # A model may run its layers without grad first (X-LoRA's scaling pass): such runs do not stand for those with a
        # backward.
        key = (facts.structure, kinds, self.tracer.context_key(call), self._beside, torch.is_grad_enabled())
        if not self._beside:
            self.keys[call] = key
            if not torch.is_grad_enabled():
                self.without_grad.add(call)
        always_runs = facts.is_last or self.tracer.must_run(call)
        may_skip = self._ran.get(key, 0) >= 2 and not always_runs
        if may_skip and (skip := self._pass_through.get(key)) is not None:
            if not self._beside:
                self.skipped.add(call)
            answer = skip(inputs)
            if self._follows and not self._beside:
                self.lifetimes.returns(
                    call,
                    "output",
                    tensors_in(answer),
                    {storage_id(part.untyped_storage()) for t in inputs for part in parts_of(t)},
                )
            self._makes(call, answer)
            if facts.structure in self.tracer.left:
                self.tracer.left[facts.structure].put_on(facts.module)
            return answer
        self._ran[key] = self._ran.get(key, 0) + 1
        self.tracer.bring(facts.module)
        given = {storage_id(part.untyped_storage()) for t in inputs for part in parts_of(t)}
        can = self.tracer.has_backward(call) and (self.strategy not in RUNS_TWICE or self.tracer.may_run_twice(facts))
        strategy = self.strategy if can else "keep"
        left = LeftValues(facts.module) if self.discovery and facts.structure not in self.tracer.left else None
        if self._beside:
            outputs = forward(*args, **kwargs)
        else:
            self.phases.reopen_forward()
            offloaded = self._offloaded[call] = OffloadedTensors()
            self.given = given
            if self.discovery and self.tracer.compares:
                outputs = keep_and_compare(
                    forward, args, kwargs, partial(self._compared, facts.structure), facts.module
                )
            elif self.discovery:
                outputs = run_once(
                    lambda: forward(*args, **kwargs), partial(self._compared, facts.structure), facts.module
                )
            else:
                with self.lifetimes.saving() if self._follows and strategy == "keep" else nullcontext():
                    outputs = RUN[strategy](forward, args, kwargs, offloaded, self.tracer.is_static)
            made = [*tensors_in(outputs), *_in_place_of(named[:1], args, kwargs)]
            self.given = None
            self._makes(call, made)
        if left is not None:
            left.forward_ran()
            self.tracer.left[facts.structure] = left
        # What it left in its arguments, later layers may need: no other layer answers in its place.
        known = {id(t) for t in inputs}
        added = [t for t in tensors_in((args, kwargs)) if id(t) not in known]
        next_hidden = _in_place_of(named[:1], args, kwargs)
        left_for_others = [t for t in added if all(t is not hidden for hidden in next_hidden)]
        if self._follows and not self._beside:
            self.lifetimes.returns(call, "output", [*tensors_in(outputs), *next_hidden], given)
            self.lifetimes.returns(call, "left", left_for_others, given)
            self.lifetimes.ran(call, strategy)
        if self.discovery and not self._beside:
            self.arguments.leaves(
                call, [t for t in left_for_others if t.layout == torch.strided and not self.tracer.is_static(t)]
            )
        with self.tracer.device.on_host(), self.phases.uncounted():
            self._pass_through[key] = _pass_through(inputs, outputs, given) if inputs and not added else None
        return outputs

    def _compared(self, structure: str, difference: str) -> None:
        if difference:
            self.differs.setdefault(structure, difference)

    def _takes(self, call: int, hidden: Tensor) -> None:
        took, made = self._taken.get(id(hidden)), self._made.get(id(hidden))
        if took is not None and took[1]() is hidden:
            self.shared_inputs.append((took[0], call))
        if made is not None and made[1]() is hidden:
            self.continues_in.setdefault(made[0], call)
        self._taken[id(hidden)] = (call, weakref.ref(hidden))

    def _makes(self, call: int, outputs: Any) -> None:
        if self.discovery and not self._beside:
            self._made.update({id(tensor): (call, weakref.ref(tensor)) for tensor in tensors_in(outputs)})

    def _close_forward(self, call: int) -> None:
        phase = self.phases.close_forward()
        offloaded = self._offloaded.get(call)
        if offloaded is not None and offloaded.num_bytes:
            with self.tracer.device.on_host(), self.phases.uncounted():
                arena = self._arenas[call] = torch.empty(
                    offloaded.num_bytes, dtype=torch.uint8, device=self.tracer.spill_device
                )
                offloaded.copy_to(arena)
            phase.sent_bytes = offloaded.num_bytes
            self.lifetimes.sends(call, offloaded.holds)
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
        if not failed and not self._beside:
            last = len(self.layer_of) - 1
            self._close_forward(last)
            self._release(last)

    # Backward.

    def backward_enters(self, call: int, forward_id: int) -> None:
        if call in self.skipped or call in self.backward:
            return
        self._close_backward()
        self.backward.append(call)
        if call in self._arenas:
            with self.phases.uncounted():
                self._returned = self._arenas.pop(call).to(self.tracer.device.torch_device)
            self._offloaded[call].attach_buffer(self._returned)
        self._offloaded.pop(call, None)
        self.phases.open_backward(call)

    def takes_gradient(self, param: Tensor) -> None:
        """A hook on parameters, called when the gradient of one is complete."""
        self.completions.setdefault(id(param), set()).add(self.backward[-1] if self.backward else -1)
        param.grad = None

    def backward_ends(self) -> None:
        self._close_backward()

    def _close_backward(self) -> None:
        self.phases.close_backward()
        self._returned = None


def _in_place_of(named: list[tuple[str, Tensor]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """What a layer has put among its arguments in the place of these: a hidden state that is handed on in an object."""
    now = dict(named_tensors((args, kwargs)))
    return [now[path] for path, tensor in named if path in now and now[path] is not tensor]


def _pass_through(inputs: list[Tensor], outputs: Any, given: set[int]) -> "Callable[[list[Tensor]], Any] | None":
    """How a layer that does not run answers: as this one did, with its own input in the place of the hidden state, and
    of whatever else was handed on.

    A second stream (ShadowPEFT's shadow state, the text beside the image) is passed through too: an output that has a
    gradient and the shape of an input.
    """
    hidden, results = inputs[0], list(tensors_in(outputs))
    place = next(
        (i for i, t in enumerate(results) if t is not hidden and t.shape == hidden.shape and t.dtype == hidden.dtype),
        None,
    )
    if place is None:
        return None
    sources = [
        0 if i == place else next((n for n, taken in enumerate(inputs) if taken is t), None)
        for i, t in enumerate(results)
    ]
    for i, t in enumerate(results):
        if sources[i] is None and t.requires_grad:
            free = ((n, taken) for n, taken in enumerate(inputs) if n not in sources)
            sources[i] = next((n for n, taken in free if taken.shape == t.shape and taken.dtype == t.dtype), None)
    is_new = [t.layout == torch.strided and storage_id(t.untyped_storage()) not in given for t in results]
    # What else comes out is a copy of what this layer made: that itself, and its graph, would live as long as the pass.
    others = [
        (t.detach().to("cpu", copy=True), t.device, t.requires_grad) if source is None else None
        for t, source in zip(results, sources, strict=True)
    ]
    template = _replaced(outputs, [torch.empty(0) for _ in results])

    def output(number: int, inputs: list[Tensor]) -> Tensor:
        source, other = sources[number], others[number]
        if other is not None:
            value, device, requires_grad = other
            return _Copy.apply(inputs[0], value, device) if requires_grad else value.to(device, copy=True)
        assert source is not None
        # Of its own where the layer's would be, so that it lives as long as that would.
        return (
            inputs[source].clone()
            if is_new[number]
            else inputs[source].view_as(inputs[source])
            if number == place
            else inputs[source]
        )

    return lambda inputs: _replaced(template, [output(number, inputs) for number in range(len(sources))])


class _Copy(torch.autograd.Function):
    """A tensor that has a gradient and is no leaf, which would live as long as the graph."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, value: Tensor, device: torch.device) -> Tensor:
        return value.to(device, copy=True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        return None, None, None


def _replaced(values: Any, tensors: Iterable[Tensor]) -> Any:
    """The same structure with other tensors, in order."""
    others = iter(tensors)
    return map_tensors(lambda _: next(others), values)
