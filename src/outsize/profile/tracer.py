"""Tracer: profiles a model on one real batch, and makes its BlockGraph and ModelTrace.

Of each kind of layer only the first two calls run, and the last of its list (memory differs at the ends of a list). The
others are skipped and get the numbers of the second. Calls that share trainable weights with others are of one kind
only if they have the same position among the users: see profile/sharing.py. What runs between two layers counts as part
of the earlier one, and layers with such trailing work all run. A discovery pass first finds the trailing work, the
lists that are no stacks, and the layers that cannot be recomputed. Then each activation strategy is measured in a pass
of its own, through the code that the engine runs. The model is as before afterwards: weights, gradients, buffers,
random state.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from outsize.activation.attention import saves_attention
from outsize.activation.tokenwise import TileSearch
from outsize.base.errors import DeviceOutOfMemory, ModelUnsupported
from outsize.base.log import log
from outsize.base.records import fingerprint
from outsize.device.device import Device
from outsize.device.observer import Observer, push_mode, remove_mode
from outsize.device.sdp_kernel import explaining_missing_kernel
from outsize.hardware.lanes import compute_seconds
from outsize.model.block_tracker import BlockTracker
from outsize.model.discover import Layer, stages_to_join, with_stages_joined
from outsize.model.graph import BlockGraph
from outsize.model.stacks import is_composite
from outsize.model.state import ModuleState
from outsize.model.strategies import STRATEGIES, STRATEGY, Strategy, StrategyRecord
from outsize.model.tensors import map_tensors
from outsize.model.weights import Weights
from outsize.model.work import Work
from outsize.profile.attention_kernels import kernels_text, timed_on
from outsize.profile.blocks import block_name, build_graph
from outsize.profile.calling import Loss, batch_shapes, call_model, loss_of, require_usable_loss
from outsize.profile.gradient_order import bytes_of_waiting_gradients, require_known_order
from outsize.profile.kept_state import KeptState
from outsize.profile.lifetimes import SharedTensors
from outsize.profile.merge import with_reserve
from outsize.profile.phases import Phase, bytes_of_phases
from outsize.profile.placed_weights import PlacedWeights
from outsize.profile.profiling_mode import profiling_mode
from outsize.profile.profiling_pass import ProfilingPass
from outsize.profile.sharing import SharedGradients, calls_to_run
from outsize.profile.trace import ModelTrace, after
from outsize.profile.weight_reads import WeightReads
from outsize.progress import Bar

_NO_TRAILING_WORK = (True, ())
"""A layer's output is the next layer's input, and no weights are read in between."""


@contextmanager
def _naming_out_of_memory(where: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceOutOfMemory(
            f"Profiling needs more than the device's memory at this batch: it ran out at {where()}. Use a smaller "
            "batch or shorter sequences; the model's own loss over a large vocabulary is often the largest part."
        ) from error


class Tracer:
    """Runs the passes, and is their PassContext."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        layers: tuple[Layer, ...],
        device: Device,
        weights: Weights | None = None,
        loss: Loss | None = None,
        *,
        tile_tokens: int = 0,
    ):
        """`weights`: the source of values of unmaterialized parameters. `loss`: computes the loss if the training loop
        does not use the model's own. `tile_tokens`: length of the tiles of long rows (activation/tiles.py). 0: none.
        """
        self.model, self.batch, self.layers, self.device, self.loss = model, batch, layers, device, loss
        # Allocations between two calls are not measured, so the device itself can hold offloaded activations, and the
        # host needs no memory for them.
        self.spill_device = device.torch_device
        self.progress = Bar("Profiling the model")
        self.kept: KeptState
        self.compares = True
        self._state: ModuleState
        self._more_at_first: dict[int, int] = {}
        """By call: bytes by which the peak of its first forward is higher."""
        self._tile_tokens = tile_tokens
        self._tiles: TileSearch | None = None
        self._weights = PlacedWeights(model, device, weights)
        self._reads = WeightReads(self._weights)
        self._layer_of: list[int | None] | None = None
        """By call: the layer. Equal in all passes."""
        self._reached: set[int] | None = None
        """The calls that a gradient reaches. Equal in all passes."""
        self._trailing_work: dict[int, Any] = {}
        self._gradients = SharedGradients(())
        self._to_run: set[int] = set()
        """Calls that a measuring pass does not skip."""
        self._side_outputs: set[int] = set()
        self._without_backward: set[int] = set()
        self._differences: dict[str, str] = {}
        """By structure of a layer: how a second run of its forward differs from the first. Such a layer is never
        recomputed.
        """

    def trace(self) -> tuple[BlockGraph, ModelTrace]:
        with ExitStack() as contexts:
            self._state = contexts.enter_context(profiling_mode(self.model, self.device))
            for context in (self._weights.restored_at_end(), self.progress):
                contexts.enter_context(context)
            contexts.callback(self._end_tiles)
            with _naming_out_of_memory(lambda: "the weights outside of layers"):
                self._weights.place_outside_of(self.layers)
            discovery = self._discover()
            if self._join_stages(discovery):
                discovery = self._discover()
            if self._drop_lists_that_are_no_stacks(discovery):
                discovery = self._discover()
            if self._must_compare_more(discovery):
                discovery = self._discover()
            strategies = self._strategies()
            to_time: tuple[Strategy, ...] = ("keep", "recompute") if not self.device.is_simulated else ()
            num_passes = len(strategies) + (1 + self.device.is_async) * len(to_time)
            self.progress.total = self.progress.done + num_passes * len(discovery.layer_of)
            self._use(discovery)
            waiting_bytes = bytes_of_waiting_gradients(self.model, self.layers, discovery, self._reads.readers)
            passes = {strategy.name: self._measure(strategy.name) for strategy in strategies}
            timed = {strategy: self._time(strategy) for strategy in to_time}
            kernels = "" if self.device.is_simulated else self._kernels_text(discovery)
            if self.compares:  # otherwise the first forward has copies of the model's state
                first, later = discovery.forward_peaks(), passes["keep"].forward_peaks()
                self._more_at_first = self.kept.more_in_first_forward(first, later, discovery.layer_of)
        run = passes["keep"]
        graph = build_graph(
            self.model,
            self.layers,
            run,
            self._reads.readers,
            reads_outside_module=self._reads.outside_module,
            side_outputs=self._side_outputs,
        )
        require_known_order(self.model, graph, run, self._reads.readers)
        notes = tuple(self._notes())
        tiled = self._tiles.names if self._tiles is not None else ()
        for note in notes:
            log.warning("%s", note)
        shared = SharedTensors({s: each.lifetimes for s, each in passes.items()}, run.keys, run.representative)
        calls = tuple(self._works(passes, timed, call) for call in range(len(graph.calls)))
        seconds = (
            "estimated from FLOPs and bytes" if self.device.is_simulated else f"measured on {self.device.spec.name}"
        )
        trace = ModelTrace(
            graph=fingerprint(graph),
            inputs=batch_shapes(self.batch),
            calls=calls,
            shared=(*shared.records(calls), *self.kept.records(len(calls))),
            held_bytes=run.phases.held_bytes + self.kept.num_bytes(),
            provenance=f"seconds {seconds}, bytes measured",
            counts_launches=self.device.op_launch_seconds > 0,
            notes=notes,
            attention=kernels,
            tile_tokens=self._tile_tokens if tiled else 0,
            tiled=tiled,
        )
        return graph, with_reserve(trace, waiting_bytes)

    def _kernels_text(self, discovery: ProfilingPass) -> str:
        timer = partial(timed_on, self.device) if self.device.is_gpu else None
        return kernels_text(discovery.attention_calls, timer)

    def _notes(self) -> Iterator[str]:
        if self._reads.hiding_operators and self.device.observes_by_mode:
            yield (
                f"{', '.join(self._reads.hiding_operators)}: operators outside of torch that read weights. What they "
                "allocate inside is not counted here; prepare measures it on a GPU, where the plan may need more."
            )
        for maker, readers in self._reads.hidden.makers_and_readers():
            layer_of = self._layer_of or []
            yield (
                f"{block_name(self.layers, layer_of, min(readers))} reads a tensor that "
                f"{block_name(self.layers, layer_of, maker)} made and that is none of its arguments, so the "
                "activations of all layers are kept. To have them recomputed or sent to the host, pass the tensor as "
                "an argument, or in a dict or list that is one."
            )
            return
        for structure, difference in self._differences.items():
            names = [layer.name for layer in self.layers if layer.structure == structure]
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            what = f"a second run of the forward differs from the first ({difference.rstrip('.')})"
            yield f"{names[0]}{others}: {what}. These activations are kept or swapped, not recomputed."

    # For the passes: see PassContext.

    def place(self, module: nn.Module) -> None:
        self._weights.place(module)

    def is_static(self, tensor: Tensor) -> bool:
        return self._weights.is_static(tensor)

    def note_arguments(self, call: int, tensors: list[Tensor]) -> None:
        self._reads.note_arguments(call, tensors)

    def context_key(self, call: int) -> Any:
        before = self._trailing_work.get(call - 1, _NO_TRAILING_WORK)
        return (
            before if before != _NO_TRAILING_WORK else None,
            self._trailing_work.get(call),
            self._gradients.position(call),
            self.has_backward(call),
        )

    def may_run_twice(self, layer: Layer) -> bool:
        return layer.structure not in self._differences

    def has_backward(self, call: int) -> bool:
        return call not in self._without_backward

    def must_run(self, call: int) -> bool:
        return call in self._to_run

    # What the discovery pass shows.

    def _discover(self) -> ProfilingPass:
        """Run a discovery pass: with a second run of each layer if memory suffices, else without."""
        self._reads, self._layer_of, self._side_outputs = WeightReads(self._weights), None, set()
        self._reached = None
        self._state.restore()
        with _naming_out_of_memory(lambda: "the buffers"):
            self._weights.place_buffers()
        self.kept = KeptState(self.model, self.layers)
        self._find_tiles_anew()
        done = self.progress.done
        try:
            run = self._run("keep", is_discovery=True)
            self.kept.outside.forward_ran(self.device.torch_device, self.is_static)
            return run
        except DeviceOutOfMemory:
            if not self.compares:
                raise
        self.progress.done = done
        gc.collect()  # the exception's frames held activations, as in _measure
        self.compares = False
        return self._discover()

    def _end_tiles(self) -> None:
        if self._tiles is not None:
            self._tiles.detach()

    def _find_tiles_anew(self) -> None:
        self._end_tiles()
        if self._tile_tokens:
            self._tiles = TileSearch(self.model, self.layers, self._tile_tokens)
            self._tiles.attach()

    def _must_compare_more(self, discovery: ProfilingPass) -> bool:
        """Whether only calls without a backward ran of a kind of layer (a pass whose outputs are detached comes first),
        so that no second run was compared. The next discovery pass then runs one that has a backward.
        """
        structures = {call: self.layers[i].structure for call, i in enumerate(discovery.layer_of) if i is not None}
        compared = {structures[call] for call in discovery.backward if call in structures}
        first: dict[str, int] = {}
        for call in sorted(discovery.reached & structures.keys()):
            if structures[call] not in compared:
                first.setdefault(structures[call], call)
        self._to_run = set(first.values())
        return bool(first)

    def _use(self, discovery: ProfilingPass) -> None:
        self._differences = discovery.differences
        self._trailing_work = {
            call: self._trailing_work_of(discovery, call)
            for call, layer in enumerate(discovery.layer_of)
            if layer is not None
        }
        self._gradients = self._shared_gradients(discovery)
        self._without_backward = {call for call in discovery.keys if not _is_differentiable(discovery, call)}
        keys = {call: (key, self.context_key(call)) for call, key in discovery.keys.items()}
        always = [call for call, trailing in self._trailing_work.items() if trailing != _NO_TRAILING_WORK]
        self._to_run = calls_to_run(keys, always, self._gradients)

    def _trailing_work_of(self, discovery: ProfilingPass, call: int) -> Any:
        """Whether the layer's output is the next layer's input, and the shapes of weights that are read in between."""
        layer = discovery.layer_of[call]
        assert layer is not None
        own = {id(param) for param in self.layers[layer].module.parameters()}
        others = [p for p in self.model.parameters() if id(p) not in own and call in self._reads.of(p)]
        return call in discovery.continues_in, tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in others)

    def _shared_gradients(self, discovery: ProfilingPass) -> SharedGradients:
        users: dict[int, set[int]] = {id(p): set(self._reads.of(p)) for p in self.model.parameters() if p.requires_grad}
        for call, layer in enumerate(discovery.layer_of):
            for param in self.layers[layer].module.parameters() if layer is not None else ():
                if param.requires_grad and call in discovery.without_grad:
                    users[id(param)].discard(call)
                elif param.requires_grad:
                    users[id(param)].add(call)
        representative = {call: discovery.representative(call) for call in range(len(discovery.layer_of))}
        weights = [sorted(calls & discovery.reached) for calls in users.values()]
        tensors = [
            [t.maker, *(v for v in t.calls if {v, representative[v]} & t.readers)]
            for t in discovery.arguments.found
            if t.requires_grad
        ]
        hidden = [
            [maker, *(v for v in representative if v > maker and representative[v] in readers)]
            for maker, readers in self._reads.hidden.makers_and_readers()
        ]
        states = [sorted(calls) for calls in discovery.arguments.inputs_read_by.values()]
        return SharedGradients([*weights, *tensors, *hidden, *states])

    def _join_stages(self, discovery: ProfilingPass) -> bool:
        joined = stages_to_join(self.layers, discovery.layer_of, discovery.continues_in)
        self.layers = with_stages_joined(self.layers, joined)
        return bool(joined)

    def _drop_lists_that_are_no_stacks(self, discovery: ProfilingPass) -> bool:
        """A list that only branches off a stack (vision features for deep layers) is no stack: its modules run as part
        of the layer before.

        Otherwise two layers would hold one input, and what one may do with it would depend on the other.
        """
        dropped: set[str] = set()
        continued = {self._list_of(discovery, call) for call in discovery.continues_in}
        for pair in discovery.shared_inputs:
            lists = [self._list_of(discovery, call) for call in pair]
            ends = [each for each in lists if each not in continued]
            dropped.update(ends[:1] if lists[0] != lists[1] else [])
        # A cell of single modules that runs several times is no stack either: the data decides how often it runs.
        num_calls = Counter(discovery.layer_of)
        repeated = [layer for i, layer in enumerate(self.layers) if num_calls[i] > 1 and not is_composite(layer.module)]
        lists = [layer.stack for layer in repeated]
        dropped.update(each for each in lists if isinstance(self.model.get_submodule(each), nn.Sequential))
        no_layers = [layer for layer in self.layers if layer.stack in dropped]
        self.layers = tuple(layer for layer in self.layers if layer not in no_layers)
        with _naming_out_of_memory(lambda: f"the weights of {no_layers[-1].name}"):
            for layer in no_layers:
                self.place(layer.module)
        return bool(no_layers)

    def _list_of(self, run: ProfilingPass, call: int) -> str:
        layer = run.layer_of[call]
        assert layer is not None
        return self.layers[layer].stack

    # Running.

    def _measure(self, strategy: Strategy) -> ProfilingPass:
        done = self.progress.done
        try:
            return self._run(strategy)
        except DeviceOutOfMemory:
            if not STRATEGY[strategy].sends or self.spill_device.type == "cpu":
                raise
        self.progress.done = done  # the same pass runs again
        gc.collect()  # the exception is gone, and with it the frames that held activations
        self.spill_device = torch.device("cpu")
        return self._run(strategy)

    def _run(self, strategy: Strategy, *, is_discovery: bool = False) -> ProfilingPass:
        with self.device.meter() as meter:
            if isinstance(meter, Observer):
                meter.cost_of = partial(compute_seconds, self.device.spec) if self.device.is_simulated else None
            run = ProfilingPass(self, strategy, meter, is_discovery=is_discovery)
            tracker = BlockTracker(self.model, run)
            if not is_discovery:
                self._run_once(run, tracker)
                return run
            reader = Observer()
            reader.on_read = lambda func, tensor: self._reads.note_read(func, tensor, run, tracker)
            push_mode(reader)
            try:
                self._run_once(run, tracker)
            finally:
                remove_mode(reader)
            self._side_outputs = tracker.side_outputs
        return run

    def _strategies(self) -> list[StrategyRecord]:
        """Those that a layer may support, as the discovery pass shows."""
        has_attention = any(saves_attention(layer.module) for layer in self.layers)
        return [strategy for strategy in STRATEGIES if has_attention or not strategy.saves_attention_of]

    def _time(self, strategy: Strategy) -> ProfilingPass:
        """Time a strategy with the CPU running ahead and, on devices that run apart from the CPU, in a second pass that
        is synchronized before each phase. See [Note: The launching thread] in hardware/lanes.py.
        """
        run = ProfilingPass(self, strategy, None, ahead=True)
        self._run_once(run, BlockTracker(self.model, run))
        if self.device.is_async:
            synchronized = ProfilingPass(self, strategy, None, ahead=False)
            self._run_once(synchronized, BlockTracker(self.model, synchronized))
            run.phases.take_minimum(synchronized.phases)
        run.phases.scale_seconds(self.device.spec.sustained_clock_ratio)
        return run

    def _run_once(self, run: ProfilingPass, tracker: BlockTracker) -> None:
        tracker.attach(self.layers, finds_side_outputs=run.is_discovery or bool(self._side_outputs))
        hooks = [
            p.register_post_accumulate_grad_hook(run.gradient_completed)
            for p in self.model.parameters()
            if p.requires_grad
        ]
        try:
            with _naming_out_of_memory(lambda: self._last_block(run)), explaining_missing_kernel():
                run.phases.begin()
                loss, outputs = self._loss(run)
                if loss is not None:
                    if self.loss is not None:
                        run.phases.begin_loss_backward()
                    loss.backward()
                run.phases.finish()
                del loss, outputs
        finally:
            tracker.detach()
            for hook in hooks:
                hook.remove()
        if self._layer_of is not None and run.layer_of != self._layer_of:
            raise ModelUnsupported(
                f"The model runs its layers differently each time: {len(self._layer_of)} blocks in one pass, then "
                f"{len(run.layer_of)} blocks or others. Turn off what drops layers at random until the model is "
                "prepared; training may drop them."
            )
        self._layer_of = run.layer_of
        self._require_equal_backward(run)
        self._weights.require_unchanged(compares_values=run.is_discovery)

    def _require_equal_backward(self, run: ProfilingPass) -> None:
        if self._reached is not None and (others := self._reached ^ run.reached):
            raise ModelUnsupported(
                f"A gradient reaches {block_name(self.layers, run.layer_of, min(others))} in one pass of the profiling "
                "run and not in another. Turn off what skips it at random until the model is prepared; training may "
                "skip it."
            )
        self._reached = run.reached

    def _last_block(self, run: ProfilingPass) -> str:
        return block_name(self.layers, run.layer_of, len(run.layer_of) - 1) if run.layer_of else "its inputs"

    def _loss(self, run: ProfilingPass) -> tuple[Tensor | None, Any]:
        """The loss, and what a training loop holds with it: the batch, whose containers a forward may write into, and
        the outputs if the model makes the loss."""
        batch = map_tensors(lambda t: t, self.batch)  # every pass begins with unchanged containers
        if self.loss is not None:
            run.phases.begin_loss()
            loss = self.loss(self.model, batch)
            if loss is not None and run.is_discovery:
                require_usable_loss(self.model, loss, run.forward_nodes)
            run.phases.forward_returned()
            return loss, batch
        outputs = call_model(self.model, batch)
        run.phases.forward_returned()
        return loss_of(outputs), (outputs, batch)

    # Results.

    def _works(
        self, passes: dict[Strategy, ProfilingPass], timed: dict[Strategy, ProfilingPass], call: int
    ) -> dict[str, Work]:
        run = passes["keep"]
        layer = run.layer_of[call]
        strategies = [STRATEGY["keep"]]
        if layer is not None and _is_differentiable(run, call) and not self._reads.hidden:
            strategies = [STRATEGY[name] for name in passes if self._supports(STRATEGY[name], run, call)]
        works: dict[str, Work] = {
            s.name: work for s in strategies if (work := self._work(passes, timed, s.name, call)) is not None
        }
        if layer is None and call > 0 and run.layer_of[call - 1] is not None:
            others = {after(s): replace(works["keep"], **self._bytes(other, call)) for s, other in passes.items()}
            works |= {name: work for name, work in others.items() if work != works["keep"]}
        return works

    def _supports(self, strategy: StrategyRecord, run: ProfilingPass, call: int) -> bool:
        measured = run.layer_of[run.representative(call)]
        assert measured is not None
        layer = self.layers[measured]
        return (not strategy.recomputes or self.may_run_twice(layer)) and (
            not strategy.saves_attention_of or saves_attention(layer.module)
        )

    def _work(
        self, passes: dict[Strategy, ProfilingPass], timed: dict[Strategy, ProfilingPass], strategy: Strategy, call: int
    ) -> Work | None:
        run, record = passes[strategy], STRATEGY[strategy]
        representative = run.representative(call)
        measured = run.phases.forward[representative]
        if record.sends and not measured.sent_bytes:
            return None
        clock = timed["recompute" if record.recomputes else "keep"] if timed else run
        forward, backward = clock.phases.forward[representative], clock.phases.backward.get(representative) or Phase()
        not_again = least = 0.0
        if timed and record.recomputes and representative in timed["keep"].phases.backward:
            # Computing more takes no less time: noise of a busy CPU must not choose recomputation where `keep` fits.
            keep = timed["keep"].phases
            kept_seconds = keep.forward[representative].seconds + keep.backward[representative].seconds
            least = kept_seconds - forward.seconds
        if timed and record.saves_attention_of:
            not_again = timed["keep"].attention_seconds(representative) * self.device.spec.sustained_clock_ratio
        return Work(
            forward_seconds=forward.seconds,
            backward_seconds=max(0.0, least, backward.seconds - not_again),
            **self._launches(timed or passes, strategy, representative),
            **self._bytes(run, call),
            sent_bytes=measured.sent_bytes,
            released_bytes=measured.released_bytes,
        )

    def _bytes(self, run: ProfilingPass, call: int) -> dict[str, Any]:
        found = bytes_of_phases(run.phases, run.representative(call))
        return found | {"forward_peak_bytes": found["forward_peak_bytes"] + self._more_at_first.get(call, 0)}

    def _launches(
        self, clocks: dict[Strategy, ProfilingPass], strategy: Strategy, representative: int
    ) -> dict[str, Any]:
        """Launch times and host syncs as fields of a Work, on devices that run apart from the CPU. Packing tensors for
        a swap takes the CPU about as long as recomputing them.
        """
        if not self.device.is_async:
            return {}
        phases = clocks["keep" if strategy == "keep" else "recompute"].phases
        forward, backward = phases.forward[representative], phases.backward.get(representative) or Phase()
        return {
            "forward_launch_seconds": forward.launch_seconds,
            "backward_launch_seconds": backward.launch_seconds,
            "forward_syncs_host": forward.syncs_host,
            "backward_syncs_host": backward.syncs_host,
        }


def _is_differentiable(run: ProfilingPass, call: int) -> bool:
    return call in run.reached and call not in run.without_grad
