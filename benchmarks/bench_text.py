"""A benchmark's result as text: measurement, prediction and the limit of the machine."""

from collections.abc import Sequence

from benchmarks.bench_record import Baseline, Result
from outsize.base.units import show_bytes, show_seconds
from outsize.hardware.lanes import lane_words
from outsize.schedule.render import BUSY_SHARE


def show(result: Result) -> str:
    speed, memory, plan, bench = result.speed, result.memory, result.plan, result.bench
    pace = f"median; {show_seconds(speed.window_seconds / bench.steps)} in the mean of {bench.steps}"
    cells = [
        ("", "measured", "predicted", ""),
        (
            "tokens/s",
            f"{speed.tokens_per_second:,.0f}",
            f"{bench.tokens / plan.step_seconds:,.0f}" if plan.step_seconds else "",
            "over the whole window",
        ),
        ("step", show_seconds(speed.median_step_seconds), show_seconds(plan.step_seconds), pace),
    ]
    if memory.gpu_peak_bytes is not None:
        reserved = (
            f"{show_bytes(memory.gpu_reserved_bytes)} reserved; " if memory.gpu_reserved_bytes is not None else ""
        )
        kept = f"{reserved}{show_bytes(plan.gpu_budget_bytes)} allowed"
        cells.append(("GPU peak", show_bytes(memory.gpu_peak_bytes), show_bytes(plan.gpu_bytes), kept))
    rss = (
        f"{memory.host_bytes_per_param:.3g} bytes a parameter; {show_bytes(memory.host_before_bytes)} of it before "
        "the model"
    )
    cells.append(("host peak", show_bytes(memory.host_peak_bytes), show_bytes(plan.host_bytes), rss))
    start = result.start_up
    lines = [
        *_head(result),
        "",
        *_columns(cells),
        "",
        f"start-up  build {show_seconds(start.build_seconds)}, prepare {show_seconds(start.prepare_seconds)}, "
        f"first step {show_seconds(start.first_step_seconds)}",
        f"lanes     {_lanes(result)}",
        f"limit     {result.limit_ratio:.2f} × the limit of {show_seconds(result.limit.seconds)} "
        f"({result.limit.bottleneck} {_bind(result.limit.bottleneck)})",
        f"plan      {plan.fingerprint}",
        *(f"{name:<9} {_baseline_text(baseline)}" for name, baseline in result.baselines.items()),
    ]
    if not result.losses_finite:
        lines.append("WRONG     a loss is not finite")
    if not result.within_budget:
        lines.append("WRONG     the GPU's budget was exceeded")
    return "\n".join(lines)


def show_all(results: Sequence[Result]) -> str:
    """One line for each."""
    cells = [("shape", "tokens/s", "step", "predicted", "GPU peak", "host peak", "B/param", "× limit", "bottleneck")]
    for result in results:
        peak = result.memory.gpu_peak_bytes
        cells.append(
            (
                result.bench.model,
                f"{result.speed.tokens_per_second:,.0f}",
                show_seconds(result.speed.median_step_seconds),
                show_seconds(result.plan.step_seconds),
                show_bytes(peak) if peak is not None else "",
                show_bytes(result.memory.host_peak_bytes),
                f"{result.memory.host_bytes_per_param:.3g}",
                f"{result.limit_ratio:.2f}",
                result.limit.bottleneck,
            )
        )
    return "\n".join(_columns(cells))


def _head(result: Result) -> list[str]:
    bench = result.bench
    micro = f", {bench.accumulate} micro-batches a step" if bench.accumulate > 1 else ""
    clip = f", clipped at {bench.clip:g}" if bench.clip is not None else ""
    update = {"in_backward": "updated in backward", "after_step": "updated after the step"}[bench.update]
    update += f", OSFT with {bench.osft:.0%} of the directions" if bench.osft is not None else ""
    under = f" under {bench.gpu_memory}" if bench.gpu_memory is not None else ""
    simulated = " (a simulated clock)" if result.is_simulated else ""
    size = f"{result.num_params / 1e9:.3g} B" if result.num_params >= 1e8 else f"{result.num_params / 1e6:.3g} M"
    return [
        f"{bench.model}, {size} parameters, {bench.micro_batch} × {bench.seq} tokens{micro}, {update}{clip}, on "
        f"{result.machine.device}{under}{simulated}"
    ]


def _lanes(result: Result) -> str:
    lanes = result.lanes
    shares = ", ".join(f"{lane} {share:.0%}" for lane, share in lanes.shares.items())
    most = lanes.shares[lanes.bottleneck]
    busiest = (
        f"{lane_words(lanes.bottleneck)} {_bind(lanes.bottleneck)}"
        if most >= BUSY_SHARE
        else "no lane works all the time"
    )
    return f"{shares} of a step; {busiest}"


def _bind(name: str) -> str:
    return "bind" if name in ("h2d", "d2h", "host") or name.startswith(("copies", "host updates")) else "binds"


def _baseline_text(baseline: Baseline) -> str:
    if baseline.speed is None:
        return baseline.problem
    gpu = f", GPU peak {show_bytes(baseline.gpu_peak_bytes)}" if baseline.gpu_peak_bytes is not None else " on the CPU"
    ours = (
        f"ours has {baseline.ratio:.2f} × its speed" if baseline.ratio is not None else "not compared: simulated clock"
    )
    return (
        f"{baseline.speed.tokens_per_second:,.0f} tokens/s, {show_seconds(baseline.speed.median_step_seconds)} a "
        f"step{gpu}; {ours}"
    )


def _columns(cells: Sequence[tuple[str, ...]]) -> list[str]:
    """The first and the last column begin at the left, numbers end at the right."""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    last = len(widths) - 1
    lines = [
        "  ".join(
            cell.ljust(w) if i in (0, last) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return [lines[0].rstrip(), "─" * max(len(line.rstrip()) for line in lines), *(line.rstrip() for line in lines[1:])]
