"""The file for Perfetto."""

import json
from pathlib import Path

from outsize.device.timeline import Span
from outsize.hardware.lanes import LANES
from outsize.report.trace import write_trace


def test_a_trace_has_a_track_for_each_lane_and_an_event_for_each_action(tmp_path: Path) -> None:
    spans = [Span("host", "U1", 5.0, 7.5), Span("compute", "F0", 4.0, 4.5)]
    write_trace(spans, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert tuple(tracks.values()) == LANES
    assert [(tracks[e["tid"]], e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"] == [
        ("compute", "F0", 0, 5e5),
        ("host", "U1", 1e6, 2.5e6),
    ]


def test_an_event_says_what_its_action_is(tmp_path: Path) -> None:
    write_trace([Span("compute", "F0", 0.0, 1.0)], tmp_path / "trace.json", describe=lambda name: f"{name} in words")
    (event,) = [
        event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"
    ]
    assert event["args"] == {"what": "F0 in words"}
