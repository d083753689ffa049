"""Mutation of waits: whatever wait is left out, the device's happens-before check finds it in some plan.

All waits come from `Hazards.before`. Here it is replaced by one that forgets some: in the real executor, all waits of
one class (`U<G`: an update that waits for a gradient to arrive on the host), and in a walk of the schedule without a
model, every single wait on its own. A wait that no plan catches would be redundant. Traps: B1 `U<G`, B4 `F<L` and
`B<L`, B5 `L<F` and `L<B`, B6 `P<B` and `P<S`, A20 `R<S`, D9 `U<B`.
"""

import functools
import random
from collections.abc import Iterable, Sequence

import cells
import pytest
import torch
from cells import Cell
from parity.test_mixed_plans import random_decision
from sim.test_sweep import BY_TURNS, GiB, budgets, machine
from sim.test_sweep import prepare as prepare_swept
from turns import in_turn

from outsize.base.errors import RaceDetected
from outsize.hardware.lanes import Lane
from outsize.runtime.engine import Engine
from outsize.runtime.executor import Executor
from outsize.schedule.actions import Action, Effect, effect
from outsize.schedule.buffers import Buffer
from outsize.schedule.hazards import Hazards, Token
from outsize.schedule.placement import Placement
from outsize.schedule.schedule import Segment, compile_schedule

CHUNK_BYTES = 4 * 1024
STEPS = 2
PLANS = [
    Cell(kind="plain", strategy="offload", weights="host", optimizer="host", depth=0),
    Cell(kind="plain", strategy="swap", weights="host", optimizer="gpu", depth=0),
    Cell(kind="plain", strategy="swap", weights="host", optimizer="gpu", depth=1, accumulate=3, tied=True),
    Cell(kind="bert", strategy="keep", weights="gpu", optimizer="host", accumulate=3, clip=True),
    Cell(
        kind="plain", strategy="recompute", weights="host", optimizer="host", accumulate=3, update="declared", tied=True
    ),
    Cell(kind="plain", strategy="swap", weights="host", optimizer="host", update="in_backward", dtype="bf16"),
    Cell(kind="plain", strategy="keep", weights="host", optimizer="gpu", update="in_backward"),
    Cell(kind="plain", strategy="offload", weights="gpu", optimizer="host", update="in_backward", frozen="scattered"),
    Cell(kind="plain", strategy="swap", weights="gpu", optimizer="gpu", update="declared", accumulate=3),
    Cell(kind="plain", weights="host", optimizer="streamed", depth=0, accumulate=3, clip=True),
    Cell(kind="plain", strategy="swap", weights="host", optimizer="streamed", update="in_backward", accumulate=2),
    Cell(kind="plain", weights="gpu", optimizer="streamed", update="in_backward", dtype="bf16"),
    Cell(kind="looped", strategy="swap", weights="host", optimizer="host", depth=0, accumulate=3),
    Cell(kind="llama", strategy="swap", weights="host", optimizer="host", depth=0),
    Cell(kind="plain", weights="host", optimizer="host", depth=0, accumulate=3, osft=0.5),
    Cell(kind="plain", weights="gpu", optimizer="host", update="in_backward", osft=0.5),
    Cell(kind="plain", weights="host", optimizer="streamed", update="in_backward", dtype="bf16", osft=0.5),
    Cell(kind="plain", weights="host", optimizer="streamed", accumulate=2, osft=0.25),
    Cell(kind="plain", weights="host", optimizer="gpu", osft=0.5),
]
MIXED = [
    Cell(
        kind="plain",
        accumulate=1 + seed % 3,
        update=("after_step", "declared", "in_backward")[seed % 3],
        tied=bool(seed % 2),
    )
    for seed in range(4)
]
EVERY = [(cell, None) for cell in PLANS] + [(cell, seed) for seed, cell in enumerate(MIXED)]
"""With the seed of a random decision."""


def prepare(cell: Cell, seed: int | None) -> Engine:
    how = {} if seed is None else {"decision": functools.partial(random_decision, rng=random.Random(seed))}
    return cells.prepare(cell, machine(GiB), chunk_bytes=CHUNK_BYTES, **how)


class StepTiming(Hazards):
    """Knows which kind of action waits for which, and forgets one class of waits."""

    def __init__(self, executor: Executor, forgets: str | None):
        super().__init__()
        self.found: set[str] = set()
        self._forgets = forgets
        self._kind = ""
        self._begun: dict[Lane, str] = {}
        self._kind_of: dict[Token, str] = {}
        look_up = executor._effect

        def look_up_and_tell(action: Action) -> Effect:
            self._kind = action.kind
            return look_up(action)

        executor._effect = look_up_and_tell  # type: ignore[method-assign]  # asked right before every action
        executor.lanes.hazards = self

    def before(self, lane: Lane, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> Sequence[Token]:
        classes = {token: f"{self._kind}<{self._kind_of[token]}" for token in super().before(lane, reads, writes)}
        self.found |= set(classes.values())
        self._begun[lane] = self._kind
        return [token for token, name in classes.items() if name != self._forgets]

    def after(self, lane: Lane, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> Token:
        token = super().after(lane, reads, writes)
        self._kind_of[token] = self._begun[lane]
        return token


@functools.cache
def waits_of(cell: Cell, seed: int | None) -> frozenset[str]:
    """The classes of waits in a run that forgets nothing, and has no race."""
    with cells.closing(prepare(cell, seed)) as engine:
        timing = StepTiming(engine.runtime.executor, None)
        cells.train_cell(cell, engine, steps=STEPS)
        return frozenset(timing.found)


# F forward, B backward, L load weights, S send and P bring back activations, R let go of them, G gradient to the host,
# Q partial sum to the device, E add to it, I load and O store streamed state, U update, W write updated weights.
# Of coordinates: J and N load constants, K contract, D load coordinates, M merge.
CLASSES = (
    "B<G",
    "B<L",
    "B<P",
    "B<Q",
    "D<U",
    "F<L",
    "F<W",
    "G<B",
    "G<E",
    "G<K",
    "G<U",
    "I<M",
    "I<O",
    "J<K",
    "J<M",
    "K<G",
    "K<J",
    "K<N",
    "L<B",
    "L<F",
    "L<U",
    "L<W",
    "M<D",
    "M<N",
    "M<W",
    "N<K",
    "N<M",
    "O<U",
    "P<B",
    "P<S",
    "Q<G",
    "Q<U",
    "R<S",
    "S<F",
    "U<B",
    "U<E",
    "U<G",
    "U<I",
    "U<L",
    "W<M",
    "W<U",
)


def test_these_are_all_classes_of_waits_in_the_plans() -> None:
    assert sorted(frozenset().union(*(waits_of(*plan) for plan in EVERY))) == sorted(CLASSES)


@pytest.mark.parametrize("cell", BY_TURNS, ids=str)
def test_plans_of_the_sweep_have_no_other_class(cell: Cell) -> None:
    for number in (0, 2):
        with cells.closing(prepare_swept(cell, machine(budgets(cell)[number]))) as engine:
            timing = StepTiming(engine.runtime.executor, None)
            cells.train_cell(cell, engine, steps=STEPS)
            assert timing.found <= set(CLASSES)


def races(cell: Cell, seed: int | None, forgets: str) -> bool:
    try:
        with cells.closing(prepare(cell, seed)) as engine:
            StepTiming(engine.runtime.executor, forgets)
            cells.train_cell(cell, engine, steps=STEPS)
    except RaceDetected:
        return True
    return False


@pytest.mark.parametrize("name", CLASSES)
def test_no_class_of_waits_can_be_left_out(name: str) -> None:
    """In the real executor, with a real model."""
    plans = [plan for plan in EVERY if name in waits_of(*plan)]
    assert any(races(*plan, forgets=name) for plan in plans), (
        f"no plan needs the wait {name}: {[str(cell) for cell, _ in plans]}"
    )


def _walk(place: Placement, segments: list[Segment], forgets: int | None) -> int:
    """Issue the actions on a device, each buffer one small tensor, without the wait of this number. Returns how many
    waits there were.
    """
    device, hazards, events, count = machine(GiB), Hazards(), {}, 0
    memory: dict[Buffer, torch.Tensor] = {}
    for segment in segments:
        for action in segment.actions:
            lane, reads, writes = effect(place, action, update_in_backward=segment.updates_in_backward)
            tokens = hazards.before(lane, reads, writes)
            waits = [events[token] for number, token in enumerate(tokens, count) if number != forgets]
            count += len(tokens)
            touched = [[memory.setdefault(buffer, torch.empty(1)) for buffer in buffers] for buffers in (reads, writes)]
            event = device.submit(lane, lambda: None, waits=waits, reads=touched[0], writes=touched[1], seconds=0.0)
            events[hazards.after(lane, reads, writes)] = event
    return count


@pytest.mark.parametrize(("cell", "seed"), in_turn(EVERY), ids=str)
def test_no_single_wait_can_be_left_out(cell: Cell, seed: int | None) -> None:
    """Every wait of the schedule is minimal: without it, and with all others, the device finds a race."""
    with cells.closing(prepare(cell, seed)) as engine:
        place = engine.runtime.place
    in_backward = cell.update != "after_step" and not cell.clip
    segments = [segment for _ in range(STEPS) for segment in compile_schedule(place).step(cell.accumulate, in_backward)]
    num_waits = _walk(place, segments, None)
    assert num_waits > 10
    for number in range(num_waits):
        with pytest.raises(RaceDetected):
            _walk(place, segments, number)
