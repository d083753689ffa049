"""Writes spans as a trace file for ui.perfetto.dev and chrome://tracing: one track per lane, one event per action."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from outsize.hardware.lanes import LANES, Lane


class Span(Protocol):
    """Predicted (report/step.py) or measured (device/timeline.py)."""

    @property
    def lane(self) -> Lane: ...
    @property
    def name(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


def write_trace(spans: Iterable[Span], path: Path, *, describe: Callable[[str], str] | None = None) -> None:
    """`describe`: returns a description of an action, shown when its event is selected."""
    ordered = sorted(spans, key=lambda span: span.start)
    start = min((span.start for span in ordered), default=0.0)
    tracks: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": lane}}
        for tid, lane in enumerate(LANES)
    ]
    events: list[dict[str, object]] = [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.lane,
            "pid": 0,
            "tid": LANES.index(span.lane),
            "ts": round((span.start - start) * 1e6, 3),
            "dur": round((span.end - span.start) * 1e6, 3),
            **({"args": {"what": describe(span.name)}} if describe is not None else {}),
        }
        for span in ordered
    ]
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": tracks + events}))
