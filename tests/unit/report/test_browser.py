"""The page in a real browser, opened from disk: it draws, it answers to pointer and keyboard, it fetches nothing, and
its console is silent.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, Tab, chromium
from synthetic import MACHINE, make_case, make_step_config

from outsize.hardware.gpu_budget import GpuBudget
from outsize.hardware.lanes import LANES
from outsize.planner.search import search
from outsize.report.measured import Measured
from outsize.report.page import write_page
from outsize.report.step import _issue
from outsize.schedule.render import lane_shares
from outsize.schedule.schedule import compile_schedule

# How many colours a chart has. Of a copy: to read the chart itself slows it down, which Chromium complains about.
INK = """(id => { const chart = document.getElementById(id), copy = new OffscreenCanvas(chart.width, chart.height), found = new Set();
const pen = copy.getContext('2d', { willReadFrequently: true }); pen.drawImage(chart, 0, 0);
const d = pen.getImageData(0, 0, copy.width, copy.height).data;
for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) found.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]); return found.size; })"""

# What is worked in drawn black, all else white: how dark a row of the chart is, is the share of it that is drawn.
BLACK = """(() => { const style = document.documentElement.style; ["faint", "soft"].forEach(name => style.setProperty(`--${name}`, "#fff"));
style.setProperty("--phase", "transparent");
["forward", "backward", "slots", "weights", "gradients", "activations", "optimizer"].forEach(name => style.setProperty(`--${name}`, "#000")); })()"""
# The left and right margins, the phases above and the axis below are as in page.js; a row's lane leaves three pixels
# free at its edges.
DARKNESS = """(row => { const chart = document.getElementById("predicted"), ratio = devicePixelRatio, box = chart.getBoundingClientRect();
const each = (box.height - 42) / 4, [x, y, wide, high] = [120, 20 + row * each + 3, box.width - 130, each - 6].map(size => Math.round(size * ratio));
const copy = new OffscreenCanvas(chart.width, chart.height), pen = copy.getContext("2d", { willReadFrequently: true }); pen.drawImage(chart, 0, 0);
const d = pen.getImageData(x, y, wide, high).data; let sum = 0;
for (let i = 0; i < d.length; i += 4) sum += 1 - d[i] / 255; return sum / (wide * high); })"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    case = make_case(6, 2, step_config=make_step_config(update="after_step", accumulate=2))
    plan = search(
        case.graph,
        case.layout,
        case.trace,
        case.spec,
        case.step_config,
        gpu=GpuBudget(total_bytes=420_000),
        host_bytes=10**9,
    )
    place = case.place(plan.decision)
    spans, _ = _issue(place, compile_schedule(place), case.spec, 3)
    path = tmp_path_factory.mktemp("page") / "report with <odd> & name.html"
    found = Measured(
        step_seconds=plan.estimate.step_seconds, gpu_bytes=plan.estimate.gpu_bytes, spans=spans, where="sim"
    )
    write_page(path, plan, case.graph, case.layout, case.spec, title="six layers", measured=found)
    return path


@pytest.fixture
def tab(browser: Browser, page: Path) -> Iterator[Tab]:
    tab = browser.tab()
    tab.resize(1200, 2400)
    tab.open(page)
    yield tab
    assert tab.complaints == []
    assert tab.requests == [page.as_uri()], "the page itself and nothing else"


def point(tab: Tab, name: str, x: float, y: float) -> tuple[float, float]:
    """A point of an element, by shares of its size."""
    left, top, width, height = tab.evaluate(
        f"(r => [r.left, r.top, r.width, r.height])(document.getElementById('{name}').getBoundingClientRect())"
    )
    return left + x * width, top + y * height


def tip(tab: Tab) -> str:
    return tab.evaluate("(t => t.hidden ? '' : t.innerText)(document.getElementById('tip'))")


def test_it_draws_in_light_and_dark_wide_and_narrow(tab: Tab) -> None:
    for width, dark in ((1200, False), (700, False), (1200, True), (390, True)):
        tab.resize(width, 2400, dark=dark)
        assert all(tab.evaluate(f"{INK}('{chart}')") > 4 for chart in ("memory", "predicted", "measured")), (
            width,
            dark,
        )
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"nothing sticks out at {width}"
    assert tab.evaluate("document.querySelector('h1').innerText").startswith("six layers")


def test_the_pointer_shows_what_is_there(tab: Tab) -> None:
    tab.mouse("mouseMoved", *point(tab, "memory", 0.5, 0.5))
    assert "optimizer" in tip(tab) and "total" in tip(tab)
    # The last backward ends the step, on the first lane.
    tab.mouse("mouseMoved", *point(tab, "predicted", 0.985, 0.2))
    assert tip(tab).startswith("B0: backward of stem") and "GPU compute: " in tip(tab)
    tab.mouse("mouseMoved", *point(tab, "map", 0.6, 0.1))
    assert "model.layers." in tip(tab) and "activations: " in tip(tab)
    tab.mouse("mouseMoved", 2, 2)
    assert tip(tab) == ""


def test_dragging_zooms_all_charts_and_a_button_resets(tab: Tab) -> None:
    before = tab.evaluate("document.getElementById('memory').toDataURL()")
    assert tab.evaluate("document.getElementById('reset').disabled")
    start, end = point(tab, "predicted", 0.5, 0.5), point(tab, "predicted", 0.6, 0.5)
    tab.mouse("mousePressed", *start, button="left", clickCount=1)
    tab.mouse("mouseMoved", *end, button="left", buttons=1)
    tab.mouse("mouseReleased", *end, button="left", clickCount=1)
    tab.mouse("mouseMoved", 2, 2)
    assert not tab.evaluate("document.getElementById('reset').disabled")
    assert tab.evaluate("document.getElementById('memory').toDataURL()") != before
    tab.evaluate("document.getElementById('reset').click()")
    tab.settle()
    assert tab.evaluate("document.getElementById('memory').toDataURL()") == before


def test_the_keyboard_reaches_everything(tab: Tab) -> None:
    tab.evaluate("document.getElementById('predicted').focus()")
    tab.press("ArrowRight")
    first = tip(tab)
    tab.press("ArrowRight")
    assert first and tip(tab) and tip(tab) != first
    tab.press("+")
    assert not tab.evaluate("document.getElementById('reset').disabled")
    tab.press("0")
    assert tab.evaluate("document.getElementById('reset').disabled")
    tab.evaluate("document.getElementById('memory').focus()")
    tab.press("ArrowUp")
    peak = tab.evaluate("document.querySelector('.meter b').innerText")
    assert tip(tab).split("\t")[-1] == peak, "up goes to the fullest moment"
    tab.evaluate("document.getElementById('map').focus()")
    tab.press("ArrowRight")
    assert tip(tab).startswith("stem")
    tab.press("Escape")
    assert tip(tab) == ""


@pytest.mark.parametrize("scale", [1, 1.3, 2])
def test_thousands_of_short_spans_are_drawn_as_the_share_they_take(
    browser: Browser, tmp_path: Path, scale: float
) -> None:
    """Were each at least so wide that it can be seen, a lane that works a third of the time would look like one that
    never rests.
    """
    links = {name: getattr(MACHINE, name) * 6 for name in ("h2d_bytes_per_second", "d2h_bytes_per_second")}
    case = make_case(
        6,
        2,
        step_config=make_step_config(update="after_step", accumulate=256),
        spec=dataclasses.replace(MACHINE, **links),
    )
    plan = search(
        case.graph,
        case.layout,
        case.trace,
        case.spec,
        case.step_config,
        gpu=GpuBudget(total_bytes=420_000),
        host_bytes=10**9,
    )
    write_page(tmp_path / "many.html", plan, case.graph, case.layout, case.spec)
    tab = browser.tab()
    tab.resize(1200, 2400, scale=scale)
    tab.open(tmp_path / "many.html")
    tab.evaluate(BLACK)
    tab.resize(1200, 2400, scale=scale, dark=True)  # colours are read again
    shares = lane_shares(plan)
    assert {lane: tab.evaluate(f"{DARKNESS}({row})") for row, lane in enumerate(LANES)} == pytest.approx(
        shares, abs=0.03
    )
    assert shares["compute"] > 0.9 and shares["h2d"] < 0.4, "one lane that hardly rests, one that mostly does"
    tab.mouse("mouseMoved", *point(tab, "predicted", 0.5, 0.2))
    assert "GPU compute: " in tip(tab), "a span that is too narrow to be seen still tells what it is"
