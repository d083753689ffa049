"""Takes a ModelTrace and a BlockGraph: runs the model on one real batch and measures every kind of layer, never all
layers.

Of each kind of layer the first two really run, and the last of its list (what is alive around a layer differs at the
ends); the others pass their input through and get the second one's numbers. Calls that share trainable weights with
others are of one kind if they are alike in that: see profile/sharing.py. What runs between two layers counts as the
earlier one's: layers that have such a trailing all run. The first pass finds these out, which lists are no stacks, and
which layers cannot be recomputed. Only the weights of layers that run, and those outside layers, are put on the device.
Each activation strategy is measured in a pass of its own, through the code that the engine runs. Nothing of the user's
model is changed by it: weights, gradients, buffers, random state.
"""

import gc
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outsize.activation.strategies import RUNS_TWICE, SENDS
from outsize.base.errors import DeviceOutOfMemory, ModelUnsupported, tell
from outsize.base.log import log
from outsize.base.records import fingerprint
from outsize.compat import detect_fake_mode, storage_id
from outsize.device.device import Device
from outsize.device.observer import Observer, push_mode, remove_mode
from outsize.hardware.lanes import compute_seconds
from outsize.model.block_tracker import BlockTracker
from outsize.model.caches import turn_caches_off, turn_caches_on
from outsize.model.discover import Layer, stages_to_join, with_stages_joined
from outsize.model.graph import Block, BlockGraph, Param
from outsize.model.layerdrop import turn_layerdrop_off, turn_layerdrop_on
from outsize.model.stacks import is_composite
from outsize.model.state import LeftValues, ModuleState, generators_of
from outsize.model.tensors import map_tensors
from outsize.model.weights import Weights, bytes_of, is_unmaterialized
from outsize.model.work import STRATEGIES, Strategy, Work
from outsize.profile.calling import Loss, batch_shapes, call_model, loss_of
from outsize.profile.gradient_order import bytes_of_waiting_gradients, read_without_grad, require_landings
from outsize.profile.lifetimes import Records
from outsize.profile.merge import with_reserve
from outsize.profile.phases import Phase, bytes_of_phases
from outsize.profile.profiling_pass import ProfilingPass
from outsize.profile.sharing import HiddenReads, SharedGradients, calls_to_run
from outsize.profile.trace import ModelTrace, after
from outsize.progress import Bar

_MOST_COMPARED_BYTES = 4 * 2**20
"""Of parameters on another device, compared with what they were copied from. Codebooks are smaller."""
_NOTHING = (True, ())
"""A layer's output goes on to the next layer as it is, and no weights are read in between."""


@contextmanager
def _out_of_memory(around: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        found = f"memory ran out around {around()}"
        do = (
            "Use a smaller batch or shorter sequences; the model's own loss over a large vocabulary is often the "
            "largest part"
        )
        raise DeviceOutOfMemory(
            tell("one layer of each kind and the head fit the device at this batch", found, do)
        ) from error


class Tracer:
    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        layers: tuple[Layer, ...],
        device: Device,
        weights: Weights | None = None,
        loss: Loss | None = None,
    ):
        """`weights`: where the values of unmaterialized parameters are read from. `loss`: as the loop makes it, where
        that is not the model's own.
        """
        self.model, self.batch, self.layers, self.device, self.weights, self.loss = (
            model,
            batch,
            layers,
            device,
            weights,
            loss,
        )
        # What is allocated between two calls is in no call's numbers: the device can keep what is sent away, and the
        # host need not.
        self.spill_device = device.torch_device
        self._names = {id(p): name for name, p in model.named_parameters()}
        self.progress = Bar("Looking at the model")
        self._brought: dict[nn.Parameter, Tensor] = {}
        self._saved: dict[nn.Parameter, torch.UntypedStorage] = {}
        """Values of parameters that run where they are: a forward may write them."""
        self._versions: dict[nn.Parameter, int] = {}
        self._storages: dict[nn.Parameter, int] = {}
        """Where the values of parameters are while the model runs."""
        self._over: dict[int, dict[nn.Parameter, None]] = {}
        """The parameters in each storage."""
        self._static: set[int] = set()
        self._is_bringing = False
        """Weights are on their way to the device: that does not read them."""
        self._readers: dict[int, set[int]] = {}
        self._reads_outside_module: set[int] = set()
        self._path: list[int | None] | None = None
        """The layers of the calls, as in every pass."""
        self._trailing_work: dict[int, Any] = {}
        self._gradients, self._hidden = SharedGradients(()), HiddenReads()
        self._to_run: set[int] = set()
        """Calls that a measuring pass does not skip."""
        self._detours: set[int] = set()
        self._without_backward: set[int] = set()
        self.left: dict[str, LeftValues] = {}
        self.compares = True
        self._differs: dict[str, str] = {}
        """By structure of a layer: how a second run of its forward differs from the first. It is never
        recomputed then.
        """

    def is_static(self, tensor: Tensor) -> bool:
        return storage_id(tensor.untyped_storage()) in self._static

    def bring(self, module: nn.Module) -> None:
        """Put a module's weights on the device until the trace ends."""
        self._is_bringing = True
        for param in module.parameters():
            if is_unmaterialized(param):
                self._brought[param] = param.data
                assert self.weights is not None
                with self.device.on_host():
                    value = torch.empty(param.shape, dtype=param.dtype)
                    self.weights.read_into(self._names[id(param)], value)
                param.data = value.to(self.device.torch_device)
            elif param.device != self.device.torch_device:
                self._brought[param] = param.data
                param.data = param.data.to(self.device.torch_device)
            elif param not in self._brought and param not in self._saved and detect_fake_mode() is None:
                with self.device.on_host():
                    self._saved[param] = bytes_of(param).clone()
            self._versions.setdefault(param, param._version)
            self._storages[param] = storage_id(param.untyped_storage())
            self._static.add(self._storages[param])
            self._over.setdefault(self._storages[param], {})[param] = None
        self._is_bringing = False

    def trace(self) -> tuple[BlockGraph, ModelTrace]:
        to_time: tuple[Strategy, ...] = ("keep", "recompute") if not self.device.is_simulated else ()
        with self._model_untouched(), self.progress:
            discovery = self._discover()
            if self._join_stages(discovery):
                discovery = self._discover()
            if self._set_aside(discovery):
                discovery = self._discover()
            self.progress.total = self.progress.done + (len(STRATEGIES) + 2 * len(to_time)) * len(discovery.layer_of)
            self._differs = discovery.differs
            self._trailing_work = {
                call: self._find_trailing_work(discovery, call)
                for call, layer in enumerate(discovery.layer_of)
                if layer is not None
            }
            self._gradients = self._shared_gradients(discovery)
            waiting_bytes = bytes_of_waiting_gradients(self.layers, discovery, self._readers)
            self._without_backward = {call for call in discovery.keys if not self._is_differentiable(discovery, call)}
            trailing = [call for call, trailing in self._trailing_work.items() if trailing != _NOTHING]
            self._to_run = calls_to_run(
                {call: (key, self.context_key(call)) for call, key in discovery.keys.items()}, trailing, self._gradients
            )
            passes = {strategy: self._measure(strategy) for strategy in STRATEGIES}
            timed = {strategy: self._time(strategy) for strategy in to_time}
            left = [self.left[layer.structure] for layer in self.layers if layer.structure in self.left]
            held_bytes = passes["keep"].phases.held_bytes + sum(
                values.num_bytes(self.device.torch_device, self.is_static) for values in left
            )
        graph = self._graph(passes["keep"])
        require_landings(self.model, graph, passes["keep"], self._readers)
        notes = tuple(self._notes())
        for note in notes:
            log.warning("%s", note)
        records = Records(
            {strategy: run.lifetimes for strategy, run in passes.items()},
            passes["keep"].keys,
            partial(self._representative, passes["keep"]),
        )
        calls = tuple(self._works(passes, timed, v) for v in range(len(graph.calls)))
        provenance = (
            "estimated from FLOPs and bytes" if self.device.is_simulated else f"measured on {self.device.spec.name}"
        )
        trace = ModelTrace(
            graph=fingerprint(graph),
            inputs=batch_shapes(self.batch),
            calls=calls,
            shared=records.all(calls),
            held_bytes=held_bytes,
            provenance=f"seconds {provenance}, bytes measured",
            counts_launches=self.device.op_launch_seconds > 0,
            notes=notes,
        )
        return graph, with_reserve(trace, waiting_bytes)

    def context_key(self, call: int) -> Any:
        before = self._trailing_work.get(call - 1, _NOTHING)
        return before if before != _NOTHING else None, self._trailing_work.get(call), self._gradients.place(call)

    def may_run_twice(self, layer: Layer) -> bool:
        return layer.structure not in self._differs

    def has_backward(self, call: int) -> bool:
        return call not in self._without_backward

    def _is_differentiable(self, run: ProfilingPass, call: int) -> bool:
        return self._representative(run, call) in run.backward and call not in run.without_grad

    def _notes(self) -> Iterator[str]:
        for maker, readers in list(self._hidden.of_tensors())[:1]:
            path = self._path or []
            yield (
                f"{self._label(path, min(readers))} reads a tensor that {self._label(path, maker)} made and that is "
                "none of its arguments, so the activations "
                "of all layers are kept. To have them recomputed or sent to the host, pass the tensor as an argument, "
                "or in a dict or list that is one."
            )
            return
        for structure, difference in self._differs.items():
            names = [layer.name for layer in self.layers if layer.structure == structure]
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            what = f"a second run of the forward differs from the first ({difference.rstrip('.')})"
            yield f"{names[0]}{others}: {what}. These activations are kept or swapped, not recomputed."

    def must_run(self, call: int) -> bool:
        return call in self._to_run

    def _shared_gradients(self, discovery: ProfilingPass) -> SharedGradients:
        users: dict[int, set[int]] = {
            id(p): set(self._readers.get(id(p), ())) for p in self.model.parameters() if p.requires_grad
        }
        for call, layer in enumerate(discovery.layer_of):
            for param in self.layers[layer].module.parameters() if layer is not None else ():
                if param.requires_grad and call in discovery.without_grad:
                    users[id(param)].discard(call)
                elif param.requires_grad:
                    users[id(param)].add(call)
        representative = {call: self._representative(discovery, call) for call in range(len(discovery.layer_of))}
        weights = [sorted(v for v in calls if representative[v] in discovery.backward) for calls in users.values()]
        tensors = [
            [t.maker, *(v for v in t.calls if {v, representative[v]} & t.readers)]
            for t in discovery.arguments.shared
            if t.requires_grad
        ]
        hidden = [
            [maker, *(v for v in representative if v > maker and representative[v] in readers)]
            for maker, readers in self._hidden.of_tensors()
        ]
        return SharedGradients([*weights, *tensors, *hidden])

    def _join_stages(self, discovery: ProfilingPass) -> bool:
        joined = stages_to_join(self.layers, discovery.layer_of, discovery.continues_in)
        self.layers = with_stages_joined(self.layers, joined)
        return bool(joined)

    def _set_aside(self, discovery: ProfilingPass) -> bool:
        """Lists that only branch off a stack (vision features on their way to deep layers) are no stacks: their modules
        run as part of the layer before.

        Else two layers would keep one input, and what either may do with it would depend on the other.
        """
        asides: set[str] = set()
        on = {self._list_of(discovery, call) for call in discovery.continues_in}
        for earlier, later in discovery.shared_inputs:
            ends = [where for call in (earlier, later) if (where := self._list_of(discovery, call)) not in on]
            asides.update(ends[:1] if self._list_of(discovery, earlier) != self._list_of(discovery, later) else [])
        # Nor is a cell of single modules that runs again and again, as often as the data says.
        calls = Counter(discovery.layer_of)
        cells = [layer.stack for i, layer in enumerate(self.layers) if calls[i] > 1 and not is_composite(layer.module)]
        asides.update(stack for stack in cells if isinstance(self.model.get_submodule(stack), nn.Sequential))
        spill_device = [layer for layer in self.layers if layer.stack in asides]
        self.layers = tuple(layer for layer in self.layers if layer not in spill_device)
        with _out_of_memory(lambda: f"the weights of {spill_device[-1].name}"):
            for layer in spill_device:
                self.bring(layer.module)
        return bool(spill_device)

    def _list_of(self, run: ProfilingPass, call: int) -> str:
        layer = run.layer_of[call]
        assert layer is not None
        return self.layers[layer].stack

    def _find_trailing_work(self, discovery: ProfilingPass, call: int) -> Any:
        """What runs between this layer and the next call: nothing, or weights of these shapes."""
        layer = discovery.layer_of[call]
        assert layer is not None
        own = {id(param) for param in self.layers[layer].module.parameters()}
        others = [p for p in self.model.parameters() if id(p) not in own and call in self._readers.get(id(p), ())]
        return call in discovery.continues_in, tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in others)

    # Running.

    def _discover(self) -> ProfilingPass:
        """Where memory is too small to compare second runs as well, only what a first run shows of them counts."""
        self._readers, self._reads_outside_module, self._path, self._hidden, self._detours, self.left = (
            {},
            set(),
            None,
            HiddenReads(),
            set(),
            {},
        )
        done = self.progress.done
        try:
            return self._run("keep", discovery=True)
        except DeviceOutOfMemory:
            if not self.compares:
                raise
        self.progress.done = done
        gc.collect()  # as in _measure
        self.compares = False
        return self._discover()

    def _measure(self, strategy: Strategy) -> ProfilingPass:
        done = self.progress.done
        try:
            return self._run(strategy)
        except DeviceOutOfMemory:
            if strategy not in SENDS or self.spill_device.type == "cpu":
                raise
        self.progress.done = done  # what follows is the same pass
        gc.collect()  # the exception is gone, and with it the frames that held activations
        self.spill_device = torch.device("cpu")
        return self._run(strategy)

    def _run(self, strategy: Strategy, *, discovery: bool = False) -> ProfilingPass:
        with self.device.meter() as meter:
            if isinstance(meter, Observer):
                meter.cost_of = partial(compute_seconds, self.device.spec) if self.device.is_simulated else None
            run = ProfilingPass(self, strategy, meter, discovery=discovery)
            if not discovery:
                self._once(run)
                return run
            reader, tracker = Observer(), BlockTracker(self.model, run)
            reader.on_read = lambda tensor: self._reads(tensor, run, tracker)
            push_mode(reader)
            try:
                self._once(run, tracker)
            finally:
                remove_mode(reader)
            self._detours = tracker.detours
        return run

    def _reads(self, tensor: Tensor, run: ProfilingPass, tracker: BlockTracker) -> None:
        if not run.is_forward or self._is_bringing:
            return
        call = len(run.layer_of) - 1
        params = self._parameters_in(tensor)
        if not params and tensor.layout == torch.strided:
            self._hidden.look_at(tensor, run, tracker.made_in)
        for param in params:
            if param is not tensor and call in self._readers.get(id(param), ()):
                continue  # a view that the layer was given: see `takes`
            self._readers.setdefault(id(param), set()).add(call)
            layer = run.layer_of[call]
            around = [*tracker.running, *(self.layers[layer].module.modules() if layer is not None else ())]
            if not any(own is param for module in around for own in module._parameters.values()):
                self._reads_outside_module.add(call)

    def takes(self, call: int, tensors: list[Tensor]) -> None:
        """A view of a weight among a layer's inputs (half of an embedding table as positions): the layer reads the
        weight, whether or not it is skipped.
        """
        for tensor in tensors:
            for param in self._parameters_in(tensor):
                self._readers.setdefault(id(param), set()).add(call)

    def _parameters_in(self, tensor: Tensor) -> Collection[Tensor]:
        if isinstance(tensor, nn.Parameter):
            return (tensor,)
        return self._over.get(storage_id(tensor.untyped_storage()), ()) if tensor.layout == torch.strided else ()

    def _time(self, strategy: Strategy) -> ProfilingPass:
        """What calls compute, with the issuing thread ahead, and how long that takes over them: see [Note: The thread
        that issues] in hardware/lanes.py.
        """
        run, again = ProfilingPass(self, strategy, None), ProfilingPass(self, strategy, None, ahead=False)
        self._once(run)
        self._once(again)
        run.phases.at_best(again.phases)
        run.phases.slow_down(self.device.spec.sustained_clock_ratio)
        return run

    def _once(self, run: ProfilingPass, tracker: BlockTracker | None = None) -> None:
        tracker = tracker or BlockTracker(self.model, run)
        tracker.attach(self.layers, looks_around=run.discovery or bool(self._detours))
        drop = [
            p.register_post_accumulate_grad_hook(run.takes_gradient) for p in self.model.parameters() if p.requires_grad
        ]
        try:
            with _out_of_memory(
                lambda: self._label(run.layer_of, len(run.layer_of) - 1) if run.layer_of else "its inputs"
            ):
                run.phases.begin()
                loss, outputs = self._loss(run)
                if loss is not None:
                    if self.loss is not None:
                        run.phases.begin_backward()
                    loss.backward()
                run.phases.finish()
                del loss, outputs
        finally:
            tracker.detach()
            for handle in drop:
                handle.remove()
        if self._path is not None and run.layer_of != self._path:
            found = f"it ran {len(run.layer_of)} blocks where it had run {len(self._path)}, or others"
            do = "Turn off what drops layers at random until the model is prepared; training may drop them"
            raise ModelUnsupported(
                tell("a model takes the same way through its layers every time that it is looked at", found, do)
            )
        self._path = run.layer_of
        self._require_own_memory(compares_values=run.discovery)

    def _require_own_memory(self, *, compares_values: bool) -> None:
        """Parameters are views into the engine's buffers: a value that the model's code puts elsewhere would be
        lost.
        """
        for name, param in self.model.named_parameters():
            if param in self._storages and storage_id(param.untyped_storage()) != self._storages[param]:
                raise ModelUnsupported(
                    f"{name}: the model's forward replaces the data of this parameter, which outsize keeps in a buffer "
                    "of its own. Write new values between steps, inside `with engine.gathered(name)`, or train this "
                    "model "
                    "without outsize."
                )
            if compares_values and param in self._versions and self._has_other_values(param):
                raise ModelUnsupported(
                    f"{name}: the model's forward writes this parameter (as nn.Embedding(max_norm=...) and codebooks "
                    "do), and a plan may stream it from "
                    "the host, where the write would be lost. Keep it as a buffer, or write it between steps."
                )

    def _has_other_values(self, param: nn.Parameter) -> bool:
        """Whether it was written. Large ones on another device are compared only if their version tells of a write,
        which may have been of the same values (PEFT's parametrizations)."""
        if param in self._saved:
            saved, now = (
                torch.empty(0, dtype=torch.uint8).set_(storage) for storage in (self._saved[param], bytes_of(param))
            )
            return not torch.equal(saved, now)
        original = self._brought.get(param)
        if original is None or is_unmaterialized(original) or detect_fake_mode() is not None:
            return False
        if param.nbytes > _MOST_COMPARED_BYTES and param._version == self._versions[param]:
            return False
        return not torch.equal(original.nan_to_num(), param.data.to(original.device).nan_to_num())

    def _loss(self, run: ProfilingPass) -> tuple[Tensor | None, Any]:
        """The loss, and what its loop holds beside it: the batch, whose containers a forward may write into, and where
        the model makes the loss, its outputs."""
        batch = map_tensors(lambda t: t, self.batch)  # every pass begins with the user's, as they are
        if self.loss is not None:
            loss = self.loss(self.model, batch)
            run.phases.returned()
            return loss, batch
        outputs = call_model(self.model, batch)
        run.phases.returned()
        return loss_of(outputs), (outputs, batch)

    @contextmanager
    def _model_untouched(self) -> Iterator[None]:
        inside = {id(p) for layer in self.layers for p in layer.module.parameters()}
        rng = torch.get_rng_state()
        device_rng = self.device.rng_state()
        python_rng, numpy_rng = random.getstate(), np.random.get_state()
        owned = [
            (module, name, b) for module in self.model.modules() for name, b in module._buffers.items() if b is not None
        ]
        buffers = [(module, name, b, b.data, b.clone()) for module, name, b in owned]
        module_state = ModuleState(self.model)
        grads = [(p, p.grad) for p in self.model.parameters()]
        values = [(p, p.data) for p in self.model.parameters()]
        generators = [(generator, generator.get_state()) for generator in generators_of(self.model)]
        for param, _ in grads:
            param.grad = None
        cached = turn_caches_off(self.model)
        dropped = turn_layerdrop_off(self.model)
        # As the engine does in training: casts of weights are made where they are used, and die there.
        autocast_cache = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        outside = nn.ParameterList([p for p in self.model.parameters() if id(p) not in inside])
        try:
            with _out_of_memory(lambda: "the weights outside of layers"):
                self.bring(outside)
                for buffer in self.model.buffers():
                    buffer.data = buffer.data.to(self.device.torch_device)
            self._static |= {storage_id(b.untyped_storage()) for b in self.model.buffers()}
            with torch.enable_grad():
                yield
        finally:
            for param, data in values:
                param.data = data
            for param, bytes_before in self._saved.items():
                if self._has_other_values(param):
                    bytes_of(param).copy_(bytes_before)
            self._brought.clear()
            self._over.clear()
            self._saved.clear()
            self._versions.clear()
            for generator, state in generators:
                generator.set_state(state)
            for param, grad in grads:
                param.grad = grad
            with torch.no_grad():
                for module, name, buffer, data, saved in buffers:
                    module._buffers[name] = buffer
                    buffer.data = data
                    # An expanded buffer cannot have been written to, nor can it be.
                    if all(stride or size == 1 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
                        buffer.copy_(saved)
            torch.set_rng_state(rng)
            torch.set_autocast_cache_enabled(autocast_cache)
            turn_caches_on(cached)
            turn_layerdrop_on(dropped)
            module_state.restore()
            random.setstate(python_rng)
            np.random.set_state(numpy_rng)
            self.device.set_rng_state(device_rng)

    # Reading off.

    def _graph(self, run: ProfilingPass) -> BlockGraph:
        names = [n for n, _ in self.model.named_parameters()]
        params = dict(self.model.named_parameters())
        canonical = {id(p): n for n, p in params.items()}
        labels = [self._label(run.layer_of, v) for v in range(len(run.layer_of))]
        order = list(dict.fromkeys(labels))
        members: dict[str, dict[str, None]] = {label: {} for label in order}
        for call, layer in enumerate(run.layer_of):
            if layer is not None:
                members[labels[call]].update(
                    dict.fromkeys(canonical[id(p)] for p in self.layers[layer].module.parameters())
                )
        for name in names:
            for call in sorted(self._readers.get(id(params[name]), ())):
                members[labels[call]].setdefault(name)
        blocks = []
        for label in order:
            layer = run.layer_of[labels.index(label)]
            kind = (
                "layer"
                if layer is not None
                else "head"
                if label == "head"
                else "stem"
                if label == "stem"
                else "between"
            )
            structure = self.layers[layer].structure if layer is not None else label
            blocks.append(Block(name=label, kind=kind, structure=structure, params=tuple(members[label])))  # type: ignore[arg-type]
        graph = BlockGraph(
            blocks=tuple(blocks),
            calls=tuple(order.index(label) for label in labels),
            has_backward=tuple(self._representative(run, v) in run.backward for v in range(len(labels))),
            params=tuple(
                Param(
                    name=n, shape=tuple(p.shape), dtype=str(p.dtype).removeprefix("torch."), trainable=p.requires_grad
                )
                for n, p in params.items()
            ),
            buffer_bytes=sum(
                {storage_id(b.untyped_storage()): b.untyped_storage().nbytes() for b in self.model.buffers()}.values()
            ),
            reads_outside_module=tuple(sorted(self._reads_outside_module)),
            detours=tuple(sorted(self._detours)),
        )
        return replace(graph, without_grad=read_without_grad(self.model, graph, run))

    def _label(self, layer_of: list[int | None], call: int) -> str:
        layer = layer_of[call]
        if layer is not None:
            return self.layers[layer].name
        if call == 0:
            return "stem"
        if call == len(layer_of) - 1:
            return "head"
        following = next(i for i in layer_of[call:] if i is not None)
        return f"between:{self.layers[following].name}" + (f"#{call}" if self._repeats(layer_of, call) else "")

    def _repeats(self, layer_of: list[int | None], call: int) -> bool:
        """A list that runs several times has several regions before its first layer."""
        after = [layer_of[v + 1] for v in range(1, len(layer_of) - 1) if layer_of[v] is None]
        return after.count(layer_of[call + 1]) > 1

    def _representative(self, run: ProfilingPass, call: int) -> int:
        """The call that really ran in the place of this one: itself, or the latest equal one before it."""
        if call not in run.skipped:
            return call
        return next(v for v in range(call - 1, -1, -1) if v not in run.skipped and run.keys.get(v) == run.keys[call])

    def _issuing(
        self, clocks: dict[Strategy, ProfilingPass], strategy: Strategy, representative: int
    ) -> dict[str, Any]:
        """What of a call is the issuing thread's, where there is one beside the device. Packing what is swapped takes
        it about as long as making it again.
        """
        if not self.device.is_async:
            return {}
        phases = clocks["keep" if strategy == "keep" else "recompute"].phases
        forward, back = phases.forward[representative], phases.backward.get(representative) or Phase()
        return {
            "forward_launch_seconds": forward.op_launch_seconds,
            "backward_launch_seconds": back.op_launch_seconds,
            "forward_syncs_host": forward.waits,
            "backward_syncs_host": back.waits,
        }

    def _works(
        self, passes: dict[Strategy, ProfilingPass], timed: dict[Strategy, ProfilingPass], call: int
    ) -> dict[str, Work]:
        run = passes["keep"]
        layer = run.layer_of[call]
        strategies = (
            STRATEGIES if layer is not None and self._is_differentiable(run, call) and not self._hidden else ("keep",)
        )
        if layer is not None and not self.may_run_twice(self.layers[layer]):
            strategies = tuple(s for s in strategies if s not in RUNS_TWICE)
        works: dict[str, Work] = {s: w for s in strategies if (w := self._work(passes, timed, s, call)) is not None}
        if layer is None and call > 0 and run.layer_of[call - 1] is not None:
            others = {
                after(s): replace(works["keep"], **bytes_of_phases(other.phases, call)) for s, other in passes.items()
            }
            works |= {name: work for name, work in others.items() if work != works["keep"]}
        return works

    def _work(
        self, passes: dict[Strategy, ProfilingPass], timed: dict[Strategy, ProfilingPass], strategy: Strategy, call: int
    ) -> Work | None:
        run = passes[strategy]
        representative = self._representative(run, call)
        forward = run.phases.forward[representative]
        if strategy in SENDS and not forward.sent_bytes:
            return None
        clock = timed["keep" if strategy in ("keep", "swap") else "recompute"] if timed else run
        ahead, back = clock.phases.forward[representative], clock.phases.backward.get(representative) or Phase()
        return Work(
            forward_seconds=ahead.seconds,
            backward_seconds=back.seconds,
            **self._issuing(timed or passes, strategy, representative),
            **bytes_of_phases(run.phases, representative),
            sent_bytes=forward.sent_bytes,
            released_bytes=forward.released_bytes,
        )
