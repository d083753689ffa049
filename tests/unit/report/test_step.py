"""One step as spans and memory: the picture is of the plan that was promised, to the byte."""

import itertools

import pytest
import zoo
from synthetic import MACHINE, Case, make_case, make_step_config, random_case, random_decision

from outsize.device.sim import SimDevice
from outsize.hardware.lanes import LANES
from outsize.layout.chunks import pack
from outsize.model.discover import find_layers
from outsize.planner.simulate import simulate
from outsize.profile.tracer import Tracer
from outsize.report.step import KINDS, Step, describe, walk_step
from outsize.schedule.placement import Placement
from outsize.schedule.schedule import compile_schedule


def hold_to_the_estimate(case: Case, place: Placement) -> Step:
    """Every identity between the picture of a step and what simulate promises."""
    held = case.trace.held_bytes
    promised = simulate(place, compile_schedule(place), case.spec, held_bytes=held)
    step = walk_step(place, case.spec, held_bytes=held)
    assert step.gpu_bytes == promised.gpu_bytes
    assert step.seconds == promised.step_seconds
    assert sum(step.allocated.values()) == place.gpu_bytes and tuple(step.allocated) == KINDS
    for lane in LANES:
        spans = [span for span in step.spans if span.lane == lane]
        assert all(a.end <= b.start for a, b in itertools.pairwise(spans)), lane
        busy = sum(span.end - span.start for span in step.spans if span.lane == lane and span.step == 0)
        assert busy == pytest.approx(promised.busy_seconds[lane], abs=1e-12)
    assert all(a.end == b.start for a, b in itertools.pairwise(step.moments))
    assert (step.moments[0].start, step.moments[-1].end) == (0.0, step.seconds)
    if promised.peak_at != "rest":
        fullest = max(step.moments, key=lambda moment: moment.activations + moment.transients)
        assert fullest.name == promised.peak_at
    return step


def test_the_picture_is_of_the_predicted_step() -> None:
    for seed in range(120):
        case = random_case(seed, max_layers=5)
        hold_to_the_estimate(case, case.place(random_decision(case, seed + 1)))


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5", "looped"])
def test_it_is_so_for_traces_of_real_models(name: str) -> None:
    model, batch = zoo.make(name), zoo.batch(name)
    graph, trace = Tracer(model, batch, find_layers(model), SimDevice(MACHINE)).trace()
    layout = pack(graph, 8192)
    for seed, step_config in enumerate(
        (
            make_step_config(),
            make_step_config(update="in_backward"),
            make_step_config(accumulate=2),
            make_step_config(update="in_backward", accumulate=3),
        )
    ):
        case = Case(graph=graph, layout=layout, trace=trace, step_config=step_config)
        step = hold_to_the_estimate(case, case.place(random_decision(case, seed)))
        assert all(moment.activations >= 0 and moment.transients >= 0 for moment in step.moments)


def test_what_runs_in_the_step_and_is_of_its_neighbours_is_distinguished() -> None:
    """Updates after the step run under the next forward: the step begins with those of the step before, and its own
    come after its end.
    """
    case = make_case(4, step_config=make_step_config(update="after_step"))
    step = walk_step(case.place(case.decide("host/host", depth=1)), case.spec, held_bytes=0)
    before = [span for span in step.spans if span.step == -1]
    assert before and {span.name[0] for span in before if span.lane == "host"} == {"U"}
    own = [span for span in step.spans if span.step == 0 and span.name[0] == "U"]
    assert len(own) == len(case.layout.chunks) and all(span.start >= step.seconds for span in own)


def test_phases_are_those_of_every_micro_batch() -> None:
    case = make_case(3, step_config=make_step_config(update="after_step", accumulate=2))
    phases = walk_step(case.place(case.decide()), case.spec, held_bytes=0).phases
    assert [phase.name for phase in phases] == ["update", "forward", "backward", "forward", "backward"]
    assert all(a.end <= b.start for a, b in itertools.pairwise(phases))


def test_every_action_has_words() -> None:
    case = make_case(3, step_config=make_step_config(update="in_backward", accumulate=2))
    homes = ["host/gpu", "gpu/host", "host/host", "gpu/gpu", "host/host"]
    place = case.place(case.decide(homes, "offload", depth=1))
    words = {span.name: describe(place, span.name) for span in walk_step(place, case.spec, held_bytes=0).spans}
    assert {name[0] for name in words} == set("LFSRPQBEGUW")
    assert words["F1"] == "forward of model.layers.0"
    assert words["U2"] == "update model.layers.1 (chunk 2, 8.00 KiB)"
    assert words["E2"] == "add the gradient of model.layers.1 (chunk 2, 8.00 KiB)"
    assert words["S1"] == "offload the activations of model.layers.0 (2.00 KiB)"
