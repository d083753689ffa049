"""The picture of examples/osft.py, as SVG."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#444444", "#d55e00", "#0072b2")
"""One after another; then again, dashed."""
WIDTH, HEIGHT = 430, 300
"""Of a panel, in pixels."""
LEFT, TOP, GAP, BOTTOM = 60, 40, 80, 105
Pair = tuple[float, float]


@dataclass(frozen=True)
class Series:
    name: str
    path: list[Pair]
    """At the best learning rate, with the first seed: loss on the new task, loss on the old task."""
    rates: list[tuple[float, float, float]]
    """Learning rate, steps to the level, loss on the old task at that point; means over the seeds."""
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
            yield _line([(x, TOP), (x, TOP + HEIGHT)], "#eee")
            yield _text(x, TOP + HEIGHT + 18, f"{tick:g}")
        for tick in _ticks(self.y):
            _, y = self.at(self.x[0], tick)
            yield _line([(self.left, y), (self.left + WIDTH, y)], "#eee")
            yield _text(self.left - 6, y + 4, f"{tick:g}", anchor="end")


def picture(series: Sequence[Series], level: float) -> str:
    """Left: the way to the level at the best learning rates. Right: all learning rates, at the level."""
    width, height = LEFT + 2 * WIDTH + GAP + 20, TOP + HEIGHT + BOTTOM
    parts = [f'<rect width="{width}" height="{height}" fill="white"/>']
    parts += [*_paths(series, level), *_rates(series, level), *_legend([s.name for s in series])]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    return "\n".join([head + 'font-family="sans-serif" font-size="12" fill="#222">', *parts, "</svg>", ""])


def _paths(series: Sequence[Series], level: float) -> Iterator[str]:
    x, y = _range([level] + [x for s in series for x, _ in s.path]), _range([y for s in series for _, y in s.path])
    panel = Panel(LEFT, (x[1], x[0]), y)
    yield from panel.axes("Best learning rate, first seed", "loss on the new task", "loss on the old task")
    yield _line([panel.at(level, y[0]), panel.at(level, y[1])], "#999")
    for i, s in enumerate(series):
        yield _line([panel.at(*point) for point in s.path], *_style(i))


def _rates(series: Sequence[Series], level: float) -> Iterator[str]:
    results = [(steps, old) for s in series for _, steps, old in s.rates]
    panel = Panel(LEFT + WIDTH + GAP, _range([x for x, _ in results]), _range([y for _, y in results]))
    title = f"Every learning rate, at a loss of {level:g} on the new task"
    yield from panel.axes(title, "steps to that loss", "loss on the old task, mean over seeds")
    for i, s in enumerate(series):
        color, dashes = _style(i)
        yield _line([panel.at(steps, old) for _, steps, old in s.rates], color, dashes)
        for rate, steps, old in s.rates:
            x, y = panel.at(steps, old)
            fill = color if rate == s.best else "white"
            note = f"<title>{escape(s.name)}, learning rate {rate:.0e}</title>"
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{color}">{note}</circle>'


def _legend(names: Sequence[str]) -> Iterator[str]:
    """A row for each round of colors."""
    for i, name in enumerate(names):
        x, y = LEFT + 240 * (i % len(COLORS)), TOP + HEIGHT + 65 + 22 * (i // len(COLORS))
        yield _line([(x, y), (x + 30, y)], *_style(i))
        yield _text(x + 38, y + 4, name, anchor="start")
    yield _text(LEFT + 2 * WIDTH + GAP, TOP + HEIGHT + 69, "filled: best learning rate", anchor="end")


def _style(i: int) -> tuple[str, str]:
    return COLORS[i % len(COLORS)], "5 3" if i >= len(COLORS) else ""


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


def _line(points: Sequence[Pair], color: str, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    ends = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{ends}" fill="none" stroke="{color}" stroke-width="1.5"{dashed}/>'


def _text(x: float, y: float, text: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
