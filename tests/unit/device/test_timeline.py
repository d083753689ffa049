"""Timeline: the spans of a schedule's actions, on a clock that begins with the timeline."""

import cells
from cells import Cell

CELL = Cell(kind="llama", dtype="bf16", weights="host", optimizer="host", strategy="offload")


def test_on_sim_a_step_of_the_timeline_is_the_step_of_the_plan_lane_by_lane() -> None:
    with cells.closing(cells.prepare(CELL, "sim:16GiB")) as engine:
        cells.train_cell(CELL, engine, steps=2)
        with engine.device.timeline() as timeline:
            cells.train_cell(CELL, engine, steps=1)
        issued = [
            str(action) for segment in engine.runtime.executor.schedule.segments.values() for action in segment.actions
        ]
        busy = timeline.busy_seconds()
        assert {lane: round(seconds, 12) for lane, seconds in engine.plan.estimate.busy_seconds.items()} == {
            k: round(v, 12) for k, v in busy.items()
        }
        assert {span.name for span in timeline.spans if span.lane != "host"} <= set(issued)
        assert min(span.start for span in timeline.spans) >= 0.0 and timeline.seconds >= max(busy.values())
        before = len(timeline.spans)
        cells.train_cell(CELL, engine, steps=1)
        assert len(timeline.spans) == before, "what comes after it is not recorded"


def test_on_the_cpu_spans_follow_one_another() -> None:
    with cells.closing(cells.prepare(CELL)) as engine, engine.device.timeline() as timeline:
        cells.train_cell(CELL, engine, steps=1)
    assert timeline.spans and all(span.end >= span.start >= 0.0 for span in timeline.spans)
