"""A step that ran out of device memory is planned anew, with more room, and made again: to the same bits, since it starts from the same random numbers.

That the memory ran out all the same means that the allocator lost more than the plan keeps for it, or that somebody else took some. What was learnt stays
with the device: later plans keep it free too.
"""

import gc
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from outsize.base.errors import DeviceOutOfMemory, tell
from outsize.base.log import log
from outsize.base.units import show_bytes
from outsize.device.device import Device
from outsize.device.rng import HostRng
from outsize.plan.plan import Plan, Terms
from outsize.runtime.attached import Attached

T = TypeVar("T")
MOST_RETRIES = 2
LEARNT_SHARE = 0.04
"""Of the plan's budget, kept free on top after each failure."""


class Retriable(Protocol):
    """What of an engine is needed here."""

    device: Device

    @property
    def now(self) -> Attached: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def is_half_updated(self) -> bool: ...
    def forget_pass(self) -> None: ...
    def zero_grad(self) -> None: ...
    def replan(self, batch: Any, terms: Terms) -> None: ...


def with_retries(engine: Retriable, work: Callable[[], T], batch: Any) -> T:
    """`work` runs a forward of the engine's model with `batch`, and its backward."""
    for retry in range(MOST_RETRIES + 1):
        host, own, had_sums = HostRng.now(), engine.device.rng_state(), bool(engine.now.gradients.landed)
        try:
            return work()
        except (torch.OutOfMemoryError, DeviceOutOfMemory) as error:
            words = str(error).split("\n")[0]
            if retry == MOST_RETRIES:
                raise DeviceOutOfMemory(_told(words, f"Give a smaller batch or a larger gpu_memory: it was planned {retry} more times")) from error
            _require_untouched(engine, words, had_sums)
        # Here the exception is gone, and with it the frames that hold the activations of what failed.
        gc.collect()
        learnt = int(engine.plan.gpu_budget_bytes * LEARNT_SHARE)
        engine.device.learnt_bytes += learnt
        log.warning("device memory ran out in a step (%s): planning again with %s more kept free, and making the step again", words, show_bytes(learnt))
        if not had_sums:
            engine.zero_grad()
        engine.replan(batch, engine.plan.terms)
        host.restore()
        engine.device.set_rng_state(own)
    raise AssertionError("the last retry returns or raises")


def _require_untouched(engine: Retriable, words: str, had_sums: bool) -> None:
    """What a failed backward has changed cannot be taken back; the weights of a declared one least of all."""
    engine.forget_pass()
    if engine.is_half_updated:
        raise DeviceOutOfMemory(_told(words, "Some weights of this step are new already: load weights and optimizer state from the last checkpoint")) from None
    if had_sums and engine.now.gradients.broken is not None:
        do = "Call zero_grad() and make the step's micro-batches again: the sums of the earlier ones are mixed with what broke off. Weights are untouched"
        raise DeviceOutOfMemory(_told(words, do)) from None


def _told(found: str, do: str) -> str:
    return tell("a step stays within what its plan promised", found, do)
