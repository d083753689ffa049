"""Search: finds the fastest plan within the budgets, in well under a second.

The search first spends the GPU budget in several orders of priority (weights, optimizer state or activations first). It
skips a candidate whose busiest lane alone takes longer than the best plan. It then refines the best candidates by
moving memory from one use to another in ever smaller steps.

The search is deterministic: it ends after a number of simulations, not after a time. Near ties go to the simpler plan,
so that measurement noise does not change the plan.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from outsize.base.errors import PlanInfeasible, PlanInvalid
from outsize.base.records import fingerprint
from outsize.base.units import show_seconds
from outsize.hardware.gpu_budget import GpuBudget
from outsize.hardware.spec import HardwareSpec
from outsize.layout.chunks import ChunkLayout
from outsize.model.graph import BlockGraph
from outsize.model.strategies import Mix
from outsize.planner.candidates import DEPTHS, MAX_HOST_UPDATE_INTERVAL, Candidate, SearchSpace, with_more
from outsize.planner.feasible import Budgets
from outsize.planner.simulate import simulate
from outsize.profile.trace import ModelTrace
from outsize.schedule.pins import Pins, check_pins
from outsize.schedule.plan import FORMAT, Decision, Estimate, Plan, StepConfig
from outsize.schedule.schedule import compile_schedule

MIN_SIMULATIONS, MAX_SIMULATIONS, SIMULATED_ITEMS = 24, 400, 9_000
"""A simulation takes time in proportion to the model's chunks and calls. SIMULATED_ITEMS of these take about 0.4 s."""
FIRST_SHARE = 0.6
"""Share of the simulations for the first candidates; the others are for refinement."""
REFINED = 5
"""How many of the best candidates are refined."""
ALIKE = 2
"""How many of the best candidates are tried with the outputs of attention saved."""
AT_A_TIME = 6
"""How many neighbours a refinement step simulates. With fewer, the search got stuck: a 3B model was 10 % slower under
46 GiB than under 45.8 GiB.
"""
CLOSE = 0.2
"""A candidate within this share of the best time is tried with other values of host_update_interval."""
TIE = 0.01
"""Times within this share count as equal, since measurements are not more accurate."""
PLAIN_TIE = 0.1
"""Another plan replaces the plain resident run only if its predicted gain is larger than this share, since the plain
run does not depend on overlap.
"""
STREAMED_SHARES = (1.0, 0.75, 0.5, 0.33, 0.2, 0.1)
"""Shares of the host-updated chunks that are tried with streamed state, before ever smaller steps around the best."""
STREAMED_STEPS = 4
STREAMED_TIE = 0.1
"""Streamed state is chosen only if its predicted gain is larger than this share: more than the largest error of a
predicted step (9.7 %). The gain depends on how copies and updates share the bandwidth of host memory, an estimate."""
HOST_SHARE = 0.5
"""Streamed state is considered if the host updates for at least this share of the step."""


@dataclass(frozen=True, slots=True)
class _Tried:
    counts: Candidate
    decision: Decision
    estimate: Estimate


def search(
    graph: BlockGraph,
    layout: ChunkLayout,
    trace: ModelTrace,
    spec: HardwareSpec,
    step_config: StepConfig,
    *,
    gpu: GpuBudget,
    host_bytes: int,
    pins: Pins = Pins(),  # noqa: B008 - frozen
) -> Plan:
    """Find the fastest plan. Raises PlanInfeasible if none fits, ConfigError for a pin out of range."""
    made_for = fingerprint(graph)
    if trace.graph != made_for:
        raise PlanInvalid(
            f"trace: it was taken of another model ({trace.graph}) than this one ({made_for}). Profile this model."
        )
    space = SearchSpace(graph, layout, trace, step_config, spec)
    if isinstance(pins, Pins):
        pins = pins.resolved(space.num_layers)
    check_pins(pins, graph, layout, space.num_layers, len(space.state_order))
    run = _Search(Budgets(space, pins, gpu, host_bytes))
    best = run.run()
    words = run.words(best)
    if pins.given():
        words += f"; pinned {pins}: {_cost_of_pins(space, best, gpu, host_bytes)}"
    return Plan(
        format=FORMAT,
        graph=made_for,
        hardware=spec.name,
        chunk_bytes=layout.chunk_bytes,
        inputs=trace.inputs,
        step_config=step_config,
        decision=best.decision,
        work=trace.works(best.decision.strategies),
        shared=trace.shared,
        tile_tokens=trace.tile_tokens,
        tiled=trace.tiled,
        held_bytes=trace.held_bytes,
        gpu_budget_bytes=gpu.usable_bytes,
        host_budget_bytes=host_bytes,
        estimate=best.estimate,
        provenance=f"model: {trace.provenance}; machine: {spec.provenance}",
        search=words,
        extrapolated_from=trace.extrapolated_from,
    )


def _cost_of_pins(space: SearchSpace, best: _Tried, gpu: GpuBudget, host_bytes: int) -> str:
    try:
        free = _Search(Budgets(space, Pins(), gpu, host_bytes)).run().estimate.step_seconds
    except PlanInfeasible:  # pins can lead to candidates that the search does not try
        return "the search found no plan without them"
    if best.estimate.step_seconds <= free * (1 + TIE):
        return "they cost nothing"
    return f"they cost {best.estimate.step_seconds / free - 1:.0%} ({show_seconds(free)} a step without them)"


class _Search:
    def __init__(self, budgets: Budgets):
        self.budgets, self.space = budgets, budgets.space
        self.tried: dict[Candidate, _Tried] = {}
        # With accumulation, a second kind of backward is simulated.
        size = (len(self.space.weight_order) + len(self.space.graph.calls)) * (
            1 + (self.space.step_config.accumulate > 1)
        )
        self.limit = min(MAX_SIMULATIONS, max(MIN_SIMULATIONS, SIMULATED_ITEMS // size))

    def run(self) -> _Tried:
        start = self.budgets.start()
        plain = self.space.plain
        # The plain run comes first, so that it is always among the simulated candidates.
        families = [plain] if self.budgets.allows(plain) and self.budgets.fits(plain) else []
        self._try([*families, *self._families(start)], int(self.limit * FIRST_SHARE))
        self._refine()
        self._stream_state()
        best = self._best()
        self._save_attention()
        return self._best() if self._fastest() < best.estimate.step_seconds * (1 - TIE) else best

    # Candidates.

    def _families(self, start: Candidate) -> Iterator[Candidate]:
        """The first candidates. From one with little GPU memory, the budget is spent in every order of priority."""
        yield start
        depths = DEPTHS if self.budgets.pins.n_buffer is None else (self.budgets.depth,)
        for mix, depth in itertools.product(dict.fromkeys([*self.budgets.bases(), start.mix]), depths):
            floor = self.budgets.cheapest_candidate(mix, depth)
            if floor is None and mix == start.mix and self.budgets.fits(replace(start, depth=depth)):
                floor = replace(start, depth=depth)
            if floor is not None:
                for order in itertools.permutations(("resident", "optimizer", "keep")):
                    yield self._spend(floor, order)

    def _spend(self, counts: Candidate, order: Iterable[str]) -> Candidate:
        """Spend the GPU budget on each use in turn, until it is used up."""
        for name in order:
            high, more = self._room(counts, name)
            low = high if self._ok(more(high)) else 0
            while low < high - 1:
                middle = (low + high) // 2
                low, high = (middle, high) if self._ok(more(middle)) else (low, middle)
            counts = more(low)
        return self._with_host_update_interval(self._without_unused_depth(counts))

    def _room(self, counts: Candidate, name: str) -> tuple[int, Callable[[int], Candidate]]:
        """How many more chunks or layers one use (`resident`, `optimizer` or `keep`) can get, and the candidate with a
        number of them.
        """
        if name == "keep":
            free = [0 if pin is not None else n for n, pin in zip(counts.mix, self.budgets.mix, strict=True)]
            return sum(free), lambda number: replace(counts, mix=_with_fewer(counts.mix, free, number))
        here = getattr(counts, name)
        high = (self.budgets.resident if name == "resident" else self.budgets.optimizer)[1]
        return max(0, high - here), lambda number: replace(counts, **{name: here + number})

    def _without_unused_depth(self, counts: Candidate) -> Candidate:
        """Set depth to 0 if nothing is streamed."""
        if counts.resident == len(self.space.weight_order) and self.budgets.pins.n_buffer is None:
            return replace(counts, depth=0)
        return counts

    def _with_host_update_interval(self, counts: Candidate) -> Candidate:
        """Set host_update_interval to the host's update rate, if the gradients that wait fit the host budget."""
        paced = replace(counts, host_update_interval=self.space.host_update_interval(counts))
        return paced if self.budgets.fits(paced) else replace(counts, host_update_interval=1)

    def _ok(self, counts: Candidate) -> bool:
        return (
            self.space.strategies(counts.mix) is not None and self.budgets.allows(counts) and self.budgets.fits(counts)
        )

    def _neighbours(self, counts: Candidate, share: float) -> Iterator[Candidate]:
        """Candidates near this one: a share of one use's memory moved to another, some layers with another strategy,
        one more or one less in prefetch depth.
        """
        uses = ("resident", "optimizer", "keep")
        size = {
            "resident": len(self.space.weight_order),
            "optimizer": len(self.space.state_order),
            "keep": len(self.space.layers),
        }
        moved = {use: max(1, int(size[use] * share)) for use in uses}
        for giver, (least, _) in (("resident", self.budgets.resident), ("optimizer", self.budgets.optimizer)):
            if getattr(counts, giver) > least:
                less = replace(counts, **{giver: max(least, getattr(counts, giver) - moved[giver])})
                yield from (self._spend(less, (taker,)) for taker in uses if taker != giver)
        kept = len(self.space.layers) - sum(counts.mix)
        may_change = [i for i, pin in enumerate(self.budgets.mix) if pin is None]
        for i in may_change:
            number = counts.mix[i]
            if kept:
                less = replace(counts, mix=with_more(counts.mix, {i: min(kept, moved["keep"])}))
                if self.space.strategies(less.mix) is not None:
                    yield from (self._spend(less, (taker,)) for taker in ("resident", "optimizer"))
            for other in may_change:
                if other != i and number:
                    change = min(number, moved["keep"])
                    turned = replace(counts, mix=with_more(counts.mix, {i: -change, other: change}))
                    if self.space.strategies(turned.mix) is not None:
                        yield turned
                        yield from (self._spend(turned, (taker,)) for taker in uses)
        for depth in (counts.depth - 1, counts.depth + 1):
            if depth in DEPTHS and counts.resident < len(self.space.weight_order):
                other_depth = replace(counts, depth=depth)
                if not self.budgets.fits(other_depth):
                    other_depth = self._spend(replace(other_depth, resident=self.budgets.resident[0]), ("resident",))
                yield other_depth
                yield from (self._spend(other_depth, (taker,)) for taker in uses)

    # Simulation.

    def _try(self, candidates: Iterable[Candidate], limit: int, most: int | None = None) -> bool:
        """Simulate the candidates that fit and could win, the most promising first. Returns whether there is a new
        best. `most`: the number of candidates, not counting other update intervals of each.
        """
        before = self._best().counts if self.tried else None
        new = [c for c in dict.fromkeys(candidates) if c not in self.tried and self._ok(c)]
        walked = 0
        for counts in self._ranked(new):
            if len(self.tried) >= limit or walked == most:
                break
            if counts in self.tried:
                continue
            if self.tried and self.space.bound_seconds(counts) > self._fastest() * (1 - TIE):
                continue
            walked += 1
            self._simulate(counts)
            self._find_host_update_interval(counts)
        return self._best().counts != before

    def _ranked(self, candidates: list[Candidate]) -> list[Candidate]:
        """The plain run first, then the best of every kind, then the second of every kind, and so on. The bound ignores
        dependencies, so it can only compare candidates of one kind.
        """
        groups: dict[tuple[int, int], list[Candidate]] = {}
        for counts in sorted(candidates, key=lambda c: (self.space.bound_seconds(c), self._complexity(c))):
            kind = (*reversed(counts.mix), len(self.space.layers) - sum(counts.mix))
            groups.setdefault((kind.index(max(kind)), counts.depth), []).append(counts)
        rank = {counts: i for group in groups.values() for i, counts in enumerate(group)}
        return sorted(
            candidates, key=lambda c: (c != self.space.plain, rank[c], self.space.bound_seconds(c), self._complexity(c))
        )

    def _simulate(self, counts: Candidate) -> None:
        decision = self.space.decision(counts)
        place = self.space.place(decision)
        estimate = simulate(
            place, compile_schedule(place, only_steps=True), self.space.spec, held_bytes=self.space.trace.held_bytes
        )
        assert (estimate.gpu_bytes, estimate.host_bytes) == (
            self.space.gpu_bytes(counts),
            self.space.host_bytes(counts),
        ), "the candidate's bytes differ from those of its plan"
        self.tried[counts] = _Tried(counts, decision, estimate)

    def _find_host_update_interval(self, counts: Candidate) -> None:
        """Simulate larger, then smaller values of host_update_interval while they are faster. The best value depends on
        when gradients complete, which only a simulation shows.
        """
        if (
            self.space.step_config.update != "in_backward"
            or counts.optimizer + counts.streamed_state == len(self.space.state_order)
            or not self._is_close(counts)
        ):
            return
        for way in (1, -1):
            here = counts
            there = replace(here, host_update_interval=here.host_update_interval + way)
            while (
                1 <= there.host_update_interval <= MAX_HOST_UPDATE_INTERVAL
                and len(self.tried) < self.limit
                and self._ok(there)
            ):
                if there not in self.tried:
                    self._simulate(there)
                if self._seconds(there) >= self._seconds(here):
                    break
                here, there = there, replace(there, host_update_interval=there.host_update_interval + way)
            if here != counts:
                return

    def _seconds(self, counts: Candidate) -> float:
        return self.tried[counts].estimate.step_seconds

    def _is_close(self, counts: Candidate) -> bool:
        return self._seconds(counts) <= self._fastest() * (1 + CLOSE)

    def _refine(self) -> None:
        """Try neighbours of the best candidate in ever smaller steps, then those of the next best, which can lead to a
        better one.
        """
        least_share = 1 / max(1, len(self.space.weight_order), len(self.space.layers))
        shares = [0.25]
        while shares[-1] >= least_share:
            shares.append(shares[-1] / 2)
        done: set[tuple[Candidate, float]] = set()
        while len(self.tried) < self.limit:
            best = self._best().counts
            others = sorted(
                self.tried.values(),
                key=lambda t: (t.counts != best, t.estimate.step_seconds, self._complexity(t.counts)),
            )[:REFINED]
            step = next(((t.counts, share) for t in others for share in shares if (t.counts, share) not in done), None)
            if step is None:
                break
            # A few at a time, so that the search moves to a better candidate soon. The step is done only if it brings
            # no new best.
            if not self._try(self._neighbours(*step), self.limit, AT_A_TIME):
                done.add(step)

    def _stream_state(self) -> None:
        """Try streamed state: the GPU updates some chunks whose state is on the host, the host the others."""
        best = self._best()
        most = len(self.space.state_order) - best.counts.optimizer
        is_busy = best.estimate.busy_seconds["host"] >= HOST_SHARE * best.estimate.step_seconds
        if self.budgets.pins.n_optimizer_streamed is not None or not is_busy:
            return
        numbers, step = {max(1, round(share * most)) for share in STREAMED_SHARES}, most // 8
        for _ in range(STREAMED_STEPS):
            candidates = [
                counts
                for number in sorted(numbers)
                for counts in self._with_room(replace(best.counts, streamed_state=number))
            ]
            self._try(candidates, len(self.tried) + len(candidates))
            streamed = [t for t in self.tried.values() if t.counts.streamed_state]
            if not streamed or not step:
                break
            here = min(streamed, key=lambda t: t.estimate.step_seconds).counts.streamed_state
            numbers, step = {n for n in (here - step, here + step) if 0 < n <= most}, step // 2

    def _save_attention(self) -> None:
        """Try to save the outputs of attention in plans like the best ones, and in plans of their own.

        It comes after all else, so that a model for which it brings nothing has the plan that it would have without
        these strategies. Refining what it finds gained 1 % at most, and doubled the time of the search.
        """
        if self.space.attention_seconds <= TIE * self._fastest():
            return
        self.budgets = self.budgets.with_attention()
        best = sorted(self.tried.values(), key=lambda t: (t.estimate.step_seconds, self._complexity(t.counts)))
        like_best = [
            counts
            for tried in best[:ALIKE]
            for mix in self._mixes_with_attention(tried.counts.mix)
            for counts in self._with_room(replace(tried.counts, mix=mix))
        ]
        anew = [
            self._spend(floor, order)
            for mix in self.budgets.bases()
            if (floor := self.budgets.cheapest_candidate(mix, best[0].counts.depth)) is not None
            for order in itertools.permutations(("resident", "optimizer", "keep"))
        ]
        candidates = [*like_best, *anew]
        self._try(candidates, len(self.tried) + len(candidates))

    def _mixes_with_attention(self, mix: Mix) -> Iterator[Mix]:
        """Mixes with all layers of one or more strategies turned into those that save the outputs of attention."""
        names = [strategy.name for strategy in self.space.choices]
        pairs = [
            (names.index(s.saves_attention_of), i) for i, s in enumerate(self.space.choices) if s.saves_attention_of
        ]
        for which in itertools.product((True, False), repeat=len(pairs)):
            turned = mix
            for is_turned, (without, saving) in zip(which, pairs, strict=True):
                number = mix[without] if is_turned else 0
                turned = with_more(turned, {without: -number, saving: number})
            if turned != mix and self.space.strategies(turned) is not None:
                yield turned

    def _with_room(self, counts: Candidate) -> Iterator[Candidate]:
        """The candidate itself if it fits, or those with fewer chunks, less state or fewer activations on the GPU."""
        if self._ok(counts):
            yield self._with_host_update_interval(counts)
        else:
            yield self._spend(replace(counts, resident=self.budgets.resident[0]), ("resident",))
            yield self._spend(replace(counts, optimizer=self.budgets.optimizer[0]), ("optimizer",))
            yield from (self._spend(replace(counts, mix=mix), ("keep",)) for mix in self.budgets.bases())

    # Choice.

    def _fastest(self) -> float:
        return min(t.estimate.step_seconds for t in self.tried.values())

    def _complexity(self, counts: Candidate) -> tuple[int, ...]:
        """Sort key: what makes a plan less simple, most important first; the last fields make the order total."""
        streamed, on_host = (
            len(self.space.weight_order) - counts.resident,
            len(self.space.state_order) - counts.optimizer,
        )
        moved = streamed + on_host + sum(counts.mix)
        return (
            moved,
            counts.depth,
            *reversed(counts.mix),
            streamed,
            counts.host_update_interval,
            counts.streamed_state,
        )

    def _terms(self) -> tuple[str, ...]:
        """The words for the numbers of `_complexity`."""
        return (
            "chunks and layers moved or computed again",
            "blocks loaded ahead",
            *(f"layers {strategy.participle}" for strategy in reversed(self.space.choices)),
            "chunks streamed",
            "updates apart on the host",
            "chunks with streamed state",
        )

    def _best(self) -> _Tried:
        tried = list(self.tried.values())
        unstreamed = [t for t in tried if not t.counts.streamed_state]
        if any(t.estimate.step_seconds <= self._fastest() * (1 + STREAMED_TIE) for t in unstreamed):
            tried = unstreamed
        limit = min(t.estimate.step_seconds for t in tried) * (1 + TIE)
        plain = self.tried.get(self.space.plain)
        if plain and plain.estimate.step_seconds <= self._fastest() * (1 + PLAIN_TIE):
            return plain
        return min((t for t in tried if t.estimate.step_seconds <= limit), key=lambda t: self._complexity(t.counts))

    def words(self, best: _Tried) -> str:
        others = [t for t in self.tried.values() if t.counts != best.counts]
        said = f"{len(self.tried)} simulation{'s' * (len(self.tried) > 1)}"
        if others:
            second = min(others, key=lambda t: (t.estimate.step_seconds, self._complexity(t.counts)))
            said += f"; runner-up {self._against(best, second)}: {self._describe(second.counts)}"
        return said

    def _against(self, best: _Tried, second: _Tried) -> str:
        """Why the second was not chosen, as text: what is slower, or what is less simple."""
        ratio = second.estimate.step_seconds / best.estimate.step_seconds - 1
        if ratio > 0:
            more = {
                lane: busy - best.estimate.busy_seconds.get(lane, 0.0)
                for lane, busy in second.estimate.busy_seconds.items()
            }
            lane = max(more, key=lambda lane: more[lane])
            longer = (
                f"{lane} works {show_seconds(more[lane])} more"
                if more[lane] > 0
                else "its lanes wait more for one another"
            )
            return f"{ratio:.1%} slower ({longer})"
        pairs = zip(self._terms(), self._complexity(second.counts), self._complexity(best.counts), strict=True)
        dearer = next(f"{theirs} {what} instead of {ours}" for what, theirs, ours in pairs if theirs != ours)
        return f"{f'{-ratio:.1%} faster' if ratio else 'as fast'}, but not as simple ({dearer})"

    def _describe(self, counts: Candidate) -> str:
        if counts == self.space.plain:
            return "everything on the GPU"
        layers = [
            f"{n} {strategy.name}"
            for strategy, n in zip(reversed(self.space.choices), reversed(counts.mix), strict=True)
            if n
        ]
        return ", ".join(
            [
                f"weights {counts.resident} of {len(self.space.weight_order)} chunks on the GPU",
                f"optimizer {counts.optimizer} of {len(self.space.state_order)}",
                *([f"optimizer state of {counts.streamed_state} streamed"] if counts.streamed_state else []),
                f"layers {' + '.join(layers) or 'all keep'}",
                f"depth {counts.depth}",
                *([f"host_update_interval {counts.host_update_interval}"] if counts.host_update_interval > 1 else []),
            ]
        )


def _with_fewer(mix: Mix, free: Sequence[int], number: int) -> Mix:
    """The mix with `number` layers fewer, at most `free` of each strategy, the first strategies first."""
    rest = []
    for count, most in zip(mix, free, strict=True):
        rest.append(count - min(number, most))
        number -= min(number, most)
    return tuple(rest)
