"""Renders a plan as text: strategy and homes of every block, memory totals and the bottleneck.

The text is about a hundred columns wide and has no terminal codes, so that it suits terminals, logs and issues.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outsize.base.units import show_bytes, show_seconds
from outsize.hardware.lanes import lane_words
from outsize.layout.chunks import ChunkLayout
from outsize.model.graph import BlockGraph
from outsize.model.strategies import STRATEGY
from outsize.schedule.buffers import group_of
from outsize.schedule.plan import Homes, Plan

BAR_WIDTH = 40
BUSY_SHARE = 0.9
"""A lane that is busy for this share of the step is the bottleneck."""
MIN_REPORTED_SHARE = 0.05
"""Share of the step. Less launch-bound time than this is not reported."""
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Row:
    """A block call in the table."""

    name: str
    strategy: str
    homes: str
    nbytes: int
    """Bytes of the weights that this call is the first to use."""


def render(plan: Plan, graph: BlockGraph, layout: ChunkLayout, notes: Mapping[str, str] | None = None) -> str:
    """The whole text. `notes`: text to append, by a label of at most five letters; empty ones are skipped."""
    said = [line for label, text in (notes or {}).items() if text for line in _wrap(f"{label:<6}", text)]
    parts = [head(plan, graph), _table(plan, graph, layout), _memory(plan), [*_time(plan), *said]]
    text = "\n\n".join("\n".join(part) for part in parts)
    if plan.hardware != "cpu":
        return text
    return text.replace("GPU", "CPU").replace("weights gpu", "weights cpu").replace("optimizer gpu", "optimizer cpu")


def summary(plan: Plan) -> str:
    """The plan in one line, for a log."""
    estimate, decision = plan.estimate, plan.decision
    counts = {s: decision.strategies.count(s) for s in STRATEGY if s != "keep"}
    strategies = ", ".join(f"{count} {s}" for s, count in counts.items() if count) or "all keep"
    resident = sum(homes.weights == "gpu" for homes in decision.homes)
    updated = sum(homes.state == "gpu" for homes in decision.homes)
    gpu = (
        f"GPU {show_bytes(estimate.gpu_bytes)} of {show_bytes(plan.gpu_budget_bytes)}, host "
        f"{show_bytes(estimate.host_bytes)}"
    )
    homes = f"weights {resident}/{len(decision.homes)} and optimizer {updated}/{len(decision.homes)} chunks on the GPU"
    return f"{show_seconds(estimate.step_seconds)} a step, {gpu}; {homes}; {strategies}; depth {decision.depth}"


def head(plan: Plan, graph: BlockGraph) -> list[str]:
    """Lines with the model, the machine, the batch and the update mode."""
    batch = ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in plan.inputs.items() if shape)
    update = {"after_step": "updated after the step", "in_backward": "updated in backward"}[plan.step_config.update]
    if plan.decision.host_update_interval > 1:
        update += f" (on the host: 1 of {plan.decision.host_update_interval}, the others after these)"
    accumulate = f", {plan.step_config.accumulate} micro-batches a step" if plan.step_config.accumulate > 1 else ""
    trainable = (
        "all trainable" if graph.num_trainable == graph.num_params else f"{_show_count(graph.num_trainable)} trainable"
    )
    loss = [f"loss {plan.loss}"] if plan.loss else []
    loss += [f"attention {plan.attention}"] if plan.attention else []
    return [
        f"{_show_count(graph.num_params)} parameters, {trainable}, on {plan.hardware}",
        f"batch {batch}{accumulate}; {update}",
        *loss,
        *_tiles(plan),
    ]


def _tiles(plan: Plan) -> list[str]:
    if not plan.tiled:
        return []
    kinds = list(dict.fromkeys(name.rpartition(".")[2] for name in plan.tiled))
    return [f"tiles of {plan.tile_tokens} tokens in {len(plan.tiled)} modules: {', '.join(kinds)}"]


def group_rows(plan: Plan, graph: BlockGraph, layout: ChunkLayout) -> list[list[Row]]:
    """All calls in order. Consecutive calls with the same values form a group."""
    groups: list[list[Row]] = []
    seen: set[int] = set()
    for call in range(len(graph.calls)):
        row = _row(plan, graph, layout, call, seen)
        seen.update(layout.used_by(call))
        if groups and _alike(groups[-1][-1], row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def group_cells(group: Sequence[Row]) -> tuple[str, str, str, str]:
    """Block, activations, homes and weights of a group."""
    first = group[0]
    times = f"{len(group)} × " if len(group) > 1 else ""
    size = f"{times}{show_bytes(first.nbytes)}" if first.nbytes else ("tied" if first.homes else "none")
    return _range(first.name, group[-1].name), first.strategy, first.homes, size


def _table(plan: Plan, graph: BlockGraph, layout: ChunkLayout) -> list[str]:
    cells = [("block", "activations", "homes", "weights"), *map(group_cells, group_rows(plan, graph, layout))]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    lines = [
        "  ".join(
            (*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=False)), row[3].rjust(widths[3]))
        ).rstrip()
        for row in cells
    ]
    return [lines[0], "─" * max(map(len, lines)), *lines[1:]]


def _row(plan: Plan, graph: BlockGraph, layout: ChunkLayout, call: int, seen: set[int]) -> Row:
    chunks = layout.used_by(call)
    trainable = [c for c in chunks if plan.step_config.update_of(layout.chunks[c]) is not None]
    homes = ""
    if chunks:
        weights = [plan.decision.homes[c].weights for c in chunks]
        states = [plan.decision.homes[c] for c in trainable]
        homes = f"weights {_places(weights)}"
        homes += f", optimizer {_places([_state_words(h) for h in states])}" if trainable else ", frozen"
        if 0 < len(trainable) < len(chunks):
            homes += f", {len(chunks) - len(trainable)} of {len(chunks)} frozen"
    return Row(
        graph.call_name(call),
        plan.decision.strategies[call],
        homes,
        sum(layout.chunks[c].nbytes for c in chunks if c not in seen),
    )


def _state_words(homes: Homes) -> str:
    return "streamed" if homes.streams_state else homes.state


def _places(homes: Sequence[str]) -> str:
    """`gpu`, or `3 gpu + 1 host` chunks where they differ."""
    return (
        " + ".join(f"{homes.count(home)} {home}" for home in dict.fromkeys(homes)) if len(set(homes)) > 1 else homes[0]
    )


def _alike(a: Row, b: Row) -> bool:
    """Whether one row can represent both: `layers.3` and `layers.4` with all else equal."""
    stem_a, stem_b = (_NUMBER.sub("#", row.name) for row in (a, b))
    return stem_a == stem_b and a.name != b.name and (a.strategy, a.homes, a.nbytes) == (b.strategy, b.homes, b.nbytes)


def _range(first: str, last: str) -> str:
    """`model.layers.4-27`: the first number in which the two differ becomes a range."""
    if first == last:
        return first
    for a, b in zip(_NUMBER.finditer(first), _NUMBER.finditer(last), strict=True):
        if a[0] != b[0]:
            return f"{first[: a.start()]}{a[0]}-{b[0]}{first[a.end() :]}"
    return f"{first} … {last}"


def _memory(plan: Plan) -> list[str]:
    estimate = plan.estimate
    gpu = _by_group(estimate.gpu_parts)
    gpu["activations"] = gpu.get("activations", 0) + estimate.gpu_bytes - sum(estimate.gpu_parts.values())
    host = host_parts(plan)
    note = f"      GPU memory peaks at {estimate.peak_at}"
    if "slot" in estimate.gpu_parts:
        depth = plan.decision.depth
        note += "; weights are loaded " + (
            f"{depth} block{'s' * (depth > 1)} ahead" if depth else "when their block comes"
        )
    own = plan.process_overhead.host_bytes
    beside = [f"      and {show_bytes(own)} that Python, its libraries and the driver have there"] if own else []
    return [
        *_bar("GPU", estimate.gpu_bytes, plan.gpu_budget_bytes, gpu),
        *_bar("host", estimate.host_bytes, plan.host_budget_bytes, host),
        *beside,
        note,
    ]


def host_parts(plan: Plan) -> dict[str, int]:
    """Host bytes by group."""
    return _by_group(plan.estimate.host_parts)


def _by_group(parts: dict[str, int]) -> dict[str, int]:
    """Sum bytes by group. `buffers` are the model's own; all other names are kinds of plan buffers."""
    total: dict[str, int] = {}
    for kind, size in parts.items():
        group = group_of(kind)
        total[group] = total.get(group, 0) + size
    return total


def _bar(name: str, used: int, budget: int, parts: dict[str, int]) -> list[str]:
    eighths = min(BAR_WIDTH * 8, round(BAR_WIDTH * 8 * used / max(1, budget)))
    full, rest = divmod(eighths, 8)
    bar = ("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")).ljust(BAR_WIDTH, "·")
    shown = [
        f"{word} {show_bytes(size)}"
        for word, size in sorted(parts.items(), key=lambda item: -item[1])
        if size * 1000 > used
    ]
    return [
        f"{name:<5} {bar} {show_bytes(used)} of {show_bytes(budget)} ({used / max(1, budget):.0%})",
        *([f"      {', '.join(shown)}"] if shown else []),
    ]


def tokens_per_second(plan: Plan) -> float | None:
    """None if the batch has no tokens."""
    shape, seconds = plan.inputs.get("input_ids", ()), plan.estimate.step_seconds
    return shape[0] * shape[1] * plan.step_config.accumulate / seconds if len(shape) == 2 and seconds else None


def lane_shares(plan: Plan) -> dict[str, float]:
    """Share of the step in which each lane is busy."""
    seconds = plan.estimate.step_seconds
    return {lane: busy / seconds if seconds else 0.0 for lane, busy in plan.estimate.busy_seconds.items()}


def bottleneck_text(plan: Plan) -> str:
    """The bottleneck of the step."""
    shares = lane_shares(plan)
    busiest = max(shares, key=lambda lane: shares[lane], default="compute")
    most = f"{lane_words(busiest)}, {shares.get(busiest, 0.0):.0%} of the step"
    if busiest == "compute" and (starved := _starved_share(plan)):
        most += f" ({starved:.0%} of it launch-bound)"
    return (
        most if shares.get(busiest, 0.0) >= BUSY_SHARE else f"dependencies: no lane works all the time (most: {most})"
    )


def busiest_lane(plan: Plan) -> str:
    """The busiest lane and its share of the step, as short text."""
    shares = lane_shares(plan)
    busiest = max(shares, key=lambda lane: shares[lane], default="compute")
    starved = _starved_share(plan) if busiest == "compute" else 0.0
    return f"{busiest} {shares.get(busiest, 0.0):.0%}" + (f" ({starved:.0%} of it launch-bound)" if starved else "")


def _starved_share(plan: Plan) -> float:
    """Launch-bound share of compute; 0 if it is too small to report."""
    computing, starved = plan.estimate.busy_seconds.get("compute", 0.0), plan.estimate.launch_bound_seconds
    return starved / computing if computing and starved >= MIN_REPORTED_SHARE * plan.estimate.step_seconds else 0.0


def _time(plan: Plan) -> list[str]:
    rate = tokens_per_second(plan)
    lanes = ", ".join(f"{lane} {share:.0%}" for lane, share in lane_shares(plan).items())
    return [
        f"step  {show_seconds(plan.estimate.step_seconds)} "
        f"predicted{f', {rate:,.0f} tokens/s' if rate is not None else ''}",
        f"bottleneck {bottleneck_text(plan)}",
        f"lanes {lanes}",
        *([f"      time and memory are {extrapolation(plan)}"] if plan.extrapolated_from else []),
        *_wrap("from  ", plan.provenance),
        *_wrap("found ", plan.search),
    ]


def extrapolation(plan: Plan) -> str:
    """Where an extrapolated plan has its figures from, as text."""
    *others, last = map(str, plan.extrapolated_from)
    return f"extrapolated from rows of {', '.join(others)} and {last} tokens"


def _wrap(label: str, text: str, width: int = 94) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + word
    return [(label if i == 0 else " " * len(label)) + line for i, line in enumerate(lines)]


def _show_count(number: int) -> str:
    for unit, factor in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return str(number)
