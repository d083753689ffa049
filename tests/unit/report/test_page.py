"""The page as text: self-contained, escaped, and it says what the plan says."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest
from synthetic import Case, make_case, make_graph, make_step_config, make_trace

from outsize.hardware.gpu_budget import GpuBudget
from outsize.layout.chunks import pack
from outsize.planner.search import search
from outsize.report.measured import Measured
from outsize.report.page import page
from outsize.report.step import _issue
from outsize.schedule.plan import Plan
from outsize.schedule.schedule import compile_schedule

EVIL = "<script>alert('x')</script>{{data}}&\"layers."


def plan_of(case: Case, gpu: int = 10**6) -> Plan:
    return search(
        case.graph,
        case.layout,
        case.trace,
        case.spec,
        case.step_config,
        gpu=GpuBudget(total_bytes=gpu),
        host_bytes=10**9,
    )


def page_of(case: Case, plan: Plan | None = None, **options: object) -> str:
    return page(plan or plan_of(case), case.graph, case.layout, case.spec, **options)  # type: ignore[arg-type]


def data_of(text: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    return json.loads(found)


class Elements(HTMLParser):
    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_nothing_is_fetched() -> None:
    text = page_of(make_case(3))
    assert "http:" not in text and "https:" not in text and "url(" not in text and "@import" not in text
    assert not [
        tag
        for tag, attributes in Elements(text).found
        if {"src", "href", "srcset", "action"} & set(attributes) or tag in ("link", "iframe", "img")
    ]
    assert "default-src 'none'" in text, "and the browser is told so"
    assert "{{" not in text


def test_names_are_text_and_never_markup() -> None:
    graph = make_graph(2)
    blocks = tuple(dataclasses.replace(block, name=block.name.replace("model.layers.", EVIL)) for block in graph.blocks)
    graph = dataclasses.replace(graph, blocks=blocks)
    case = dataclasses.replace(make_case(2), graph=graph, layout=pack(graph, 8192), trace=make_trace(graph))
    text = page_of(case, title="</title><script>alert(1)</script>")
    assert "<script>alert" not in text and "</title><script>" not in text
    assert [tag for tag, _ in Elements(text).found].count("script") == 2
    assert [name for name, *_ in data_of(text)["calls"]] == ["stem", f"{EVIL}0", f"{EVIL}1", "head"]


def test_it_says_what_the_plan_says() -> None:
    case = make_case(6, step_config=make_step_config(update="in_backward"))
    plan = plan_of(case, gpu=200_000)
    text = page_of(case, plan, title="a model")
    assert "a model" in text and 'class="yes">Fits<' in text and 'class="no"' not in text
    data = data_of(text)
    assert (data["peak"], data["budget"]) == (plan.estimate.gpu_bytes, 200_000)
    assert data["measured"] is None and "Predicted and measured" not in text
    assert len(data["calls"]) == 8 and text.count('data-call="7"') == 3


def test_a_plan_over_its_budget_says_by_how_much() -> None:
    case = make_case(3)
    plan = plan_of(case)
    small = dataclasses.replace(plan, gpu_budget_bytes=plan.estimate.gpu_bytes - 2048)
    assert "Does not fit: over GPU memory by 2.00 KiB" in page_of(case, small)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_run_stands_beside_its_prediction(recorded: bool) -> None:
    case = make_case(4)
    plan = plan_of(case)
    place = case.place(plan.decision)
    spans = _issue(place, compile_schedule(place), case.spec, 3)[0] if recorded else []
    found = Measured(
        step_seconds=plan.estimate.step_seconds * 1.25,
        gpu_bytes=plan.estimate.gpu_bytes,
        spans=spans,
        where="a <machine>",
    )
    text = page_of(case, plan, measured=found)
    assert "+25.0%" in text and "a &lt;machine&gt;" in text
    assert ("No whole step was recorded" in text) is not recorded
    assert (data_of(text)["measured"] is not None) is recorded


def test_the_rate_is_the_one_that_bench_prints() -> None:
    """A window's rate is not that of its median step; without a window the page says so."""
    case = make_case(4)
    plan = plan_of(case)
    plan = dataclasses.replace(plan, inputs={"input_ids": (2, 64)})
    alone = Measured(step_seconds=plan.estimate.step_seconds, gpu_bytes=None, spans=[], where="sim")
    text = page_of(case, plan, measured=alone)
    assert "tokens/s, at the median step" in text
    text = page_of(case, plan, measured=dataclasses.replace(alone, tokens_per_second=1234567.0))
    assert re.search(r"tokens/s, over the whole window</th><td[^>]*>[\d,]+</td><td[^>]*>1,234,567</td>", text)


def test_a_model_that_keeps_everything_has_a_page_too() -> None:
    """No slots, no copies, nothing frozen; and one where hardly anything trains."""
    for case in (make_case(1), make_case(3, frozen=4), make_case(3, tied=True)):
        assert "One step" in page_of(case)
