"""The simulated device: an enforced budget, a clock, and races found by order, not by timing."""

from collections.abc import Iterator

import cells
import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st

from outsize.base.errors import DeviceOutOfMemory, OutsizeError, RaceDetected
from outsize.device.choose import choose_device
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.hardware.lanes import LANES, LaneClock


@pytest.fixture
def device() -> Iterator[SimDevice]:
    """A thousand bytes, opened by an engine that may use all of them."""
    sim = SimDevice(lookup("1000B"))
    sim.open(1, 1000)
    yield sim
    sim.watching(False)
    sim.close(1)


def cells_of(numel: int) -> torch.Tensor:
    return torch.empty(numel, dtype=torch.uint8)


# --- memory


def test_an_allocation_beyond_the_budget_is_refused_with_its_bytes(device: SimDevice) -> None:
    held = device.empty(600)
    with pytest.raises(DeviceOutOfMemory, match="an allocation of 401 B exceeds the budget of 1000 B by 1 B"):
        device.empty(401)
    device.empty(400)
    assert device.observer.live_bytes == 600 and held.numel() == 600


def test_out_of_memory_is_known_by_type() -> None:
    assert issubclass(DeviceOutOfMemory, MemoryError) and issubclass(DeviceOutOfMemory, OutsizeError)


def test_a_models_allocations_count_only_while_watching(device: SimDevice) -> None:
    with pytest.raises(DeviceOutOfMemory):
        device.watching(True)
        torch.zeros(300)  # fp32
    device.watching(False)
    torch.zeros(300)
    device.watching(True)
    x = torch.zeros(200)
    with pytest.raises(DeviceOutOfMemory):
        x + x
    assert device.observer.live_bytes == 800
    with device.on_host():
        x + x
    del x
    torch.zeros(250)


def test_host_memory_is_not_the_devices(device: SimDevice) -> None:
    assert device.host_empty(5000, pinned=True).sum() == 0 and device.observer.live_bytes == 0


def test_the_smaller_of_engine_and_machine_is_the_budget() -> None:
    sim = SimDevice(lookup("1000B"))
    sim.open(1, 300)
    try:
        with pytest.raises(DeviceOutOfMemory, match="of 300 B"):
            sim.empty(301)
    finally:
        sim.close(1)
    assert sim.budget_bytes == 1000
    sim.open(1, 10**6)
    try:
        with pytest.raises(DeviceOutOfMemory, match="of 1000 B"):
            sim.empty(1001)
    finally:
        sim.close(1)


def test_the_peak_is_that_of_the_engine_that_is_open(device: SimDevice) -> None:
    device.empty(700)
    assert device.peak_bytes == 700 and device.observer.live_bytes == 0
    device.close(1)
    device.open(1, 1000)
    assert device.peak_bytes == 0


def test_a_batch_is_copied_to_the_device_and_a_buffer_is_counted(device: SimDevice) -> None:
    device.watching(True)
    batch = torch.ones(5)
    device.watching(False)
    assert device.put(batch) is not batch and torch.equal(device.put(batch), batch)
    level = device.observer.live_bytes
    kept = device.keep(batch)
    assert device.observer.live_bytes - level == 20 and kept is not batch


# --- engines side by side


def test_devices_of_one_name_share_their_engines_budgets() -> None:
    one, other = choose_device("sim:7MiB"), choose_device("sim:7MiB")
    assert one is other and one is not choose_device("sim:8MiB")
    one.budgets[1], one.budgets[2] = 2**20, 2 * 2**20
    assert other.free_bytes == 4 * 2**20
    one.budgets.clear()


def test_an_engine_registers_and_releases_its_budget() -> None:
    sim = SimDevice(lookup("64MiB"))
    budgets = (5 * 2**20, 3 * 2**20)
    engines = [
        cells.prepare(cells.Cell(kind=kind, weights="host", optimizer="host"), sim, budget=budget)
        for kind, budget in zip(("plain", "llama"), budgets, strict=True)
    ]
    assert sorted(sim.budgets.values()) == sorted(budgets) and sim.free_bytes == 56 * 2**20
    engines[0].detach()
    assert list(sim.budgets.values()) == [budgets[1]]
    engines[1].detach()
    assert sim.budgets == {} and sim.observer.live_bytes == 0


def test_two_engines_may_each_use_their_budget() -> None:
    """Both plans are exact to the byte and fit the machine side by side, so neither may run out of memory."""
    sim = SimDevice(lookup("64MiB"))
    engines = [
        cells.prepare(cells.Cell(kind=kind, weights="host", optimizer="host"), sim, budget=None)
        for kind in ("llama", "plain")
    ]
    try:
        for engine, kind in zip(engines, ("llama", "plain"), strict=True):
            engine.model(**zoo.batch(kind)).loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    finally:
        for engine in reversed(engines):
            engine.detach()


# --- races


def test_reading_before_the_writers_event_is_a_race(device: SimDevice) -> None:
    slot = cells_of(16)
    device.submit("h2d", lambda: None, waits=[], reads=[], writes=[slot], seconds=1.0)
    with pytest.raises(RaceDetected, match="compute reads 16B that h2d may not have written yet"):
        device.begin("compute", waits=[], reads=[slot], writes=[])


def test_reading_after_the_writers_event_is_no_race(device: SimDevice) -> None:
    slot = cells_of(16)
    loaded = device.submit("h2d", lambda: None, waits=[], reads=[], writes=[slot], seconds=1.0)
    device.begin("compute", waits=[loaded], reads=[slot], writes=[])
    device.end("compute", reads=[slot], writes=[], seconds=1.0)


def test_writing_under_a_reader_is_a_race(device: SimDevice) -> None:
    slot = cells_of(16)
    used = device.submit("compute", lambda: None, waits=[], reads=[slot], writes=[], seconds=1.0)
    with pytest.raises(RaceDetected, match="h2d writes 16B that compute may not have read yet"):
        device.submit("h2d", lambda: None, waits=[], reads=[], writes=[slot], seconds=1.0)
    device.submit("h2d", lambda: None, waits=[used], reads=[], writes=[slot], seconds=1.0)


def test_two_writers_need_an_order(device: SimDevice) -> None:
    slot = cells_of(16)
    device.submit("host", lambda: None, waits=[], reads=[], writes=[slot], seconds=1.0)
    with pytest.raises(RaceDetected, match="d2h writes 16B that host may not have written yet"):
        device.submit("d2h", lambda: None, waits=[], reads=[], writes=[slot], seconds=1.0)


def test_two_readers_need_no_order(device: SimDevice) -> None:
    slot = cells_of(16)
    for lane in LANES:
        device.submit(lane, lambda: None, waits=[], reads=[slot], writes=[], seconds=1.0)


def test_a_lane_is_in_order_with_itself(device: SimDevice) -> None:
    slot = cells_of(16)
    for _ in range(3):
        device.submit("compute", lambda: None, waits=[], reads=[slot], writes=[slot], seconds=1.0)


def test_an_action_that_has_begun_and_not_ended_is_in_flight(device: SimDevice) -> None:
    slot = cells_of(16)
    device.begin("compute", waits=[], reads=[], writes=[slot])
    with pytest.raises(RaceDetected):
        device.submit("d2h", lambda: None, waits=[], reads=[slot], writes=[], seconds=1.0)


def test_what_is_touched_only_at_the_end_is_seen(device: SimDevice) -> None:
    """The activations of a call exist when its forward ends, not when it begins."""
    late = cells_of(16)
    device.begin("compute", waits=[], reads=[], writes=[])
    before = device.end("compute", reads=[], writes=[late], seconds=1.0)
    with pytest.raises(RaceDetected):
        device.submit("d2h", lambda: None, waits=[], reads=[late], writes=[], seconds=1.0)
    device.submit("d2h", lambda: None, waits=[before], reads=[late], writes=[], seconds=1.0)


def test_waiting_is_transitive(device: SimDevice) -> None:
    """No false alarm: h2d writes, compute waits for it, d2h waits for compute alone."""
    slot = cells_of(16)
    loaded = device.submit("h2d", lambda: None, waits=[], reads=[], writes=[slot], seconds=1.0)
    ran = device.submit("compute", lambda: None, waits=[loaded], reads=[], writes=[], seconds=1.0)
    device.submit("d2h", lambda: None, waits=[ran], reads=[], writes=[slot], seconds=1.0)


def test_an_earlier_event_of_the_lane_is_not_enough(device: SimDevice) -> None:
    slot, other = cells_of(16), cells_of(16)
    early = device.submit("h2d", lambda: None, waits=[], reads=[], writes=[other], seconds=1.0)
    device.submit("h2d", lambda: None, waits=[], reads=[], writes=[slot], seconds=1.0)
    with pytest.raises(RaceDetected):
        device.submit("compute", lambda: None, waits=[early], reads=[slot], writes=[], seconds=1.0)


def test_a_later_event_of_the_lane_covers_the_earlier_ones(device: SimDevice) -> None:
    slot = cells_of(16)
    device.submit("h2d", lambda: None, waits=[], reads=[], writes=[slot], seconds=1.0)
    later = device.submit("h2d", lambda: None, waits=[], reads=[], writes=[], seconds=1.0)
    device.submit("compute", lambda: None, waits=[later], reads=[slot], writes=[], seconds=1.0)


def test_a_race_is_found_even_if_the_clock_would_have_hidden_it(device: SimDevice) -> None:
    slot = cells_of(16)
    device.submit("h2d", lambda: None, waits=[], reads=[], writes=[slot], seconds=0.0)
    device.submit("compute", lambda: None, waits=[], reads=[], writes=[], seconds=100.0)
    with pytest.raises(RaceDetected):
        device.submit("compute", lambda: None, waits=[], reads=[slot], writes=[], seconds=1.0)


def test_views_of_one_storage_are_one_buffer(device: SimDevice) -> None:
    slot = cells_of(16)
    device.submit("h2d", lambda: None, waits=[], reads=[], writes=[slot[:4]], seconds=1.0)
    with pytest.raises(RaceDetected):
        device.submit("compute", lambda: None, waits=[], reads=[slot[8:].view(torch.int32)], writes=[], seconds=1.0)


def test_after_synchronize_everything_is_ordered(device: SimDevice) -> None:
    slot = cells_of(16)
    for lane, seconds in zip(LANES, (3.0, 1.0, 2.0, 5.0), strict=True):
        device.submit(lane, lambda: None, waits=[], reads=[slot], writes=[], seconds=seconds)
    device.synchronize()
    assert set(device.clock.free.values()) == {5.0}
    for lane in LANES:
        device.submit(lane, lambda: None, waits=[], reads=[], writes=[slot], seconds=1.0)
        device.synchronize()


def test_a_new_engine_starts_without_earlier_accesses(device: SimDevice) -> None:
    """Addresses are reused: an access of an earlier engine is no race."""
    slot = cells_of(16)
    device.submit("h2d", lambda: None, waits=[], reads=[], writes=[slot], seconds=1.0)
    device.close(1)
    device.open(1, 1000)
    device.submit("compute", lambda: None, waits=[], reads=[slot], writes=[], seconds=1.0)


def test_the_work_is_done_and_what_a_host_update_allocates_is_not_counted(device: SimDevice) -> None:
    device.watching(True)
    done: list[int] = []
    device.submit("host", lambda: done.append(torch.zeros(5000).numel()), waits=[], reads=[], writes=[], seconds=1.0)
    assert done == [5000]
    with pytest.raises(DeviceOutOfMemory):
        device.submit(
            "compute", lambda: done.append(torch.zeros(5000).numel()), waits=[], reads=[], writes=[], seconds=1.0
        )


# --- time

work = st.lists(
    st.tuples(st.sampled_from(LANES), st.floats(0, 10), st.lists(st.integers(0, 20), max_size=3)), max_size=20
)


@given(work)
def test_virtual_time_is_that_of_the_lane_clock(items: list[tuple[str, float, list[int]]]) -> None:
    """The planner keeps time with the same class: an estimate and a run can only differ if their actions do."""
    sim, clock = SimDevice(lookup("1000B")), LaneClock()
    events, ends = [], []
    for lane, seconds, waits in items:
        known = [i for i in waits if i < len(events)]
        events.append(
            sim.submit(lane, lambda: None, waits=[events[i] for i in known], reads=[], writes=[], seconds=seconds)
        )
        ends.append(clock.run(lane, seconds, [ends[i] for i in known]))
    assert [event.ends for event in events] == ends
    assert (sim.clock.free, sim.clock.busy, sim.elapsed(123.0)) == (clock.free, clock.busy, clock.now)


def test_the_meter_counts_from_when_it_was_started(device: SimDevice) -> None:
    held = torch.zeros(100)
    with device.meter() as meter:
        x = held + 1
        assert meter.level() == meter.peak() == 400
        del x
        assert (meter.level(), meter.peak()) == (0, 400)
        meter.reset_peak()
        assert meter.peak() == 0


def test_an_engine_that_a_plan_underestimates_runs_out_of_memory_and_can_be_detached() -> None:
    """The budget is enforced on a real run: one byte less than the exact plan needs."""
    sim = SimDevice(lookup("64MiB"))
    cell = cells.Cell(kind="plain", strategy="swap", weights="host", optimizer="host")
    exact = cells.prepare(cell, sim, budget=None)
    with cells.closing(exact):
        need = exact.plan.gpu_budget_bytes
        cells.train_cell(cell, exact, steps=2)
    short = cells.prepare(cell, sim, budget=need - 1)
    with cells.closing(short), pytest.raises(DeviceOutOfMemory, match=r"by 1 B\."):
        cells.train_cell(cell, short, steps=2)
    assert sim.observer.live_bytes == 0
