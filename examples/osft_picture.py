"""The picture of examples/osft.py, as SVG."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#555555", "#0072b2", "#d55e00", "#009e73")
WIDTH, HEIGHT = 400, 300
"""Of a panel, in pixels."""
LEFT, TOP, GAP, BOTTOM = 60, 50, 90, 90
Pair = tuple[float, float]


@dataclass(frozen=True)
class RateResult:
    """A method at one learning rate."""

    rate: float
    steps: float
    """Until the new task's loss was the level, on average over the seeds."""
    old: list[float]
    """The loss on the old task at that point, of each seed."""


@dataclass(frozen=True)
class Series:
    name: str
    paths: list[list[Pair]]
    """At the best learning rate, of each seed: loss on the new task, loss on the old task."""
    rates: list[RateResult]
    best: float | None
    """The best learning rate."""


@dataclass(frozen=True)
class Panel:
    """Logarithmic axes. `x` and `y`: the values at their ends. `x` may decrease."""

    left: float
    x: Pair
    y: Pair

    def at(self, x: float, y: float) -> Pair:
        return self.left + WIDTH * _part(x, self.x), TOP + HEIGHT * (1 - _part(y, self.y))

    def axes(self, title: str, x_label: str, y_label: str) -> Iterator[str]:
        middle = self.left + WIDTH / 2
        yield f'<rect x="{self.left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>'
        yield _text(middle, TOP - 14, title, weight="bold")
        yield _text(middle, TOP + HEIGHT + 38, x_label)
        turned = self.left - 42, TOP + HEIGHT / 2
        yield f'<g transform="rotate(-90 {turned[0]:.1f} {turned[1]:.1f})">{_text(*turned, y_label)}</g>'
        for tick in _ticks(self.x):
            x, _ = self.at(tick, self.y[0])
            yield _line((x, TOP), (x, TOP + HEIGHT), "#eee")
            yield _text(x, TOP + HEIGHT + 18, f"{tick:g}")
        for tick in _ticks(self.y):
            _, y = self.at(self.x[0], tick)
            yield _line((self.left, y), (self.left + WIDTH, y), "#eee")
            yield _text(self.left - 6, y + 4, f"{tick:g}", anchor="end")


def picture(series: Sequence[Series], level: float) -> str:
    """Left: the way to the level at the best learning rates. Right: all learning rates, at the level."""
    colors = [COLORS[i % len(COLORS)] for i in range(len(series))]
    width, height = LEFT + 2 * WIDTH + GAP + 20, TOP + HEIGHT + BOTTOM
    parts = [f'<rect width="{width}" height="{height}" fill="white"/>']
    parts += _legend([s.name for s in series], colors)
    parts += _paths(series, colors, level)
    parts += _rates(series, colors, level)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    return "\n".join([head + 'font-family="sans-serif" font-size="12" fill="#222">', *parts, "</svg>", ""])


def _paths(series: Sequence[Series], colors: Sequence[str], level: float) -> Iterator[str]:
    points = [point for s in series for path in s.paths for point in path]
    x, y = _range([x for x, _ in points] + [level]), _range([y for _, y in points])
    panel = Panel(LEFT, (x[1], x[0]), y)
    yield from panel.axes("Best learning rate, every seed", "loss on the new task", "loss on the old task")
    yield _line(panel.at(level, y[0]), panel.at(level, y[1]), "#999", dashes="4 3")
    for s, color in zip(series, colors, strict=True):
        for path in s.paths:
            line = " ".join(f"{px:.1f},{py:.1f}" for px, py in (panel.at(*point) for point in path))
            yield f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5" stroke-opacity="0.8"/>'


def _rates(series: Sequence[Series], colors: Sequence[str], level: float) -> Iterator[str]:
    results = [result for s in series for result in s.rates]
    panel = Panel(
        LEFT + WIDTH + GAP,
        _range([result.steps for result in results]),
        _range([value for result in results for value in result.old]),
    )
    title = f"At a loss of {level:g} on the new task, every learning rate"
    yield from panel.axes(title, "steps to that loss", "loss on the old task")
    for s, color in zip(series, colors, strict=True):
        middles = [panel.at(result.steps, statistics.mean(result.old)) for result in s.rates]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in middles)
        yield f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        for result, (x, y) in zip(s.rates, middles, strict=True):
            ends = [panel.at(result.steps, end(result.old)) for end in (min, max)]
            yield _line(*ends, color)
            fill = color if result.rate == s.best else "white"
            note = f"{s.name}, learning rate {result.rate:.0e}"
            yield (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="{color}" stroke-width="1.5">'
                f"<title>{escape(note)}</title></circle>"
            )


def _legend(names: Sequence[str], colors: Sequence[str]) -> Iterator[str]:
    x, y = LEFT, TOP + HEIGHT + 68
    for name, color in zip(names, colors, strict=True):
        yield _line((x, y), (x + 22, y), color, width=3)
        yield _text(x + 28, y + 4, name, anchor="start")
        x += 60 + 7 * len(name)
    yield _text(x, y + 4, "filled: the best learning rate; bars: the range over seeds", anchor="start")


def _range(values: Sequence[float]) -> Pair:
    """A little more than the values cover."""
    low, high = min(values, default=1.0), max(values, default=10.0)
    return low / 1.15, high * 1.15


def _part(value: float, ends: Pair) -> float:
    return (math.log(value) - math.log(ends[0])) / (math.log(ends[1]) - math.log(ends[0]))


def _ticks(ends: Pair) -> list[float]:
    decades = range(math.floor(math.log10(min(ends))), math.ceil(math.log10(max(ends))))
    ticks = [digit * 10.0**decade for decade in decades for digit in (1, 2, 5)]
    return [tick for tick in ticks if min(ends) <= tick <= max(ends)]


def _line(start: Pair, end: Pair, color: str, *, width: float = 1, dashes: str = "") -> str:
    (x1, y1), (x2, y2) = start, end
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-width="{width}"{dashed}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
