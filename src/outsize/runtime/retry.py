"""Repeats a step that ran out of device memory under a new plan that keeps more memory free.

The repeated step has the same bits, since it starts from the same random numbers. Memory runs out under a plan if the
allocator fragments more than the plan allows for, or if another process takes some. The device remembers the larger
margin for later plans.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from outsize.base.errors import DeviceOutOfMemory
from outsize.base.log import log
from outsize.base.units import show_bytes
from outsize.device.rng import rewinder
from outsize.runtime.plan_runtime import RuntimeOwner
from outsize.runtime.state import EngineState
from outsize.schedule.plan import Plan, StepConfig

T = TypeVar("T")
MOST_RETRIES = 2
OOM_MARGIN_SHARE = 0.04
"""Share of the plan's budget that each failure adds to the memory kept free."""


class Retriable(RuntimeOwner, Protocol):
    """The part of an engine that a retry uses."""

    @property
    def plan(self) -> Plan: ...
    def forget_pass(self) -> None: ...
    def replan(self, batch: Any, step_config: StepConfig) -> None: ...


def with_retries(
    engine: Retriable, work: Callable[[], T], batch: Any, earlier: Sequence[Callable[[], object]] = ()
) -> T:
    """Run `work`, a forward with `batch` and its backward; re-plan and repeat it if device memory runs out.

    `earlier`: functions that repeat the step's earlier micro-batches, each from its own random numbers. Without them, a
    backward that fails after it has added to their gradients cannot be repeated.
    """
    rewind, had_sums, from_first = rewinder(engine.device), bool(engine.runtime.gradients.accumulated), False
    for retry in range(MOST_RETRIES + 1):
        try:
            if from_first:
                for repeat in earlier:
                    repeat()
            if retry:
                rewind()
            return work()
        except (torch.OutOfMemoryError, DeviceOutOfMemory) as error:
            found = f"Device memory ran out: {str(error).split(chr(10))[0].rstrip('.')}."
            # A failed backward cannot be undone: gradient sums can be computed again, updated weights cannot.
            engine.forget_pass()
            if engine.state.fault is EngineState.HALF_UPDATED:
                raise DeviceOutOfMemory(
                    f"{found} This step has already updated some weights: load weights and optimizer state from the "
                    "last checkpoint."
                ) from None
            if retry == MOST_RETRIES:
                raise DeviceOutOfMemory(
                    f"{found} The step was planned again {retry} times. Reduce the batch size or raise gpu_memory."
                ) from error
            from_first = from_first or (had_sums and engine.state.fault is EngineState.GRADIENTS_INCOMPLETE)
            if from_first and not earlier:
                raise DeviceOutOfMemory(
                    f"{found} The gradients of the step's earlier micro-batches contain part of the failed one. "
                    "Weights are unchanged. Call zero_grad() and repeat the step's micro-batches."
                ) from None
        # The exception is freed here, and with it the frames that hold the failed step's activations.
        gc.collect()
        margin = int(engine.plan.gpu_budget_bytes * OOM_MARGIN_SHARE)
        engine.device.oom_margin_bytes += margin
        what = f"all {len(earlier) + 1} micro-batches of the step so far" if from_first else "the step"
        log.warning("%s Planning again with %s more kept free, and repeating %s", found, show_bytes(margin), what)
        if from_first or not had_sums:
            engine.zero_grad()
        engine.replan(batch, engine.plan.step_config)
    raise AssertionError("the last retry returns or raises")
