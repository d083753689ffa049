"""Candidates: the decisions that the search considers. Each is a few counts, and `SearchSpace` turns counts into
decisions, bytes and a time bound.

Layers have their strategies in forward order, the last strategy first ([swap … offload … recompute … keep …]): late
layers keep, since their activations are freed first. A prefix of the chunks has resident weights (chunks that several
calls use come first, then forward order). A prefix in forward order has its optimizer state on the GPU, since the next
forward needs the first chunks first. Of the others, the first ones may have their state streamed, and the host updates
the rest.

If only a small part of the model is trainable (adapters, a last layer), it stays on the GPU: its chunks come first
among the weights, and counts are at least their number unless a pin is lower. The counts then determine how much of the
frozen weights is resident.

Bytes are the sum of three independent parts: weights (resident, depth), optimizer (optimizer, streamed_state,
host_update_interval) and activations (the strategies). Each part is computed once per value with Placement, slots and
ledger. The search asserts that the sum equals the estimate of the finished plan.
"""

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from outsize.hardware.lanes import copy_seconds, update_seconds
from outsize.hardware.spec import HardwareSpec
from outsize.layout.chunks import Chunk, ChunkLayout
from outsize.layout.slots import assign_slots, call_intervals
from outsize.model.graph import BlockGraph
from outsize.model.strategies import STRATEGIES, STRATEGY, Mix, Strategy, choices
from outsize.planner.memory import activation_peak
from outsize.profile.trace import ModelTrace
from outsize.schedule.actions import Action, Kind, action_seconds
from outsize.schedule.placement import Placement
from outsize.schedule.plan import Decision, Home, Homes, StepConfig
from outsize.schedule.schedule import compile_schedule

DEPTHS = (0, 1, 2, 3)
MAX_HOST_UPDATE_INTERVAL = 8
MAX_MIXES = 500
"""Up to this number, all mixes of strategies are compared for the minimum memory; beyond it, those of two strategies.
"""

STAYING_SHARE = 0.1
"""Up to this share of the weights' bytes, trainable weights stay on the GPU with their gradients and optimizer state.
Together these take at most eight times the trainable weights (bf16 with fp32 gradients: 16 bytes a parameter, not 2),
which is less than the frozen weights. On the host, they would add small copies and host updates to every block."""

LARGE = 1.5
"""A chunk of more than this multiple of the median's bytes is large."""


def with_more(mix: Mix, more: Mapping[int | None, int]) -> Mix:
    """The mix with more layers, or fewer, by index of the strategy."""
    return tuple(count + more.get(i, 0) for i, count in enumerate(mix))


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A decision as numbers of chunks and layers. `SearchSpace.decision` says which ones."""

    resident: int
    """Chunks with resident weights."""
    optimizer: int
    """Chunks with their optimizer state on the GPU."""
    mix: Mix
    depth: int
    """Prefetch depth."""
    host_update_interval: int = 1
    streamed_state: int = 0
    """Chunks with streamed state."""


class ChunkCost(NamedTuple):
    """Seconds of the copies and updates of a chunk, and bytes of its update."""

    load: float
    send: float
    has_backward: bool
    grad_in: float = 0.0
    grad_out: float = 0.0
    gpu_update: float = 0.0
    host_update: float = 0.0
    update_bytes: int = 0
    state_bytes: int = 0
    # Of a chunk that is trained in coordinates.
    contract: float = 0.0
    merge: float = 0.0
    contract_in: float = 0.0
    constants_in: float = 0.0
    coordinates_in: float = 0.0


class SearchSpace:
    def __init__(
        self, graph: BlockGraph, layout: ChunkLayout, trace: ModelTrace, step_config: StepConfig, spec: HardwareSpec
    ):
        self.graph, self.layout, self.trace, self.step_config, self.spec = graph, layout, trace, step_config, spec
        self.layers = [
            v for v, b in enumerate(graph.calls) if graph.blocks[b].kind == "layer" and graph.has_backward[v]
        ]
        self.choices = choices()
        self.updates = [step_config.update_of(chunk) for chunk in layout.chunks]
        self.state_order = sorted(
            (c for c, update in enumerate(self.updates) if update), key=lambda c: (layout.chunks[c].calls[0], c)
        )
        staying = set(self.state_order if self._trains_little() else [])
        self.num_staying = len(staying)
        """How many chunks of `weight_order` and of `state_order` are on the GPU in every plan without pins: all
        trainable ones, or none.
        """
        shared = {chunk.index for chunk in layout.chunks if len(chunk.calls) > 1}
        self.weight_order = sorted(
            range(len(layout.chunks)), key=lambda c: (c not in staying, c not in shared, layout.chunks[c].calls[0], c)
        )
        self._supported: dict[tuple[int, Strategy], bool] = {}
        self._mixes: dict[Mix, tuple[Strategy, ...] | None] = {}
        self._weights: dict[tuple[int, int], tuple[int, int]] = {}
        self._states: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._homes: dict[tuple[int, int], list[int]] = {}
        self._activations: dict[Mix, tuple[int, int]] = {}
        self._lanes: dict[tuple[int, int, int, int], tuple[float, float, float, float]] = {}

    def _trains_little(self) -> bool:
        """Whether the trainable weights are a small part of the model."""
        trained = sum(self._weight_bytes[chunk] for chunk in self.state_order)
        return trained <= STAYING_SHARE * sum(self._weight_bytes.values())

    # From candidates to decisions.

    def supports(self, call: int, strategy: Strategy) -> bool:
        """Whether the layer supports the strategy. An offload that sends nothing does not count."""
        key = (call, strategy)
        if key not in self._supported:
            self._supported[key] = strategy in self.trace.strategies(call) and (
                not STRATEGY[strategy].sends or self.trace.work(call, strategy).sent_bytes > 0
            )
        return self._supported[key]

    @cached_property
    def num_layers(self) -> dict[str, int]:
        """By strategy: how many layers support it; under `all`, the number of layers."""
        return {"all": len(self.layers)} | {
            s.name: sum(self.supports(v, s.name) for v in self.layers) for s in STRATEGIES
        }

    @cached_property
    def most(self) -> Mix:
        """How many layers support each strategy."""
        return tuple(self.num_layers[strategy.name] for strategy in self.choices)

    def strategies(self, mix: Mix) -> tuple[Strategy, ...] | None:
        """The strategy of each call. None if too few layers support the strategies."""
        if mix not in self._mixes:
            chosen: list[Strategy] = ["keep"] * len(self.graph.calls)
            rest = self.layers
            for strategy, count in zip(reversed(self.choices), reversed(mix), strict=True):
                takers = set([v for v in rest if self.supports(v, strategy.name)][:count])
                for call in takers:
                    chosen[call] = strategy.name
                rest = [v for v in rest if v not in takers]
                if len(takers) < count:
                    self._mixes[mix] = None
                    break
            else:
                self._mixes[mix] = tuple(chosen)
        return self._mixes[mix]

    def decision(self, counts: Candidate) -> Decision:
        resident = set(self.weight_order[: counts.resident])
        sites: dict[int, tuple[Home, Home]] = dict.fromkeys(self.state_order, ("host", "host"))
        sites.update(dict.fromkeys(self.streamed(counts.optimizer, counts.streamed_state), ("host", "gpu")))
        sites.update(dict.fromkeys(self.state_order[: counts.optimizer], ("gpu", "gpu")))
        known: dict[tuple[Home, Home, Home], Homes] = {}
        homes = []
        for chunk in range(len(self.layout.chunks)):
            weights: Home = "gpu" if chunk in resident else "host"
            state, update = sites.get(chunk, (weights, weights))
            key = (weights, state, update)
            homes.append(known.setdefault(key, Homes(weights=weights, state=state, update=update)))
        strategies = self.strategies(counts.mix)
        assert strategies is not None, f"no such mix of strategies: {counts}"
        return Decision(
            homes=tuple(homes),
            strategies=strategies,
            depth=counts.depth,
            host_update_interval=counts.host_update_interval,
        )

    def streamed(self, optimizer: int, streamed_state: int) -> list[int]:
        """The chunks with streamed state. Large ones come last, since their state slots are large."""
        rest = self.state_order[optimizer:]
        usual = LARGE * statistics.median([self._weight_bytes[chunk] for chunk in rest]) if rest else 0
        return sorted(rest, key=lambda chunk: self._weight_bytes[chunk] > usual)[:streamed_state]

    def place(self, decision: Decision) -> Placement:
        return Placement(
            self.graph,
            self.layout,
            decision,
            self.step_config,
            self.trace.works(decision.strategies),
            self.trace.shared,
        )

    @cached_property
    def sizes(self) -> Placement:
        """A placement to read the bytes of chunks from, which are the same under every decision."""
        return self.place(self.decision(self.plain))

    @property
    def plain(self) -> Candidate:
        """Everything on the GPU, nothing recomputed, as in a run without outsize."""
        nothing = (0,) * len(self.choices)
        return Candidate(resident=len(self.weight_order), optimizer=len(self.state_order), mix=nothing, depth=0)

    # From candidates to bytes.

    def gpu_bytes(self, counts: Candidate) -> int:
        return (
            self.weights(counts.resident, counts.depth)[0]
            + self.states(counts.optimizer, counts.host_update_interval, counts.streamed_state)[0]
            + self.activations(counts.mix)[0]
        )

    def host_bytes(self, counts: Candidate) -> int:
        return (
            self.home_bytes(counts.resident, counts.optimizer, counts.streamed_state)
            + self.states(counts.optimizer, counts.host_update_interval, counts.streamed_state)[1]
            + self.activations(counts.mix)[1]
        )

    @cached_property
    def _slot_bytes(self) -> dict[int, int]:
        return {chunk.index: self.sizes.slot_bytes(chunk.index) for chunk in self.layout.chunks}

    def weights(self, resident: int, depth: int) -> tuple[int, int]:
        """GPU bytes of weights, resident and in slots; and those of the slots alone."""
        key = (resident, depth)
        if key not in self._weights:
            sizes = self._slot_bytes
            intervals = call_intervals(self.layout, self.weight_order[resident:], depth)
            slots = assign_slots(intervals, sizes).total_bytes
            self._weights[key] = slots + sum(sizes[c] for c in self.weight_order[:resident]), slots
        return self._weights[key]

    @cached_property
    def _weight_bytes(self) -> dict[int, int]:
        return {chunk.index: chunk.nbytes for chunk in self.layout.chunks}

    def states(self, optimizer: int, host_update_interval: int = 1, streamed_state: int = 0) -> tuple[int, int]:
        """GPU and host bytes of optimizer state, gradients and update workspace."""
        key = (optimizer, host_update_interval, streamed_state)
        if key not in self._states:
            # With all weights resident there are no slots, and these bytes depend on the optimizer's homes alone.
            counts = replace(
                self.plain,
                optimizer=optimizer,
                host_update_interval=host_update_interval,
                streamed_state=streamed_state,
            )
            place = self.place(self.decision(counts))
            gpu, host = place.parts(place.gpu), place.parts(place.host)
            self._states[key] = (
                sum(size for kind, size in gpu.items() if kind not in ("weights", "slot", "return", "norms")),
                sum(size for kind, size in host.items() if kind not in ("home", "arena")),
            )
        return self._states[key]

    def home_bytes(self, resident: int, optimizer: int, streamed_state: int) -> int:
        """Host bytes of weights that are streamed or updated on the host."""
        key = (optimizer, streamed_state)
        if key not in self._homes:
            home_bytes = self.sizes.home_bytes
            on_host = {*self.state_order[optimizer:]} - {*self.streamed(optimizer, streamed_state)}
            updated_there = {chunk for chunk in on_host if not self.sizes.has_coordinates(chunk)}
            leaves = itertools.accumulate(
                (0 if c in updated_there else home_bytes(c) for c in self.weight_order), initial=0
            )
            total = sum(map(home_bytes, self.weight_order))
            self._homes[key] = [total - gone for gone in leaves]
        return self._homes[key][resident]

    def activations(self, mix: Mix) -> tuple[int, int]:
        """GPU and host bytes of everything that does not belong to a chunk: activations at their peak, return slots,
        norms, buffers.
        """
        if mix not in self._activations:
            strategies = self.strategies(mix)
            assert strategies is not None
            # Without chunks, the schedule has only forward, backward and the copies of activations.
            decision = Decision(homes=(), strategies=strategies, depth=0)
            bare = Placement(
                self.graph,
                replace(self.layout, chunks=()),
                decision,
                self.step_config,
                self.trace.works(strategies),
                self.trace.shared,
            )
            schedule = compile_schedule(bare, only_steps=True)
            peak, _ = activation_peak(schedule, bare, self.trace.held_bytes)
            self._activations[mix] = bare.gpu_bytes + peak, bare.host_bytes
        return self._activations[mix]

    # From candidates to a lower bound on time.

    def bound_seconds(self, counts: Candidate) -> float:
        """A lower bound on the step time: the work of the busiest lane. Cheap, so that hopeless candidates are not
        simulated.
        """
        strategies = self.strategies(counts.mix)
        assert strategies is not None
        work, spec, again = self.trace.works(strategies), self.spec, self.step_config.accumulate
        sent = [w.sent_bytes for v, w in enumerate(work) if w.sent_bytes and self.graph.has_backward[v]]
        backward = sum(w.backward_seconds for v, w in enumerate(work) if self.graph.has_backward[v])
        compute, h2d, d2h, host = self._chunk_seconds(counts)
        return max(
            compute + again * (sum(w.forward_seconds for w in work) + backward),
            h2d + again * sum(copy_seconds(spec, "h2d", n) for n in sent),
            d2h + again * sum(copy_seconds(spec, "d2h", n) for n in sent),
            host,
        )

    @cached_property
    def attention_seconds(self) -> float:
        """What a step saves at most by not computing attention again."""
        saved = 0.0
        for call in self.layers:
            known = self.trace.calls[call]
            pairs = [
                (known[s.name], known[s.saves_attention_of])
                for s in self.choices
                if s.name in known and s.saves_attention_of
            ]
            saved += max((base.backward_seconds - work.backward_seconds for work, base in pairs), default=0.0)
        return self.step_config.accumulate * saved

    def host_update_interval(self, counts: Candidate) -> int:
        """How many chunks' gradients complete while the host updates one chunk. 1 if the host updates nothing in
        backward.
        """
        strategies = self.strategies(counts.mix)
        assert strategies is not None
        host = self._chunk_seconds(counts)[3]
        backward = sum(
            w.backward_seconds for v, w in enumerate(self.trace.works(strategies)) if self.graph.has_backward[v]
        )
        if self.step_config.update != "in_backward" or not host:
            return 1
        return max(
            1, min(MAX_HOST_UPDATE_INTERVAL, math.ceil(host / backward)) if backward else MAX_HOST_UPDATE_INTERVAL
        )

    def _chunk_seconds(self, counts: Candidate) -> tuple[float, float, float, float]:
        key = (counts.resident, counts.optimizer, counts.depth, counts.streamed_state)
        if key not in self._lanes:
            streamed = set(self.weight_order[counts.resident :])
            streamed_state = set(self.streamed(counts.optimizer, counts.streamed_state))
            state_on_gpu = set(self.state_order[: counts.optimizer])
            on_gpu = streamed_state | state_on_gpu
            compute = h2d = d2h = host = 0.0
            traffic = 0
            again = self.step_config.accumulate
            is_late = self.step_config.update == "after_step"
            for index, cost in enumerate(self._costs):
                if index in streamed:
                    h2d += again * (cost.load + (cost.load if cost.has_backward else 0.0))
                if not cost.gpu_update:
                    continue
                is_merged = bool(cost.merge)
                compute += again * cost.contract + cost.merge
                if is_merged and index in streamed:
                    d2h += cost.send
                if is_merged and index not in state_on_gpu:
                    h2d += cost.constants_in + (again - (index in on_gpu and not is_late)) * cost.contract_in
                if index in on_gpu:
                    compute += cost.gpu_update
                    if index in streamed and not is_merged:
                        d2h += cost.send
                        h2d += cost.load if is_late else 0.0
                    if index in streamed_state:
                        d2h += (
                            copy_seconds(self.spec, "d2h", cost.state_bytes) + (again - (not is_late)) * cost.grad_out
                        )
                        h2d += copy_seconds(self.spec, "h2d", cost.state_bytes) + (again - (not is_late)) * cost.grad_in
                        traffic += 2 * cost.state_bytes
                else:
                    host += cost.host_update
                    traffic += cost.update_bytes
                    d2h += again * cost.grad_out
                    h2d += (again - 1) * cost.grad_in
                    h2d += cost.coordinates_in if is_merged else 0.0 if index in streamed else cost.load
            # Backward does not load the chunks that forward leaves in the slots.
            held = again * self.weights(counts.resident, counts.depth)[1] / self.spec.h2d_bytes_per_second
            launches = again * len(streamed) * self.spec.launch_seconds
            if streamed_state and host:
                host = max(host, traffic / self.spec.host_bytes_per_second)
            self._lanes[key] = compute, max(0.0, h2d - held - launches), d2h, host
        return self._lanes[key]

    @cached_property
    def _costs(self) -> list["ChunkCost"]:
        return [self._cost(chunk) for chunk in self.layout.chunks]

    def _cost(self, chunk: Chunk) -> "ChunkCost":
        spec, index = self.spec, chunk.index
        backward = any(self.graph.has_backward[v] for v in chunk.calls)
        home = self.sizes.home_bytes(index)
        load, send = copy_seconds(spec, "h2d", home), copy_seconds(spec, "d2h", home)
        update = self.updates[index] if backward else None
        if update is None:
            return ChunkCost(load, send, backward)
        cost = ChunkCost(
            load,
            send,
            backward,
            copy_seconds(spec, "h2d", update.gradient_bytes),
            copy_seconds(spec, "d2h", update.gradient_bytes),
            update_seconds(spec, "compute", update.traffic_bytes),
            update_seconds(spec, "host", update.traffic_bytes),
            update.traffic_bytes,
            update.state_bytes,
        )
        if (constants := update.constants) is None:
            return cost
        return cost._replace(
            contract=action_seconds(self.sizes, Action(Kind.CONTRACT, index), spec, "compute"),
            merge=action_seconds(self.sizes, Action(Kind.MERGE, index), spec, "compute"),
            contract_in=copy_seconds(spec, "h2d", constants.contract_bytes),
            constants_in=copy_seconds(spec, "h2d", constants.num_bytes),
            coordinates_in=copy_seconds(spec, "h2d", constants.coordinate_bytes),
        )

    # Candidates under pins.

    def mixes(self, pins: Sequence[int | None]) -> Iterator[Mix]:
        """The mixes that are compared for the minimum memory: all of them for a small model, else those of at most two
        strategies that are not pinned. Of equal ones, the first is chosen: that with fewer layers of a later strategy.
        `pins`: the pinned number of layers with each strategy, None if it is not pinned.
        """
        fixed = tuple(p or 0 for p in pins)
        open_layers = len(self.layers) - sum(fixed)
        ranges = [
            range(p, p + 1) if p is not None else range(min(m, open_layers) + 1)
            for p, m in zip(pins, self.most, strict=True)
        ]
        if math.prod(map(len, ranges)) <= 4 * MAX_MIXES:  # a quarter to a sixth of them fit into the layers
            found = [mix[::-1] for mix in itertools.product(*ranges[::-1]) if sum(mix) <= len(self.layers)]
        else:
            free = [i for i, p in enumerate(pins) if p is None]
            found = [
                with_more(fixed, {a: count, b: open_layers - count})
                for a, b in itertools.combinations([*free[::-1], None], 2)
                for count in range(open_layers + 1)
            ]
        yield from (
            mix
            for mix in dict.fromkeys(found)
            if all(n <= m for n, m in zip(mix, self.most, strict=True)) and self.strategies(mix) is not None
        )
