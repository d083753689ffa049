"""Explains a plan: the time of common recipes, the gain from a faster or larger machine, and the minimum memory.

Each answer is a search with one change. The searches take seconds on one core and do not need torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from outsize.base.errors import ConfigError, PlanInfeasible
from outsize.base.units import show_bytes, show_enough, show_seconds
from outsize.hardware.gpu_budget import GpuBudget
from outsize.hardware.spec import HardwareSpec
from outsize.layout.chunks import ChunkLayout
from outsize.model.graph import BlockGraph
from outsize.model.strategies import choices
from outsize.planner.candidates import SearchSpace
from outsize.planner.feasible import Budgets
from outsize.planner.search import search
from outsize.profile.trace import ModelTrace
from outsize.schedule.pins import Pins
from outsize.schedule.plan import Plan, StepConfig
from outsize.schedule.render import busiest_lane

GiB = 2**30
MORE_GPU_BYTES = 4 * GiB


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The inputs of a search."""

    graph: BlockGraph
    layout: ChunkLayout
    trace: ModelTrace
    spec: HardwareSpec
    step_config: StepConfig
    gpu: GpuBudget
    host_bytes: int
    pins: Pins = Pins()

    def solve(self) -> Plan:
        return search(
            self.graph,
            self.layout,
            self.trace,
            self.spec,
            self.step_config,
            gpu=self.gpu,
            host_bytes=self.host_bytes,
            pins=self.pins,
        )

    @cached_property
    def budgets(self) -> Budgets:
        return Budgets(
            SearchSpace(self.graph, self.layout, self.trace, self.step_config, self.spec),
            self.pins,
            self.gpu,
            self.host_bytes,
        )

    def least_gpu_bytes(self, host_bytes: int | None = None) -> int | None:
        """Minimum GPU bytes that a plan needs with this much host memory (by default the problem's). None if no amount
        is enough.
        """
        least = self.budgets.least_gpu(host_bytes=host_bytes)
        return least[0] if least else None

    def least_gpu_memory(self) -> int | None:
        """The smallest `gpu_memory` that is enough. None if no amount is."""
        least = self.least_gpu_bytes()
        return self.gpu.total_for(least) if least is not None else None

    def least_host_bytes(self) -> int | None:
        """Minimum host bytes with this GPU budget."""
        least = self.budgets.least_host()
        return least[0] if least else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The result of one change."""

    name: str
    step_seconds: float | None
    """None: it does not fit."""
    note: str
    """The bottleneck, or the memory that is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    plan: Plan
    recipes: tuple[Answer, ...]
    """Common recipes, as pins. The search chooses the rest."""
    hardware_upgrades: tuple[Answer, ...]
    """Plans with one property of the machine changed."""
    least_gpu_bytes: int | None
    least_host_bytes: int | None

    def __str__(self) -> str:
        chosen = self.plan.estimate.step_seconds
        lines = [f"chosen    {show_seconds(chosen)} a step; {self.plan.search}"]
        for label, answers in (("recipes", self.recipes), ("upgrades", self.hardware_upgrades)):
            width = max((len(a.name) for a in answers), default=0)
            lines += [
                f"{label if i == 0 else '':<9} {a.name:<{width}}  {_compared(a, chosen)}" for i, a in enumerate(answers)
            ]
        return "\n".join([*lines, f"minimum   {_minimum(self.plan, self.least_gpu_bytes, self.least_host_bytes)}"])


def explain(problem: Problem, plan: Plan) -> Explanation:
    """`plan`: the problem's solution."""
    return Explanation(
        plan=plan,
        recipes=tuple(_answer(name, replace(problem, pins=pins)) for name, pins in _recipes(problem)),
        hardware_upgrades=tuple(_upgrade(name, changed, plan) for name, changed in _changes(problem)),
        least_gpu_bytes=problem.least_gpu_memory(),
        least_host_bytes=problem.least_host_bytes(),
    )


def what_if(problem: Problem, plan: Plan, smallest: str | None) -> str:
    """Two lines: the gain from more GPU memory, and the minimum memory. `smallest`: the name of the smallest machine
    that is large enough.
    """
    name, changed = next(_changes(problem))
    gain = _compared(_upgrade(name, changed, plan), plan.estimate.step_seconds)
    minimum = _minimum(plan, problem.least_gpu_memory(), problem.least_host_bytes())
    machine = (
        f"smallest machine of the catalog: {smallest}" if smallest else "no machine of the catalog is large enough"
    )
    return f"more    {name}: {gain}\nminimum {minimum}; {machine}"


def _minimum(plan: Plan, gpu_bytes: int | None, host_bytes: int | None) -> str:
    budget = f"{show_bytes(plan.host_budget_bytes)} host"
    if gpu_bytes is None:
        text = f"no GPU is large enough with {budget}"
    else:
        text = f"{show_enough(gpu_bytes)} GPU with {budget}"
    if host_bytes is not None:
        text += f"; {show_enough(host_bytes) if host_bytes else '0 B'} host with this GPU"
    return text


def _recipes(problem: Problem) -> Iterator[tuple[str, Pins]]:
    space = problem.budgets.space
    chunks, states, layers = len(space.weight_order), len(space.state_order), space.num_layers
    keep = Pins(**{strategy.pin: 0 for strategy in choices() if strategy.pin})
    recomputes = next(strategy for strategy in choices() if strategy.recomputes and not strategy.sends)
    recompute = replace(keep, **{recomputes.pin: layers[recomputes.name]})
    yield "everything on the GPU", replace(keep, n_persist=chunks, n_optimizer_gpu=states)
    yield "everything on the GPU, layers recomputed", replace(recompute, n_persist=chunks, n_optimizer_gpu=states)
    yield "optimizer on the host, layers recomputed", replace(recompute, n_persist=chunks, n_optimizer_gpu=0)
    yield "weights and optimizer on the host, layers recomputed", replace(recompute, n_persist=0, n_optimizer_gpu=0)


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    spec = problem.spec
    more = replace(problem.gpu, total_bytes=problem.gpu.total_bytes + MORE_GPU_BYTES)
    yield f"{show_bytes(MORE_GPU_BYTES)} more GPU memory", replace(problem, gpu=more)
    for name, fields in (
        ("GPU compute twice as fast", ("flops", "gpu_bytes_per_second")),
        ("copies twice as fast", ("h2d_bytes_per_second", "d2h_bytes_per_second")),
        ("CPU updates twice as fast", ("host_adam_params_per_second", "host_bytes_per_second")),
    ):
        faster = replace(spec, **{field: 2 * getattr(spec, field) for field in fields})
        trace = _halved(problem.trace, "forward_seconds", "backward_seconds") if "flops" in fields else problem.trace
        yield name, replace(problem, spec=faster, trace=trace)
    if any(work.forward_launch_seconds for call in problem.trace.calls for work in call.values()):
        yield (
            "Python twice as fast",
            replace(problem, trace=_halved(problem.trace, "forward_launch_seconds", "backward_launch_seconds")),
        )


def _halved(trace: ModelTrace, *fields: str) -> ModelTrace:
    calls = tuple(
        {s: replace(work, **{field: getattr(work, field) / 2 for field in fields}) for s, work in call.items()}
        for call in trace.calls
    )
    return replace(trace, calls=calls)


def _upgrade(name: str, problem: Problem, plan: Plan) -> Answer:
    """The answer for a better machine. If its plan is slower, the given plan, which fits too."""
    answer = _answer(name, problem)
    if answer.step_seconds is not None and answer.step_seconds > plan.estimate.step_seconds:
        return Answer(name=name, step_seconds=plan.estimate.step_seconds, note=busiest_lane(plan))
    return answer


def _answer(name: str, problem: Problem) -> Answer:
    try:
        plan = problem.solve()
    except PlanInfeasible as no:
        needed = f"{show_bytes(no.needed_bytes)} of {'GPU' if no.resource == 'gpu' else 'host'} memory"
        return Answer(
            name=name, step_seconds=None, note=f"does not fit: {needed}, {show_bytes(no.allowed_bytes)} allowed"
        )
    except ConfigError:  # the layers do not support the recipe's strategy
        return Answer(name=name, step_seconds=None, note="the layers do not support it")
    return Answer(name=name, step_seconds=plan.estimate.step_seconds, note=busiest_lane(plan))


def _compared(answer: Answer, chosen: float) -> str:
    if answer.step_seconds is None:
        return answer.note
    ratio = answer.step_seconds / chosen if chosen else 1.0
    by = "as fast" if abs(ratio - 1) < 0.005 else f"{1 - ratio:.0%} less" if ratio < 1 else f"{ratio - 1:.0%} more"
    return f"{show_seconds(answer.step_seconds)} ({by}; {answer.note})"
