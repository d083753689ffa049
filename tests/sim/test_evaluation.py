"""A forward without grad follows the schedule's segment `evaluate`: weights are loaded ahead, and time is as simulated."""

import cells
import pytest
import torch
import zoo

import outsize
from outsize.device.sim import SimDevice
from outsize.hardware.catalog import lookup
from outsize.planner.simulate import Walk
from outsize.schedule.actions import Kind

SPEC = outsize.AdamW(lr=1e-2)
GiB = 2**30


def test_an_evaluation_issues_the_loads_of_its_segment_in_order_and_takes_the_simulated_time() -> None:
    model = zoo.make("llama")
    batch = zoo.batch("llama")
    engine = cells.prepare_by_hand(
        model, batch, spec=SPEC, device=SimDevice(lookup(f"{GiB}B")), weights="host", optimizer="host", depth=1
    )
    with cells.closing(engine), torch.no_grad():
        expected = model(**batch).loss
        engine.drain()
        executor, device = engine.runtime.executor, engine.device
        segment = executor.schedule["evaluate"]
        before, begin = len(executor.issued), max(device.clock.free.values())
        device.clock.free.update(dict.fromkeys(device.clock.free, begin))
        assert torch.equal(model(**batch).loss, expected)
        engine.drain()
        loads = [str(action) for action in segment if action.kind == Kind.LOAD]
        issued = [name for name in executor.issued[before:] if name.startswith("L")]
        assert issued == [name for name in loads if name in issued], "in the order of the segment"
        # What the last evaluation left in its slot is not loaded again.
        assert len(loads) - len(issued) <= len(executor.store.slot_contents)
        walk = Walk(executor.place, device.spec)
        for action in segment:
            if action.kind == Kind.FORWARD or str(action) in issued:
                walk.run(action)
        assert device.clock.free["compute"] - begin == pytest.approx(walk.clock.free["compute"], rel=1e-9)
