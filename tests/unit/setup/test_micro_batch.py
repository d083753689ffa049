"""Which split of a batch is taken, with numbers in place of models: what is traced, what is only scaled, and what
becomes of sizes that do not fit.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic

from outsize.base.errors import ConfigError, DeviceOutOfMemory, PlanInfeasible
from outsize.loss.chunked_loss import ChosenLoss
from outsize.profile.trace import ModelTrace
from outsize.setup.micro_batch import Split, Traced, fastest, splits_of

TOKENS = 8
CASE = synthetic.random_case(3)


def infeasible() -> PlanInfeasible:
    return PlanInfeasible("no", resource="gpu", allowed_bytes=1, needed_bytes=2)


@dataclass
class Machine:
    """`seconds` of a step by rows; the trace says them, on a line unless `odd` has others."""

    fixed: float = 100.0
    each: float = 10.0
    odd: dict[int, float] = None  # type: ignore[assignment]
    most_rows: int = 64
    most_trial_rows: int = 64
    chunk: int = 0
    batch: int = 24

    def __post_init__(self) -> None:
        self.odd = self.odd or {}
        self.traced: list[int] = []
        self.solved: list[tuple[int, bool]] = []

    def trace(self, rows: int) -> Traced:
        self.traced.append(rows)
        if rows > self.most_trial_rows:
            raise DeviceOutOfMemory("too large")
        in_chunks = 0 < self.chunk < rows * TOKENS
        patch: Any = SimpleNamespace(chunk=self.chunk) if self.chunk else None
        work = replace(
            synthetic.NOTHING, forward_seconds=self.odd.get(rows, self.fixed + self.each * rows) + 1000.0 * in_chunks
        )
        shape = (rows, TOKENS)
        made = ModelTrace(
            graph="g",
            inputs={"input_ids": shape, "labels": shape},
            calls=({"keep": work},),
            held_bytes=0,
            provenance="traced",
        )
        return Traced(
            rows=rows, graph=CASE.graph, trace=made, loss=ChosenLoss(text="", patch=patch, in_chunks=in_chunks)
        )

    def solve(self, found: Traced, split: Split) -> Any:
        assert found.rows == split.rows == found.trace.inputs["input_ids"][0]
        self.solved.append((split.rows, "scaled" in found.trace.provenance))
        if split.rows > self.most_rows:
            raise infeasible()
        seconds = found.trace.work(0, "keep").forward_seconds * split.passes
        return SimpleNamespace(plan=SimpleNamespace(estimate=SimpleNamespace(step_seconds=seconds)))

    def choose(self) -> Any:
        return fastest(splits_of(self.batch, None, None), self.trace, self.solve)


def test_two_sizes_are_traced_and_then_the_one_that_wins() -> None:
    machine = Machine()
    choice = machine.choose()
    assert choice.split == Split(rows=24, passes=1) and machine.traced == [2, 3, 24]
    assert machine.solved[-1] == (24, False) and (12, True) in machine.solved
    assert choice.words.startswith(
        "micro-batches 24 × 1 of 24 rows a step; 1 × 24 takes 7.76 times as long, 2 × 12 takes"
    )


def test_one_split_is_traced_once_and_needs_no_words() -> None:
    machine = Machine()
    choice = fastest(splits_of(None, 5, None), machine.trace, machine.solve)
    assert machine.traced == [5] and choice.words == "" and choice.split == Split(rows=5, passes=1)


def test_of_equal_splits_the_smaller_micro_batch_is_taken() -> None:
    assert Machine(fixed=0.0).choose().split.rows == 1


def test_a_winner_that_its_own_trace_does_not_confirm_is_not_taken() -> None:
    machine = Machine(odd={24: 10_000.0, 12: 5_000.0})
    choice = machine.choose()
    assert choice.split.rows == 8 and machine.traced == [2, 3, 24, 12, 8]


def test_what_does_not_fit_is_left_out_with_all_that_is_larger() -> None:
    choice = Machine(most_rows=6).choose()
    assert choice.split.rows == 6 and choice.words.endswith(
        "8 × 3 does not fit, 12 × 2 does not fit, 24 × 1 does not fit"
    )
    machine = Machine(most_trial_rows=2)
    assert machine.choose().split.rows == 2 and max(machine.traced) == 3
    alone = Machine(most_rows=1, most_trial_rows=1).choose()
    assert alone.split.rows == 1
    with pytest.raises(PlanInfeasible):
        Machine(most_rows=0).choose()
    with pytest.raises(DeviceOutOfMemory):
        Machine(most_trial_rows=0).choose()


def test_a_loss_in_chunks_is_scaled_from_such_ones_alone() -> None:
    machine = Machine(chunk=5 * TOKENS, odd={1: 5000.0})
    machine.choose()
    assert machine.traced[:4] == [2, 3, 6, 8], "up to 5 rows there are full logits, beyond them chunks: two points each"
    assert {rows for rows, is_scaled in machine.solved if is_scaled} == {1, 4, 12, 24}


@pytest.mark.parametrize(
    ("given", "rows"),
    [((6, None, None), [1, 2, 3, 6]), ((6, 3, None), [3]), ((6, None, 3), [2]), ((None, None, None), [1])],
)
def test_the_splits_of_a_batch(given: Any, rows: list[int]) -> None:
    found = splits_of(*given)
    assert [split.rows for split in found] == rows and all(
        split.rows * split.passes == (given[0] or 1) for split in found
    )
    with pytest.raises(ConfigError, match=r"batch_size 6 is not .*: micro_batch_size 4.*6 is divided by 1, 2, 3, 6"):
        splits_of(6, 4, None, name="gradient_accumulation_steps")
    assert [split.rows for split in splits_of(1_000_000_007, None, None)] == [1, 1_000_000_007], "a prime, at once"
