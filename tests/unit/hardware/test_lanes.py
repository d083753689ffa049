"""Lanes: one thing after another on each, waits between them, and the rates that turn bytes into seconds."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outsize.device.cpu import CpuDevice
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.hardware.lanes import (
    LANE_FACTS,
    LANES,
    LaneClock,
    compute_seconds,
    copy_seconds,
    lane_words,
    update_seconds,
)

MACHINE = dataclasses.replace(
    lookup("64MiB"),
    flops=1e12,
    gpu_bytes_per_second=100e9,
    h2d_bytes_per_second=10e9,
    d2h_bytes_per_second=5e9,
    host_adam_params_per_second=1e9,
    gpu_adam_params_per_second=4e9,
    launch_seconds=1e-3,
)


def test_a_lane_does_one_thing_after_another_and_lanes_run_side_by_side() -> None:
    clock = LaneClock()
    assert clock.run("compute", 2.0) == 2.0
    assert clock.run("compute", 1.0) == 3.0
    assert clock.run("h2d", 2.5) == 2.5
    assert clock.now == 3.0


def test_work_starts_when_everything_it_waits_for_has_ended() -> None:
    clock = LaneClock()
    loaded = clock.run("h2d", 2.0)
    ran = clock.run("compute", 1.0, after=(loaded, 0.5))
    assert ran == 3.0
    assert clock.run("d2h", 1.0, after=[ran]) == 4.0


def test_waiting_is_not_work() -> None:
    clock = LaneClock()
    clock.run("compute", 1.0, after=(5.0,))
    assert clock.busy["compute"] == 1.0 and clock.free["compute"] == 6.0


work = st.lists(
    st.tuples(st.sampled_from(LANES), st.floats(0, 10), st.lists(st.integers(0, 20), max_size=3)), max_size=20
)


@given(work)
def test_no_order_of_work_breaks_the_laws_of_time(items: list) -> None:
    """Nothing starts before what it waits for; the end is at least every lane's work, and at most all work in a row."""
    clock, ends, total = LaneClock(), [], 0.0
    for lane, seconds, waits in items:
        after = [ends[i] for i in waits if i < len(ends)]
        before = clock.free[lane]
        end = clock.run(lane, seconds, after)
        assert end - seconds >= max([before, *after]) - 1e-9
        ends.append(end)
        total += seconds
    assert clock.now == max(ends, default=0.0)
    assert max(clock.busy.values()) <= clock.now + 1e-9
    assert clock.now <= total + 1e-9


def test_a_copy_costs_its_launch_and_its_bytes_at_the_rate_of_its_direction() -> None:
    assert copy_seconds(MACHINE, "h2d", 10_000_000_000) == pytest.approx(1.001)
    assert copy_seconds(MACHINE, "d2h", 10_000_000_000) == pytest.approx(2.001)
    assert copy_seconds(MACHINE, "h2d", 0) == pytest.approx(1e-3)


def test_an_update_costs_its_launch_and_its_parameters_at_the_rate_of_its_home() -> None:
    assert update_seconds(MACHINE, "host", 26 * 2_000_000_000) == pytest.approx(2.001)
    assert update_seconds(MACHINE, "compute", 26 * 2_000_000_000) == pytest.approx(0.501)


def test_compute_is_bound_by_arithmetic_or_by_memory_whichever_is_longer() -> None:
    assert compute_seconds(MACHINE, 2e12, 1) == pytest.approx(2.0)
    assert compute_seconds(MACHINE, 1.0, 300_000_000_000) == pytest.approx(3.0)


def test_an_unknown_lane_is_an_error_everywhere() -> None:
    clock = LaneClock()
    for use in (
        lambda lane: clock.run(lane, 1.0),
        lambda lane: copy_seconds(MACHINE, lane, 1),
        lambda lane: update_seconds(MACHINE, lane, 1),
        lambda lane: lane_words(lane),
        lambda lane: CpuDevice().begin(lane, waits=(), reads=(), writes=()),
        lambda lane: SimDevice(MACHINE).begin(lane, waits=(), reads=(), writes=()),
    ):
        with pytest.raises((ValueError, KeyError), match="net"):
            use("net")
    with pytest.raises(ValueError, match="lane 'host' makes no copies"):
        copy_seconds(MACHINE, "host", 1)
    with pytest.raises(ValueError, match="lane 'd2h' makes no updates"):
        update_seconds(MACHINE, "d2h", 1)


def test_the_rates_of_lanes_are_fields_of_the_spec() -> None:
    for facts in LANE_FACTS.values():
        assert all(hasattr(MACHINE, rate) for rate in (facts.copy_rate, facts.update_rate) if rate)
