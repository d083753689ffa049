"""Timing of early steps: which steps are timed, what is logged, which rates are saved. Times are only compared on `sim`,
where they are exact.
"""

import dataclasses
import gc
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import cells
import pytest
import torch
import zoo
from cells import Cell
from torch import Tensor

import outsize
from outsize.calibration import steps
from outsize.calibration.rates import Identity
from outsize.calibration.steps import LAST_STEP, TIMED_STEPS, WARM_UP_STEPS
from outsize.device.cpu import CpuDevice
from outsize.device.device import Event
from outsize.device.sim import SimDevice, SimEvent
from outsize.hardware.catalog import lookup
from outsize.hardware.lanes import LANES, Lane, lane_words
from outsize.runtime.engine import Engine

STREAMED = Cell(kind="llama", dtype="bf16", weights="host", optimizer="host", strategy="offload")
PLANS = [
    STREAMED,
    Cell(kind="llama", dtype="bf16", weights="host", optimizer="host", clip=True),
    Cell(kind="gpt2", dtype="fp32", weights="host", optimizer="host", accumulate=3, strategy="recompute"),
    Cell(kind="gpt2", dtype="bf16", weights="host", optimizer="host", update="in_backward", depth=2),
    Cell(kind="llama", dtype="bf16", weights="host", optimizer="host", update="in_backward", accumulate=2),
    Cell(kind="llama", dtype="bf16", weights="gpu", optimizer="host", update="in_backward"),
    Cell(kind="llama", dtype="fp32", weights="host", optimizer="gpu", accumulate=2, clip=True),
    Cell(kind="bert", dtype="fp32"),
]
FIRST_READ = WARM_UP_STEPS + TIMED_STEPS
"""Steps after which the timed ones are read, on devices whose times are known at once."""


class Calibrated(SimDevice):
    """Has its measured rates saved, into `saved`."""

    saves_calibration = True
    alive: ClassVar["weakref.WeakValueDictionary[str, Calibrated]"] = weakref.WeakValueDictionary()

    def __init__(self, name: str = "16GiB") -> None:
        super().__init__(lookup(name))
        self.saved: list[Mapping[str, float]] = []
        self.alive[self.identity.gpu] = self

    @property
    def identity(self) -> Identity:
        return dataclasses.replace(super().identity, gpu=str(id(self)))


@pytest.fixture(autouse=True)
def _saved_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        steps, "save_step_rates", lambda rates, identity, spec: Calibrated.alive[identity.gpu].saved.append(rates)
    )


def step(engine: Engine, times: int = 1) -> None:
    for seed in range(times):
        engine.model(**zoo.batch("llama", seed=seed)).loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()


@pytest.mark.parametrize("cell", PLANS, ids=str)
def test_on_sim_every_lane_is_busy_as_planned(cell: Cell, caplog: pytest.LogCaptureFixture) -> None:
    device = Calibrated()
    with cells.closing(cells.prepare(cell, device)) as engine, caplog.at_level(logging.INFO, "outsize"):
        cells.train_cell(cell, engine, steps=FIRST_READ)
        report, planned = engine.report(), engine.plan.estimate
    assert report.step_seconds == pytest.approx(planned.step_seconds, rel=1e-9)
    assert report.planned_busy_seconds == planned.busy_seconds
    assert report.busy_seconds == pytest.approx(planned.busy_seconds, rel=1e-9)
    (line,) = [record.message for record in caplog.records if record.message.startswith("steps ")]
    busy = [lane_words(lane) for lane in LANES if planned.busy_seconds[lane]]
    assert line.startswith("steps 3-4: ") and line.endswith(" (+0 %); " + ", ".join(f"{words} +0 %" for words in busy))
    assert device.saved == [pytest.approx({name: getattr(device.spec, name) for name in device.saved[0]}, rel=1e-6)]


class Otherwise(Calibrated):
    """Works at other rates than it describes itself by: `factor` of the seconds of each lane, the fixed cost of an
    action left out.
    """

    def __init__(self, **factor: float) -> None:
        super().__init__()
        self._factor = factor

    def end(self, lane: Lane, *, reads: Sequence[Tensor], writes: Sequence[Tensor], seconds: float) -> SimEvent:
        fixed = min(seconds, 0.0 if lane == "compute" else self.spec.launch_seconds)
        return super().end(
            lane, reads=reads, writes=writes, seconds=fixed + (seconds - fixed) * self._factor.get(lane, 1.0)
        )


def test_measured_rates_that_differ_from_the_spec_are_saved(caplog: pytest.LogCaptureFixture) -> None:
    device = Otherwise(h2d=2.0, d2h=1.0, host=0.5)
    with cells.closing(cells.prepare(STREAMED, device)) as engine, caplog.at_level(logging.INFO, "outsize"):
        step(engine, FIRST_READ)
        found, planned = engine.report().busy_seconds, engine.plan.estimate.busy_seconds
    spec = device.spec
    rates = {"h2d_bytes_per_second": spec.h2d_bytes_per_second / 2, "d2h_bytes_per_second": spec.d2h_bytes_per_second}
    assert device.saved == [
        pytest.approx(rates | {"host_adam_params_per_second": spec.host_adam_params_per_second * 2}, rel=1e-6)
    ]
    assert (
        f"copies to the GPU {100 * (found['h2d'] / planned['h2d'] - 1):+.0f} %, copies to the host +0 %, CPU updates -"
        in caplog.text
    )


def test_a_lane_with_little_or_no_work_has_no_rate() -> None:
    for cell, device in ((Cell(kind="llama", dtype="bf16"), Calibrated()), (STREAMED, Otherwise(compute=1e5))):
        with cells.closing(cells.prepare(cell, device)) as engine:
            step(engine, FIRST_READ)
            assert engine.report().step_seconds is not None and device.saved == [{}]


def test_the_report_shows_every_lane_with_work() -> None:
    with cells.closing(cells.prepare(STREAMED, Calibrated())) as engine:
        step(engine)
        report = engine.report()
        assert (
            report.step_seconds is None
            and report.busy_seconds == {}
            and str(report).count("not measured") == 1 + len(LANES)
        )
        step(engine, FIRST_READ - 1)
        assert all(lane_words(lane) in str(engine.report()) for lane in LANES) and "not measured" not in str(
            engine.report()
        )
    with cells.closing(cells.prepare(Cell(kind="llama", dtype="bf16"), Calibrated())) as engine:
        assert "compute" in str(engine.report()) and "copies" not in str(engine.report()), (
            "lanes without work are left out"
        )


def test_after_the_timed_steps_nothing_is_recorded() -> None:
    device = Calibrated()
    with cells.closing(cells.prepare(STREAMED, device)) as engine:
        step(engine, WARM_UP_STEPS + 1)
        assert device._timeline is not None
        step(engine, TIMED_STEPS)
        found = engine.report().busy_seconds
        assert device._timeline is None and found
        step(engine, FIRST_READ)
        assert engine.report().busy_seconds == found and len(device.saved) == 1


def evaluate(engine: Engine) -> None:
    with torch.no_grad():
        engine.model(**zoo.batch("llama"))


def abandon(engine: Engine) -> None:
    engine.model(**zoo.batch("llama"))


def accumulate_more(engine: Engine) -> None:
    engine.model(**zoo.batch("llama")).loss.backward()


@pytest.mark.parametrize("between", [evaluate, abandon, accumulate_more, Engine.drain])
def test_steps_that_do_not_follow_the_plan_are_skipped(
    between: Callable[[Engine], None], caplog: pytest.LogCaptureFixture
) -> None:
    device = Calibrated()
    with cells.closing(cells.prepare(STREAMED, device)) as engine, caplog.at_level(logging.INFO, "outsize"):
        step(engine, WARM_UP_STEPS + 1)
        between(engine)
        step(engine, TIMED_STEPS)
        assert engine.report().step_seconds is None and not device.saved
        step(engine, FIRST_READ)
        assert engine.report().step_seconds == pytest.approx(engine.plan.estimate.step_seconds, rel=1e-9)
        assert "steps 3-4" not in caplog.text and len(device.saved) == 1


def test_a_run_that_never_follows_its_plan_is_not_timed_any_more() -> None:
    device = Calibrated()
    with cells.closing(cells.prepare(STREAMED, device)) as engine:
        for _ in range(LAST_STEP + 2 * FIRST_READ):
            evaluate(engine)
            step(engine)
        assert device._timeline is None and engine.report().step_seconds is None and not device.saved


def test_a_users_timeline_takes_precedence() -> None:
    device = Calibrated()
    with cells.closing(cells.prepare(STREAMED, device)) as engine:
        step(engine)
        with device.timeline() as mine:
            step(engine, FIRST_READ)
        planned = engine.plan.estimate.busy_seconds
        assert {lane: busy / FIRST_READ for lane, busy in mine.busy_seconds().items()} == pytest.approx(
            planned, rel=1e-9
        )
        assert all(span.name != "step" for span in mine.spans) and engine.report().step_seconds is None
        step(engine, 2 * FIRST_READ)
        assert engine.report().step_seconds is not None


def test_a_users_timeline_that_begins_within_the_timed_steps_is_complete() -> None:
    device = Calibrated()
    with cells.closing(cells.prepare(STREAMED, device)) as engine:
        step(engine, WARM_UP_STEPS + 1)
        with device.timeline() as mine:
            step(engine, TIMED_STEPS)
        planned = engine.plan.estimate.busy_seconds
        assert {lane: busy / TIMED_STEPS for lane, busy in mine.busy_seconds().items()} == pytest.approx(
            planned, rel=1e-9
        )
        assert all(span.name != "step" for span in mine.spans) and not device.saved
        step(engine, 2 * FIRST_READ)
        assert len(device.saved) == 1


def test_two_engines_on_one_device_are_not_timed() -> None:
    device = Calibrated()
    with cells.closing(cells.prepare(STREAMED, device)) as one, cells.closing(cells.prepare(STREAMED, device)) as other:
        for _ in range(LAST_STEP):
            step(one)
            step(other)
        assert not device.saved


def test_a_new_plan_is_timed_again() -> None:
    device = Calibrated("64MiB")
    engine = outsize.prepare(
        STREAMED.model(), zoo.batch("llama"), device=device, chunk_bytes=cells.CHUNK_BYTES, optimizer=STREAMED.spec
    )
    with cells.closing(engine):
        step(engine, FIRST_READ)
        first = engine.plan
        engine.replan(zoo.batch("llama", seed=1), engine.plan.step_config)
        assert engine.plan is not first and engine.report().step_seconds is None
        step(engine, FIRST_READ)
        assert (
            engine.report().step_seconds == pytest.approx(engine.plan.estimate.step_seconds, rel=1e-9)
            and len(device.saved) == 2
        )


def test_a_run_may_end_with_or_within_the_timed_steps() -> None:
    device = Calibrated()
    with cells.closing(cells.prepare(STREAMED, device)) as engine:
        step(engine, FIRST_READ)
    assert len(device.saved) == 1
    with cells.closing(cells.prepare(STREAMED, device)) as engine:
        step(engine, WARM_UP_STEPS + 1)
        assert device._timeline is not None
    assert device._timeline is None and len(device.saved) == 1
    engine = cells.prepare(STREAMED, device)
    step(engine, WARM_UP_STEPS + 1)
    del engine
    gc.collect()
    assert device._timeline is None, "also when it is dropped without detach()"


def test_a_detached_engine_holds_no_memory_for_it() -> None:
    """A new plan is attached while the old calibration is still there: on a GPU there is no room for both plans'
    buffers.
    """
    with cells.closing(cells.prepare(STREAMED, Calibrated())) as engine:
        step(engine, FIRST_READ)
        store = weakref.ref(engine.runtime.store)
    gc.collect()
    assert store() is None


class Late(CpuDevice):
    """Spans have their times when the test says so, as with a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.is_done = False
        self.num_waits = 0

    def end(self, lane: Lane, *, reads: Sequence[Tensor], writes: Sequence[Tensor], seconds: float) -> Event:
        event = super().end(lane, reads=reads, writes=writes, seconds=seconds)
        if self._timeline is not None:
            span = self._timeline.spans.pop()
            self._timeline.add_later(lambda: span if self.is_done else None)
        return event

    def synchronize(self) -> None:
        self.num_waits += 1
        self.is_done = True


def test_nothing_waits_for_the_timed_steps(caplog: pytest.LogCaptureFixture) -> None:
    device = Late()
    with cells.closing(cells.prepare(STREAMED, device)) as engine, caplog.at_level(logging.INFO, "outsize"):
        device.num_waits, device.is_done = 0, False
        step(engine, FIRST_READ + 2)
        assert engine.report().step_seconds is None and device._timeline is None and not caplog.text
        device.is_done = True
        step(engine)
        assert caplog.text.count("steps 3-4: ") == 1 and device.num_waits == 0
        assert (engine.report().step_seconds or 0) > 0 and engine.report().busy_seconds["host"] > 0


def test_a_run_that_ends_before_its_times_are_known_is_read_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    device = Late()
    with caplog.at_level(logging.INFO, "outsize"), cells.closing(cells.prepare(STREAMED, device)) as engine:
        device.is_done = False
        step(engine, FIRST_READ)
        assert not caplog.text
    assert "steps 3-4: " in caplog.text


def test_under_a_plan_without_block_call_hooks_only_the_step_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    with (
        cells.closing(cells.prepare(Cell(kind="llama", dtype="bf16"), CpuDevice())) as engine,
        caplog.at_level(logging.INFO, "outsize"),
    ):
        assert not engine.runtime.executor.sees_calls
        step(engine, FIRST_READ)
        report = engine.report()
        assert report.step_seconds is not None and "compute" not in report.busy_seconds
        assert caplog.records[-1].message.endswith(" %)"), "no lane is listed"
