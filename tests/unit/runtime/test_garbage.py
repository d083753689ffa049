"""The garbage collector beside a run: what a full collection walks in a pass, and between passes. Engines on the CPU are not told to; these tests are."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cells
import pytest
import zoo
from cells import Cell

from outsize.device.cpu import CpuDevice
from outsize.runtime import garbage
from outsize.runtime.engine import Engine


class Cycle:
    """Only a collection frees it."""

    def __init__(self, *held: Any) -> None:
        self.own, self.held = self, held


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    for course in list(garbage._courses):
        garbage.end(course)


def training() -> Engine:
    engine = cells.prepare(Cell(kind="llama", weights="host", optimizer="host"), CpuDevice())
    garbage.begin(engine._passes.course)
    return engine


def run_with(engine: Engine, act: Callable[[], None], where: str) -> None:
    """`act` runs in the middle of a pass."""
    handle = engine.model.get_submodule("model.layers.1").register_forward_hook(lambda *_: act() if where == "forward" else None)
    loss = engine.model(**zoo.batch("llama", seed=0)).loss
    handle.remove()
    if where == "backward":
        loss.register_hook(lambda _: act())
    loss.backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_in_a_pass_what_was_there_before_is_left_alone_and_what_came_since_is_not(where: str) -> None:
    engine = training()
    held = [Cycle()]
    gc.collect()
    before = weakref.ref(held.pop())
    seen: list[bool] = []

    def act() -> None:
        since = weakref.ref(Cycle())
        gc.collect()
        seen.extend((before() is not None, since() is None))

    run_with(engine, act, where)
    assert seen == [True, True]
    gc.collect()
    assert before() is None, "a full collection between passes walks everything"
    assert gc.get_freeze_count() > 0
    engine.detach()
    assert gc.get_freeze_count() == 0


def test_an_engine_that_is_dropped_in_a_cycle_goes_with_the_next_collection() -> None:
    engine = training()
    gone = weakref.ref(engine)
    cycle: Cycle | None = Cycle(engine)
    gc.collect()
    del engine, cycle
    gc.collect()
    assert gone() is None
    gc.collect()
    assert gc.get_freeze_count() == 0 and garbage._at_collection not in gc.callbacks


def test_so_does_one_whose_backward_broke_off() -> None:
    engine = training()
    gone = weakref.ref(engine)
    cycle: Cycle | None = Cycle(engine)
    gc.collect()

    def breaks() -> None:
        raise RuntimeError("out of memory, say")

    with pytest.raises(RuntimeError, match="say"):
        run_with(engine, breaks, "backward")
    del engine, cycle
    gc.collect()
    assert gone() is None


def test_with_two_engines_neither_ends_what_the_other_has_begun() -> None:
    first, second = training(), training()
    first.detach()
    gc.collect()
    assert gc.get_freeze_count() > 0
    second.detach()
    assert gc.get_freeze_count() == 0
