"""Feasibility: the minimum memory that a plan needs, and the error if the budgets are smaller.

A search fails if and only if the minimum GPU memory under the host budget is above the GPU budget. The minimum does not
depend on the GPU budget, so the same search succeeds with the number that the error names.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Literal, TypeVar

from outsize.base.errors import ConfigError, PlanInfeasible
from outsize.base.units import exact_bytes, parse_bytes, show_bytes, show_enough
from outsize.hardware.gpu_budget import GpuBudget
from outsize.model.strategies import Mix
from outsize.planner.candidates import Candidate, SearchSpace, with_more
from outsize.schedule.pins import Pins

W = TypeVar("W")


class Budgets:
    """GPU budget, host budget and pins: which candidates are allowed and which fit."""

    def __init__(
        self, space: SearchSpace, pins: Pins, gpu: GpuBudget, host_bytes: int, *, may_save_attention: bool = False
    ):
        """`may_save_attention`: strategies that save the outputs of attention are allowed where no pin is against it.
        Otherwise only pins bring them into a plan. They save time, and so have no part in the minimum memory.
        """
        pins = pins.resolved(space.num_layers)
        self.space, self.pins, self.gpu, self.host_bytes = space, pins, gpu, host_bytes
        self.gpu_bytes = gpu.usable_bytes
        pinned = {strategy.name: pin for strategy, pin in zip(space.choices, pins.mix, strict=True)}
        self.closed = {
            i
            for i, s in enumerate(space.choices)
            if s.saves_attention_of
            and pinned[s.name] is None
            and not (may_save_attention and pinned[s.saves_attention_of] is None)
        }
        """Strategies that no layer may have."""
        self.mix = tuple(0 if i in self.closed else pin for i, pin in enumerate(pins.mix))
        """The fixed number of layers with each strategy. None: the search decides."""
        every, trainable = len(space.weight_order), len(space.state_order)
        # Chunks that stay on the GPU are the lower bound. A pin overrides it and may move them to the host.
        self.resident = (space.num_staying, every) if pins.n_persist is None else (pins.n_persist, pins.n_persist)
        self.streamed_state = pins.n_optimizer_streamed or 0
        most = trainable - self.streamed_state
        self.optimizer = (
            (min(space.num_staying, most), most)
            if pins.n_optimizer_gpu is None
            else (pins.n_optimizer_gpu, pins.n_optimizer_gpu)
        )
        self.depth = 0 if pins.n_buffer is None else pins.n_buffer - 1
        """The smallest prefetch depth that is allowed."""

    def with_attention(self) -> "Budgets":
        """The same, with strategies that save the outputs of attention where no pin is against it."""
        return Budgets(self.space, self.pins, self.gpu, self.host_bytes, may_save_attention=True)

    def allows(self, counts: Candidate) -> bool:
        """Whether the candidate agrees with the pins, and keeps the chunks on the GPU that always stay there."""
        pins = self.pins
        pairs = (
            *zip(self.mix, counts.mix, strict=True),
            (pins.n_buffer, counts.depth + 1),
            (pins.n_optimizer_streamed, counts.streamed_state),
        )
        bounded = ((self.resident, counts.resident), (self.optimizer, counts.optimizer))
        return (
            all(low <= count <= high for (low, high), count in bounded)
            and all(pin is None or pin == count for pin, count in pairs)
            and counts.optimizer + counts.streamed_state <= len(self.space.state_order)
        )

    def fits(self, counts: Candidate) -> bool:
        return self.space.gpu_bytes(counts) <= self.gpu_bytes and self.space.host_bytes(counts) <= self.host_bytes

    def _candidate(self, resident: int, optimizer: int, mix: Mix, depth: int) -> Candidate:
        return Candidate(
            resident=resident, optimizer=optimizer, mix=mix, depth=depth, streamed_state=self.streamed_state
        )

    def cheapest_candidate(self, mix: Mix, depth: int) -> Candidate | None:
        """A candidate with little on the GPU that fits the budgets. A quick heuristic: None does not mean that none
        fits.
        """
        least = self._candidate(self.resident[0], self.optimizer[0], mix, depth)
        for first, second in (("optimizer", "resident"), ("resident", "optimizer")):
            counts = least
            for name in (first, second):
                low, high = getattr(self, name)
                # Moving a chunk to the GPU adds host bytes only if slot sizes differ, so bisection is accurate enough.
                while low < high and self.space.host_bytes(counts) > self.host_bytes:
                    middle = (low + high) // 2
                    if self.space.host_bytes(replace(counts, **{name: middle})) <= self.host_bytes:
                        high = middle
                    else:
                        low = middle + 1
                    if low == high:
                        counts = replace(counts, **{name: low})
            if self.fits(counts):
                return counts
        return None

    # The exact minima over all candidates at the smallest depth.

    @cached_property
    def _mixes(self) -> "list[tuple[int, int, Mix]]":
        return _frontier([(*self.space.activations(mix), mix) for mix in self.space.mixes(self.mix)])

    @cached_property
    def _pairs(self) -> "list[tuple[int, int, tuple[int, int]]]":
        """GPU bytes and host bytes of the chunks under (resident, optimizer)."""
        space = self.space
        rows = []
        for optimizer in range(self.optimizer[0], self.optimizer[1] + 1):
            gpu, host = space.states(optimizer, streamed_state=self.streamed_state)
            for resident in range(self.resident[0], self.resident[1] + 1):
                rows.append(
                    (
                        gpu + space.weights(resident, self.depth)[0],
                        host + space.home_bytes(resident, optimizer, self.streamed_state),
                        (resident, optimizer),
                    )
                )
        return _frontier(rows)

    def _minimum(self, host_limit: int | None, gpu_limit: int | None) -> tuple[int, Candidate] | None:
        """Minimum GPU bytes under `host_limit`, or minimum host bytes under `gpu_limit`, with its candidate."""
        best: tuple[int, int, Candidate] | None = None
        for mix_gpu, mix_host, mix in self._mixes:
            for pair_gpu, pair_host, (resident, optimizer) in self._pairs:
                gpu, host = mix_gpu + pair_gpu, mix_host + pair_host
                if (host_limit is not None and host > host_limit) or (gpu_limit is not None and gpu > gpu_limit):
                    continue
                found = (host, gpu) if gpu_limit is not None else (gpu, host)
                if best is None or found < best[:2]:
                    best = (*found, self._candidate(resident, optimizer, mix, self.depth))
        return None if best is None else (best[0], best[2])

    def least_gpu(self, *, any_host: bool = False, host_bytes: int | None = None) -> tuple[int, Candidate] | None:
        """Minimum GPU bytes with its candidate. `host_bytes`: replaces the host budget."""
        allowed = self.host_bytes if host_bytes is None else host_bytes
        if not self._mixes:
            return None
        # Weights, states and activations each at their own minimum. This is the minimum if it fits the host.
        space = self.space
        counts = self._candidate(self._least_resident, self._least_optimizer, min(self._mixes)[2], self.depth)
        if any_host or space.host_bytes(counts) <= allowed:
            return space.gpu_bytes(counts), counts
        return self._minimum(allowed, None)

    @property
    def _least_resident(self) -> int:
        sizes = [self.space.sizes.slot_bytes(c) for c in self.space.weight_order]
        return _least(self.resident, sizes, lambda n: self.space.weights(n, self.depth)[0])

    @property
    def _least_optimizer(self) -> int:
        sizes = [self.space.sizes.state_bytes(c) for c in self.space.state_order]
        return _least(self.optimizer, sizes, lambda n: self.space.states(n, streamed_state=self.streamed_state)[0])

    def least_host(self) -> tuple[int, Candidate] | None:
        return self._minimum(None, self.gpu_bytes)

    def start(self) -> Candidate:
        """A candidate that fits, with little on the GPU. Raises ConfigError or PlanInfeasible if there is none."""
        for mix in self._of_one_strategy():
            if counts := self.cheapest_candidate(mix, self.depth):
                return counts
        if not self._mixes:
            given = ", ".join(s.pin for s, n in zip(self.space.choices, self.mix, strict=True) if n)
            raise ConfigError(
                f"pins: {self.pins} need more layers with these strategies than the model has. Lower one of {given}."
            )
        least = self.least_gpu()
        if least and least[0] <= self.gpu_bytes:
            return least[1]
        raise self._infeasible(least)

    def _of_one_strategy(self, *others: Mix) -> list[Mix]:
        """For each strategy, the mix with as many layers of it as possible; then the others. Only those that exist."""
        fixed = tuple(pin or 0 for pin in self.mix)
        rest = len(self.space.layers) - sum(fixed)
        found = [
            fixed if pin is not None else with_more(fixed, {i: min(rest, most)})
            for i, (pin, most) in enumerate(zip(self.mix, self.space.most, strict=True))
            if i not in self.closed
        ]
        return [mix for mix in dict.fromkeys([*found, *others]) if self.space.strategies(mix) is not None]

    def bases(self) -> list[Mix]:
        """Mixes with one strategy for all layers, from which the search starts."""
        return self._of_one_strategy(tuple(pin or 0 for pin in self.mix))

    # The error when nothing fits.

    def _infeasible(self, least: tuple[int, Candidate] | None) -> PlanInfeasible:
        anyhow = self.least_gpu(any_host=True)
        assert anyhow is not None, "there are mixes, and no budget is given"
        if anyhow[0] > self.gpu_bytes:
            # The GPU is too small with any host memory. If the host budget leaves no plan on a GPU of any size, the
            # next search reports that.
            return self._gpu_too_small(*(least or anyhow), with_any_host=anyhow[0])
        host = self.least_host()
        assert host is not None, "the least GPU memory fits, so some host memory does"
        ways = ["use a smaller model or train fewer of its parameters"]
        if least:
            ways.insert(0, f"raise gpu_memory to {self._raised(least[0])}, to keep more on the GPU")
        return self._too_small("host", host[0], "", ways, [])

    def _gpu_too_small(self, needed: int, counts: Candidate, *, with_any_host: int) -> PlanInfeasible:
        activations = self.space.activations(counts.mix)[0]
        hints = []
        if activations * 2 > needed:
            part = f"{show_bytes(activations)} of it activations"
            ways = ["reduce the batch size or the sequence length"]
        else:
            part = f"{show_bytes(needed - activations)} of it weights, gradients and optimizer state"
            ways = ["reduce the batch size, which reduces only the activations"]
        if (large := self._largest_block()) is not None:
            hints.append(large)
        if with_any_host < needed:
            hints.append(f"With more host_memory, {self._enough_total(with_any_host)} of GPU memory is enough.")
        if self.space.num_staying:
            moving = replace(self.pins, n_persist=0, n_optimizer_gpu=0)
            least = Budgets(self.space, moving, self.gpu, self.host_bytes).least_gpu()
            if least and least[0] < needed:
                hints.append(
                    f"With trainable weights and their optimizer state on the host too, which is slower (pins "
                    f"{moving}), {self._enough_total(least[0])} is enough."
                )
        return self._too_small("gpu", needed, part, ways, hints)

    def _largest_block(self) -> str | None:
        """A hint about a block with more than half of the model's weights."""
        graph = self.space.graph
        sizes = {block.name: sum(graph.param[name].nbytes for name in block.params) for block in graph.blocks}
        name, total = max(sizes, key=lambda name: sizes[name]), sum(param.nbytes for param in graph.params)
        if 2 * sizes[name] <= total or not total:
            return None
        return (
            f"{name} is one block with {show_bytes(sizes[name])} of the model's {show_bytes(total)} of weights, and a "
            "block's weights are on the GPU together. If it runs a list of modules one after another, name that list "
            "(blocks=['path.to.list'])."
        )

    def _enough_total(self, gpu_bytes: int) -> str:
        """The total GPU memory that is enough, as text. It is rounded up, unless that exceeds the memory of the GPU."""
        total, card = self.gpu.total_for(gpu_bytes), self.space.spec.gpu_bytes
        enough = show_enough(total)
        return exact_bytes(total) if total <= card < parse_bytes(enough) else enough

    def _raised(self, gpu_bytes: int) -> str:
        spec, enough = self.space.spec, self._enough_total(gpu_bytes)
        return f"{enough} (more than {spec.name} has)" if self.gpu.total_for(gpu_bytes) > spec.gpu_bytes else enough

    def _too_small(
        self, resource: Literal["gpu", "host"], needed: int, part: str, ways: list[str], hints: list[str]
    ) -> PlanInfeasible:
        """`part`: the largest part of the needed memory; `ways`: what to do instead of raising the budget; `hints`:
        sentences.
        """
        if self.pins.given():
            free = Budgets(self.space, Pins(), self.gpu, self.host_bytes)
            without = free.least_gpu() if resource == "gpu" else free.least_host()
            if without and without[0] < needed:
                less = self._enough_total(without[0]) if resource == "gpu" else show_enough(without[0])
                hints = [*hints, f"Without the pins ({self.pins}), {less} is enough."]
        if resource == "gpu":
            enough, raised = self._enough_total(needed), self._raised(needed)
            allowed, needed = self.gpu.total_bytes, self.gpu.total_for(needed)
        else:
            enough = raised = show_enough(needed)
            allowed = self.host_bytes
        option = f"{resource}_memory"
        message = (
            f"{option} {_show_given(allowed)} is too small: this model and batch need at least {enough}"
            f"{f' ({part})' if part else ''}. Raise {option} to {raised}, or {', or '.join(ways)}."
        )
        return PlanInfeasible(
            " ".join([message, *hints]), resource=resource, allowed_bytes=allowed, needed_bytes=needed
        )


def _show_given(num_bytes: int) -> str:
    """A budget as the user wrote it, if it is a whole number of a unit."""
    exact = exact_bytes(num_bytes)
    number = exact.rstrip("TGMKiB")
    return f"{number} {exact[len(number) :]}" if len(number) <= 3 else show_bytes(num_bytes)


def _least(bounds: tuple[int, int], sizes: list[int], total: Callable[[int], int]) -> int:
    """The count with the smallest `total`. `total` is at least the sum of the first `count` sizes, so the loop can stop
    early.
    """
    best, found = bounds[0], total(bounds[0])
    for count in range(bounds[0] + 1, bounds[1] + 1):
        if sum(sizes[:count]) >= found:
            break
        if total(count) < found:
            best, found = count, total(count)
    return best


def _frontier(rows: list[tuple[int, int, W]]) -> list[tuple[int, int, W]]:
    """The Pareto frontier of rows (gpu, host, value)."""
    kept: list[tuple[int, int, W]] = []
    least_host: int | None = None
    for row in sorted(rows, key=lambda r: r[:2]):
        if least_host is None or row[1] < least_host:
            kept.append(row)
            least_host = row[1]
    return kept
