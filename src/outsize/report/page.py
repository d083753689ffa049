"""A plan as one HTML page: summary, memory and lanes over one step, and the strategy and homes of every block.

The page is one file without external resources. Texts and tables are written here, escaped; page.js draws the charts
from the data in the page.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path

from outsize.base.records import fingerprint
from outsize.base.units import show_bytes, show_seconds
from outsize.hardware.lanes import LANES, lane_words
from outsize.hardware.spec import HardwareSpec
from outsize.layout.chunks import ChunkLayout
from outsize.model.graph import BlockGraph
from outsize.report.measured import Measured, MeasuredStep, last_step
from outsize.report.step import KINDS, PassSpan, Step, StepSpan, describe, placement_of, step_of
from outsize.schedule.actions import TYPES
from outsize.schedule.placement import Placement
from outsize.schedule.plan import Plan
from outsize.schedule.render import (
    Row,
    bottleneck_text,
    group_cells,
    group_rows,
    head,
    host_parts,
    lane_shares,
    tokens_per_second,
)

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")
_KIND_WORDS = {"returned": "returned activations"}


def write_page(
    path: Path,
    plan: Plan,
    graph: BlockGraph,
    layout: ChunkLayout,
    spec: HardwareSpec,
    *,
    title: str = "",
    measured: Measured | None = None,
) -> None:
    path.write_text(page(plan, graph, layout, spec, title=title, measured=measured), encoding="utf-8")


def page(
    plan: Plan,
    graph: BlockGraph,
    layout: ChunkLayout,
    spec: HardwareSpec,
    *,
    title: str = "",
    measured: Measured | None = None,
) -> str:
    """`title`: the name of the model. `measured`: a run of this plan, shown beside the prediction."""
    place = placement_of(plan, graph, layout)
    step = step_of(plan, graph, layout, spec)
    real = last_step(measured.spans, plan.step_config.accumulate) if measured is not None else None
    groups = group_rows(plan, graph, layout)
    parts = {
        "title": escape(title or "A training plan"),
        "verdict": _verdict(plan),
        "headline": _headline(plan, graph),
        "fullest": _fullest(plan, place),
        "kinds": "".join(
            f'<li><i class="kind-{kind}"></i>{_KIND_WORDS.get(kind, kind)}</li>'
            for kind, size in _at_peak(step).items()
            if size
        ),
        "memory": _meter("GPU memory", plan.estimate.gpu_bytes, plan.gpu_budget_bytes, _at_peak(step))
        + _meter("Host memory", plan.estimate.host_bytes, plan.host_budget_bytes, host_parts(plan)),
        "lanes": "".join(_share(lane, share) for lane, share in lane_shares(plan).items()),
        "comparison": _comparison(plan, measured, real) if measured is not None else "",
        "blocks": _map(place, groups) + _table(groups),
        "footer": _footer(plan),
        "data": _script_safe(_data(plan, place, step, groups, measured, real)),
        "style": _file("page.css"),
        "script": _file("page.js"),
    }
    # In one pass, so that inserted text is not searched for placeholders.
    return _PLACEHOLDER.sub(lambda match: parts[match[1]], _file("page.html"))


def _file(name: str) -> str:
    return files("outsize.report").joinpath(name).read_text(encoding="utf-8")


def _script_safe(data: object) -> str:
    """JSON that cannot end the script element around it."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


# The numbers at the top.


def _verdict(plan: Plan) -> str:
    estimate = plan.estimate
    too_much = [
        f"{name} memory by {show_bytes(used - budget)}"
        for name, used, budget in (
            ("GPU", estimate.gpu_bytes, plan.gpu_budget_bytes),
            ("host", estimate.host_bytes, plan.host_budget_bytes),
        )
        if used > budget
    ]
    return (
        f'<span class="no">Does not fit: over {" and ".join(too_much)}</span>'
        if too_much
        else '<span class="yes">Fits</span>'
    )


def _headline(plan: Plan, graph: BlockGraph) -> str:
    rate = tokens_per_second(plan)
    facts = [("tokens/s", f"{rate:,.0f}")] if rate is not None else []
    facts += [("a step", show_seconds(plan.estimate.step_seconds)), ("bottleneck", bottleneck_text(plan))]
    shown = "".join(
        f'<div class="fact{" long" * (name == "bottleneck")}"><dd>{escape(value)}</dd><dt>{escape(name)}</dt></div>'
        for name, value in facts
    )
    about = "<br>".join(escape(line) for line in head(plan, graph))
    return f'<dl class="facts">{shown}</dl><p class="about">{about}</p>'


def _fullest(plan: Plan, place: Placement) -> str:
    at = plan.estimate.peak_at
    where = f" at {at}, {describe(place, at)}" if at != "rest" else " all the time"
    return escape(f"peak {show_bytes(plan.estimate.gpu_bytes)},{where}")


def _at_peak(step: Step) -> dict[str, int]:
    fullest = max(step.moments, key=lambda moment: moment.activations + moment.transients)
    return {**step.allocated, "activations": max(0, fullest.activations), "transients": fullest.transients}


def _meter(name: str, used: int, budget: int, parts: Mapping[str, int]) -> str:
    """A bar of the used memory by kind, as long as the budget."""
    scale = max(used, budget, 1)
    shown = [(kind, size) for kind, size in parts.items() if size * 1000 > used]
    bar = "".join(f'<i class="kind-{escape(kind)}" style="width:{size / scale:.3%}"></i>' for kind, size in shown)
    names = "".join(
        f'<li><i class="kind-{escape(kind)}"></i>{escape(kind)} <b>{show_bytes(size)}</b></li>' for kind, size in shown
    )
    over = ' class="meter over"' if used > budget else ' class="meter"'
    return (
        f"<div{over}><h3>{name} <span><b>{show_bytes(used)}</b> of {show_bytes(budget)}, "
        f"{used / max(1, budget):.0%}</span></h3>"
        f'<div class="bar" role="img" aria-label="{name}: {show_bytes(used)} of {show_bytes(budget)}">{bar}</div><ul class="legend">{names}</ul></div>'
    )


def _share(lane: str, share: float) -> str:
    words = escape(lane_words(lane))
    return f'<div class="share"><span>{words}</span><div class="bar"><i style="width:{min(1.0, share):.3%}"></i></div><b>{share:.0%}</b></div>'


# The blocks.


def _map(place: Placement, groups: list[list[Row]]) -> str:
    rows = [row for group in groups for row in group]
    cells: dict[str, list[str]] = {"activations": [], "weights": [], "optimizer": []}
    for call, row in enumerate(rows):
        chunks = [place.chunk(c) for c in place.layout.used_by(call)]
        trained = [chunk.index for chunk in chunks if place.is_updated(chunk.index)]
        homes = place.decision.homes
        cells["activations"].append(f'<i class="does-{escape(row.strategy)}" data-call="{call}"></i>')
        cells["weights"].append(_home(call, [(place.slot_bytes(c.index), homes[c.index].weights) for c in chunks]))
        cells["optimizer"].append(_home(call, [(place.state_bytes(c), homes[c].state) for c in trained]))
    strips = "".join(f'<span>{name}</span><div class="strip">{"".join(row)}</div>' for name, row in cells.items())
    used = dict.fromkeys(row.strategy for row in rows)
    legend = "".join(f'<li><i class="does-{escape(strategy)}"></i>{escape(strategy)}</li>' for strategy in used)
    legend += '<li><i class="home" style="--gpu:100%"></i>on the GPU</li><li><i class="home" style="--gpu:0%"></i>on the host</li>'
    if any("nothing" in cell for row in cells.values() for cell in row):
        legend += '<li><i class="nothing"></i>none</li>'
    about = f"{len(rows)} blocks: activation strategy, and home of weights and optimizer state"
    dense = " dense" if len(rows) > 100 else ""
    return f'<div class="map{dense}" id="map" tabindex="0" role="img" aria-label="{about}">{strips}</div><ul class="legend">{legend}</ul>'


def _home(call: int, sizes: Iterable[tuple[int, str]]) -> str:
    sizes = list(sizes)
    total = sum(size for size, _ in sizes)
    if not total:
        return f'<i class="nothing" data-call="{call}"></i>'
    return f'<i class="home" style="--gpu:{sum(size for size, home in sizes if home == "gpu") / total:.0%}" data-call="{call}"></i>'


def _table(groups: list[list[Row]]) -> str:
    body = ""
    for group in groups:
        block, strategy, homes, size = map(escape, group_cells(group))
        body += f'<tr><th scope="row">{block}</th><td><i class="chip does-{strategy}"></i>{strategy}</td><td>{homes}</td><td class="number">{size}</td></tr>'
    titles = '<th scope="col">block</th><th scope="col">activations</th><th scope="col">homes</th><th scope="col" class="number">weights</th>'
    return f'<div class="scroll"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


# A run.


def _comparison(plan: Plan, measured: Measured, real: MeasuredStep | None) -> str:
    estimate, rate = plan.estimate, tokens_per_second(plan)
    rows = [_compared("step, median", estimate.step_seconds, measured.step_seconds, show_seconds)]
    if rate is not None and measured.step_seconds:
        # The rate over a whole window differs from the median step's: name each.
        window = measured.tokens_per_second
        found = window if window is not None else rate * estimate.step_seconds / measured.step_seconds
        name = "tokens/s, over the whole window" if window is not None else "tokens/s, at the median step"
        rows.append(_compared(name, rate, found, lambda value: f"{value:,.0f}"))
    if measured.gpu_bytes is not None:
        rows.append(_compared("GPU peak", estimate.gpu_bytes, measured.gpu_bytes, show_bytes))
    if real is not None:
        rows += [
            _compared(f"{lane_words(lane)} busy", estimate.busy_seconds[lane], real.busy_seconds[lane], show_seconds)
            for lane in LANES
        ]
    titles = "".join(f'<th scope="col" class="number">{name}</th>' for name in ("predicted", "measured", "difference"))
    note = "" if real is not None else "<p class='note'>No whole step was recorded, so there are no measured lanes.</p>"
    return (
        f'<section aria-labelledby="run"><h2 id="run">Predicted and measured</h2><p class="note">Measured on {escape(measured.where)}.</p><div class="scroll">'
        f'<table class="compared"><thead><tr><td></td>{titles}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>{note}</section>'
    )


def _compared(name: str, predicted: float, found: float, show: Callable[[float], str]) -> str:
    apart = found / predicted - 1 if predicted else 0.0
    difference = "" if not predicted else f"{apart:+.1%}" if abs(apart) >= 0.0005 else "none"
    cells = "".join(f'<td class="number">{escape(text)}</td>' for text in (show(predicted), show(found), difference))
    return f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'


def _footer(plan: Plan) -> str:
    facts = {"Numbers": plan.provenance, "Search": plan.search, "Plan": fingerprint(plan)}
    return "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in facts.items())


# What page.js draws.


def _data(
    plan: Plan,
    place: Placement,
    step: Step,
    groups: list[list[Row]],
    measured: Measured | None,
    real: MeasuredStep | None,
) -> dict[str, object]:
    spans = [*step.spans, *(real.spans if real is not None else ())]
    names = list(dict.fromkeys(span.name for span in spans))
    number = {name: i for i, name in enumerate(names)}

    def lanes(seconds: float, spans: Iterable[StepSpan], phases: Iterable[PassSpan]) -> dict[str, object]:
        shown = [
            [LANES.index(s.lane), number[s.name], _short(s.start), _short(s.end), s.step]
            for s in spans
            if s.end > s.start
        ]
        return {
            "seconds": _short(seconds),
            "spans": shown,
            "phases": [[p.name, _short(p.start), _short(p.end)] for p in phases],
        }

    moments = [
        [number.get(m.name, -1), _short(m.start), _short(m.end), m.activations, m.transients] for m in step.moments
    ]
    calls = [[row.name, row.strategy, row.homes, row.nbytes] for group in groups for row in group]
    return {
        "names": [[name, describe(place, name)] for name in names],
        "lanes": [lane_words(lane) for lane in LANES],
        "kinds": KINDS,
        "colours": {kind: does.group for kind, does in TYPES.items()},
        "allocated": [step.allocated[kind] for kind in KINDS],
        "budget": plan.gpu_budget_bytes,
        "peak": step.gpu_bytes,
        "moments": moments,
        "calls": calls,
        "predicted": lanes(step.seconds, step.spans, step.phases),
        "measured": lanes(real.seconds, real.spans, real.phases) if real is not None else None,
        "where": measured.where if measured is not None else "",
    }


def _short(seconds: float) -> float:
    """Round to a picosecond, which halves the size of the page."""
    return round(seconds, 12)
