"""A step that ran out of device memory is planned anew, with more room, and made again: to the same bits, since it
starts from the same random numbers.

That the memory ran out all the same means that the allocator lost more than the plan keeps for it, or that somebody
else took some. What was learnt stays with the device: later plans keep it free too.
"""

import gc
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from outsize.base.errors import DeviceOutOfMemory, tell
from outsize.base.log import log
from outsize.base.units import show_bytes
from outsize.device.device import Device
from outsize.device.rng import rewinder
from outsize.plan.plan import Plan, StepConfig
from outsize.runtime.plan_runtime import PlanRuntime

T = TypeVar("T")
MOST_RETRIES = 2
OOM_MARGIN_SHARE = 0.04
"""Of the plan's budget, kept free on top after each failure."""


class Retriable(Protocol):
    """What of an engine is needed here."""

    device: Device

    @property
    def runtime(self) -> PlanRuntime: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def is_half_updated(self) -> bool: ...
    def forget_pass(self) -> None: ...
    def zero_grad(self, set_to_none: bool = True) -> None: ...
    def replan(self, batch: Any, step_config: StepConfig) -> None: ...


def with_retries(
    engine: Retriable, work: Callable[[], T], batch: Any, earlier: Sequence[Callable[[], object]] = ()
) -> T:
    """`work` runs a forward of the engine's model with `batch`, and its backward.

    `earlier`: each makes one of the step's earlier micro-batches again, from the random numbers it began with. Without
    them a backward that breaks off on top of their sums cannot be repeated.
    """
    rewind, had_sums, from_first = rewinder(engine.device), bool(engine.runtime.gradients.accumulated), False
    for retry in range(MOST_RETRIES + 1):
        try:
            if from_first:
                for make_again in earlier:
                    make_again()
            if retry:
                rewind()
            return work()
        except (torch.OutOfMemoryError, DeviceOutOfMemory) as error:
            words = str(error).split("\n")[0]
            # What a failed backward has changed cannot be taken back: sums can be made again, weights cannot.
            engine.forget_pass()
            if engine.is_half_updated:
                do = (
                    "Some weights of this step are new already: load weights and optimizer state from the last "
                    "checkpoint"
                )
                raise DeviceOutOfMemory(_told(words, do)) from None
            if retry == MOST_RETRIES:
                raise DeviceOutOfMemory(
                    _told(words, f"Give a smaller batch or a larger gpu_memory: it was planned {retry} more times")
                ) from error
            from_first = from_first or (had_sums and engine.runtime.gradients.broken is not None)
            if from_first and not earlier:
                do = (
                    "Call zero_grad() and make the step's micro-batches again: the sums of the earlier ones are "
                    "mixed with what broke off"
                )
                raise DeviceOutOfMemory(_told(words, f"{do}. Weights are untouched")) from None
        # Here the exception is gone, and with it the frames that hold the activations of what failed.
        gc.collect()
        learnt = int(engine.plan.gpu_budget_bytes * OOM_MARGIN_SHARE)
        engine.device.oom_margin_bytes += learnt
        what = f"all {len(earlier) + 1} micro-batches of the step so far" if from_first else "the step"
        log.warning(
            "device memory ran out in a step (%s): planning again with %s more kept free, and making %s again",
            words,
            show_bytes(learnt),
            what,
        )
        if from_first or not had_sums:
            engine.zero_grad()
        engine.replan(batch, engine.plan.step_config)
    raise AssertionError("the last retry returns or raises")


def _told(found: str, do: str) -> str:
    return tell("a step stays within what its plan promised", found, do)
