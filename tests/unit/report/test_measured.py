"""A recording, cut to the step that the prediction is of."""

import pytest
from synthetic import make_case, make_step_config

from outsize.report.measured import last_step
from outsize.report.step import StepSpan, _issue, walk_step
from outsize.schedule.plan import StepConfig
from outsize.schedule.schedule import compile_schedule


@pytest.mark.parametrize(
    "step_config", [make_step_config(), make_step_config(update="in_backward"), make_step_config(accumulate=3)]
)
def test_a_recording_of_the_walk_gives_the_walk_back(step_config: StepConfig) -> None:
    case = make_case(4, step_config=step_config)
    place = case.place(case.decide("host/host", "offload", depth=1))
    recorded, _ = _issue(place, compile_schedule(place), case.spec, 3)
    step, found = walk_step(place, case.spec, held_bytes=0), last_step(recorded, step_config.accumulate)
    assert found is not None and found.seconds == step.seconds and found.phases == step.phases
    computed = [(span.name, span.start, span.end) for span in found.spans if span.lane == "compute"]
    assert computed == [(s.name, s.start, s.end) for s in step.spans if s.lane == "compute" and s.start < step.seconds]
    for lane, seconds in found.busy_seconds.items():
        assert seconds == pytest.approx(
            sum(span.end - span.start for span in step.spans if span.lane == lane and span.step == 0), abs=1e-12
        )


def test_without_two_ends_there_is_no_step() -> None:
    assert last_step([], 1) is None
    one = [StepSpan("compute", "F0", 0, 1, 0), StepSpan("compute", "B0", 1, 2, 0)]
    assert last_step(one, 1) is None
    assert last_step([*one, StepSpan("compute", "B0", 3, 4, 0)], 2) is None, "two micro-batches, one step"
