"""What `outsize plan` says below the plan: faster settings, more memory, less memory.

Profiling a larger micro-batch takes as long as all searches together, so these run in a second process meanwhile.
"""

import signal
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import TYPE_CHECKING

from outsize.base.errors import OutsizeError, PlanInfeasible
from outsize.base.units import show_bytes, show_seconds
from outsize.planner.explain import what_if
from outsize.planner.faster import Change, more_passes, same_batch
from outsize.schedule.render import busiest_lane, lane_shares

if TYPE_CHECKING:
    from outsize.forecast.forecast import Forecast, ForecastRequest

LEAST_GAIN = 0.03
"""A smaller gain is not reported."""
COMPUTE_BOUND = 0.95
"""Share of the step that the GPU computes. Above it, a larger micro-batch is not profiled, which takes seconds."""
FULL_RATE_TOKENS = 2048
"""Matrix products of so many tokens run at the GPU's full rate."""
FULL_SHARE = 0.9
"""Rows with less of the planned tokens on average gain from packing."""


def advice(model: str, request: "ForecastRequest", made: "Forecast", filled: float) -> str:
    """`filled`: the share of the planned tokens that rows have on average."""
    from outsize.forecast.row_lengths import is_long, limit_of_longer_rows

    problem = replace(made.problem)  # without the values that it caches
    # Not forked: torch's threads do not survive it. The first process handles interrupts.
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as beside:
        other_passes = beside.submit(more_passes, problem) if request.batch_size is None else None
        others = beside.submit(same_batch, problem)
        memory = beside.submit(what_if, problem, made.plan, made.smallest_machine())
        larger = _larger_micro_batch(model, request, made) if request.batch_size is None else []
        changes = [*(other_passes.result() if other_passes else []), *larger, *others.result()]
        lines = [_faster(changes, made.tokens_per_second), memory.result()]
    if is_long(request):
        lines.append(limit_of_longer_rows(model, request, made))
    if filled < FULL_SHARE:
        rate = made.tokens_per_second * filled
        lines.insert(
            0,
            f"packing rows have {filled:.0%} of these tokens on average, so about {rate:,.0f} real tokens/s; "
            "sample_packing fills them",
        )
    return "\n".join(line for line in lines if line)


def saved_by_4bit(model: str, request: "ForecastRequest", made: "Forecast") -> str:
    """What a 4-bit base would save of a plan for an adapter over an unquantized one."""
    from outsize.forecast.forecast import forecast
    from outsize.quant.settings import Quantization

    if request.adapter is None or made.is_quantized:
        return ""
    try:
        found = forecast(model, replace(request, quantization=Quantization(load_in_4bit=True), pins=None))
    except PlanInfeasible:
        return "4-bit     does not fit"
    except OutsizeError as error:
        return f"4-bit     {error}"
    was, seconds = made.plan.estimate.step_seconds, found.plan.estimate.step_seconds
    change = f"{abs(1 - seconds / was):.0%} {'less' if seconds < was else 'more'}"
    return (
        f"4-bit     weights {show_bytes(found.weight_bytes)} instead of {show_bytes(made.weight_bytes)}; "
        f"{show_seconds(seconds)} ({change}; {busiest_lane(found.plan)})"
    )


def _larger_micro_batch(model: str, request: "ForecastRequest", found: "Forecast") -> list[Change]:
    from outsize.forecast.forecast import forecast

    rows = request.micro_batch_size or 1
    is_bound = lane_shares(found.plan).get("compute", 0.0) >= COMPUTE_BOUND
    if is_bound and rows * request.sequence_len >= FULL_RATE_TOKENS:
        return []
    try:
        larger = forecast(model, replace(request, micro_batch_size=2 * rows))
    except OutsizeError:
        return []  # it does not fit
    return [Change(f"micro_batch_size {2 * rows}", larger.tokens_per_second, "with twice the tokens a step")]


def _faster(changes: list[Change], rate: float) -> str:
    gains = [change for change in changes if change.tokens_per_second > rate * (1 + LEAST_GAIN)]
    lines = [
        f"{change.name}: {change.tokens_per_second:,.0f} tokens/s ({change.tokens_per_second / rate - 1:+.0%}), "
        f"{change.note}"
        for change in gains
    ]
    return "\n".join(f"{'faster' if i == 0 else '':<7} {line}" for i, line in enumerate(lines))
