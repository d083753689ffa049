"""Settings that train more tokens per second on the same machine, and whether its host memory is the limit.

Each answer is one search with one change.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from outsize.base.errors import OutsizeError
from outsize.base.units import show_enough
from outsize.forecast.forecast import Forecast, ForecastRequest, forecast
from outsize.planner.explain import Problem
from outsize.schedule.plan import Plan
from outsize.schedule.render import lane_shares, tokens_per_second

LEAST_GAIN = 0.03
"""A smaller gain is not reported."""
MORE_PASSES = 4
COMPUTE_BOUND = 0.95
"""Share of the step that the GPU computes. Above it, a larger micro-batch is not traced, which takes seconds."""
FULL_RATE_TOKENS = 2048
"""Matrix products of so many tokens run at the GPU's full rate."""
_ANY_HOST_BYTES = 2**50


@dataclass(frozen=True, slots=True)
class Change:
    name: str
    """The setting, by its name in a run file."""
    tokens_per_second: float
    note: str = ""


def faster(model: Any, request: ForecastRequest, found: Forecast) -> str:
    """Lines for people; empty if nothing is faster. Takes about two seconds."""
    rate = found.tokens_per_second
    gains = [change for change in _changes(model, request, found) if change.tokens_per_second > rate * (1 + LEAST_GAIN)]
    lines = [
        f"{change.name}: {change.tokens_per_second:,.0f} tokens/s ({change.tokens_per_second / rate - 1:+.0%})"
        + (f", {change.note}" if change.note else "")
        for change in gains
    ]
    return "\n".join(f"{'faster' if i == 0 else '':<7} {line}" for i, line in enumerate(lines))


def _changes(model: Any, request: ForecastRequest, found: Forecast) -> Iterator[Change]:
    problem, step = found.problem, found.problem.step_config
    if request.batch_size is None:
        passes = MORE_PASSES * step.accumulate
        accumulated = _solve(replace(problem, step_config=replace(step, update="after_step", accumulate=passes)))
        if accumulated is not None:
            note = f"with {MORE_PASSES} times the tokens a step"
            yield Change(f"gradient_accumulation_steps {passes}", _rate(accumulated), note)
        rows = request.micro_batch_size or 1
        is_bound = lane_shares(found.plan).get("compute", 0.0) >= COMPUTE_BOUND
        if not is_bound or rows * request.sequence_len < FULL_RATE_TOKENS:
            try:
                larger = forecast(model, replace(request, micro_batch_size=2 * rows))
                yield Change(f"micro_batch_size {2 * rows}", larger.tokens_per_second, "with twice the tokens a step")
            except OutsizeError:
                pass  # it does not fit
    if step.update == "after_step" and step.accumulate == 1:
        early = _solve(replace(problem, step_config=replace(step, update="in_backward")))
        if early is not None:
            yield Change("max_grad_norm 0", _rate(early), "without clipping, updates run in backward")
    any_host = _solve(replace(problem, host_bytes=_ANY_HOST_BYTES))
    if any_host is not None:
        needed = show_enough(any_host.estimate.host_bytes)
        yield Change(f"host_memory {needed}", _rate(any_host), "host memory is the limit")


def _solve(problem: Problem) -> Plan | None:
    try:
        return problem.solve()
    except OutsizeError:
        return None


def _rate(plan: Plan) -> float:
    return tokens_per_second(plan) or 0.0
