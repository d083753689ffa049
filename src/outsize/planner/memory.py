"""Predicts GPU memory along a schedule: the buffers that are allocated for the whole run, plus activations.

Activations are a ledger. Each call's Work has the bytes that its forward and backward allocate and free; the schedule
has their order. No factor is fitted, so the result equals the bytes of live storages exactly. Host memory has no
ledger: it is the sum of the placement's buffers (`Placement.host_bytes`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from outsize.schedule.actions import Action, Kind
from outsize.schedule.placement import Placement
from outsize.schedule.schedule import Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class HighWater:
    gpu_bytes: int
    peak_at: str
    """The action at the memory peak, such as `F3` or `B3`; `rest` if no activation adds to the permanent buffers."""


class LedgerEntry(NamedTuple):
    """Bytes of activations before, during and after one action."""

    action: Action
    opens: int
    peak: int
    """The peak during the action."""
    closes: int


def high_water(place: Placement, schedule: Schedule, held_bytes: int) -> HighWater:
    """The memory peak of a run. `held_bytes`: outputs of the previous step, which a loop holds until its next forward
    returns.
    """
    peak, at = activation_peak(schedule, place, held_bytes)
    return HighWater(gpu_bytes=place.gpu_bytes + peak, peak_at=at)


def activation_peak(schedule: Schedule, place: Placement, held_bytes: int) -> tuple[int, str]:
    """The peak of activations, and the action that reaches it."""
    peak, at = 0, "rest"
    for action, _, here, _ in ledger(schedule, place, held_bytes):
        if here > peak:
            peak, at = here, str(action)
    return peak, at


def ledger(schedule: Schedule, place: Placement, held_bytes: int) -> Iterator[LedgerEntry]:
    """The activation bytes of one micro-batch before, during and after every action that changes them.

    Updates and copies allocate nothing, so one forward and any one backward are enough.
    """
    work = place.work
    allocated, freed_forward, freed_by_release, freed_early, freed_backward = _lifetimes(place)
    level = held_bytes
    last = len(place.graph.calls) - 1
    for action in schedule["forward"]:
        kind, call = action
        if kind == Kind.FORWARD:
            cost = work[call]
            # Tensors that this call's forward frees are freed before its peak.
            level -= freed_forward.get(call, 0)
            opens, level = level, level + cost.forward_delta_bytes + allocated.get(call, 0)
            here = opens + cost.forward_peak_bytes
            if call == last:
                level -= held_bytes + freed_forward.get(last + 1, 0)  # the forward returns
            yield LedgerEntry(action, opens, here, level)
        elif kind == Kind.FREE:
            opens, level = level, level - work[call].released_bytes - freed_by_release.get(call, 0)
            yield LedgerEntry(action, opens, opens, level)
    for action in schedule.backwards[0].actions:
        kind, call = action
        if kind == Kind.BACKWARD:
            cost = work[call]
            level -= freed_early.get(call, 0)
            opens, level = level, level + cost.backward_delta_bytes - freed_backward.get(call, 0)
            yield LedgerEntry(action, opens, opens + cost.backward_peak_bytes, level)


def _lifetimes(place: Placement) -> tuple[dict[int, int], ...]:
    """Bytes of the shared tensors, which are in no call's Work. Five tables by call: allocated in its forward, freed in
    its forward, freed by its FREE action, freed in its backward before the peak, freed at the end of its backward."""
    allocated: dict[int, int] = {}
    forward: dict[int, int] = {}
    released: dict[int, int] = {}
    early: dict[int, int] = {}
    backward: dict[int, int] = {}
    strategies = place.decision.strategies
    for tensor in place.shared:
        num_bytes = tensor.num_bytes
        if tensor.allocated_in >= 0:
            if tensor.only_under and strategies[tensor.allocated_in] not in tensor.only_under:
                continue
            allocated[tensor.allocated_in] = allocated.get(tensor.allocated_in, 0) + num_bytes
        for call, under in tensor.held_by:
            if strategies[call] in under:
                is_early = any(other == call and strategies[call] in those for other, those in tensor.freed_early_in)
                freed = early if is_early else backward
                freed[call] = freed.get(call, 0) + num_bytes
                break
        else:
            if tensor.freed_in < 0:
                continue
            sender = max((call for call, under in tensor.sent_by if strategies[call] in under), default=-1)
            # A FREE action follows the forward of the next call.
            if sender >= 0 and sender + 2 > tensor.freed_in:
                released[sender] = released.get(sender, 0) + num_bytes
            else:
                forward[tensor.freed_in] = forward.get(tensor.freed_in, 0) + num_bytes
    return allocated, forward, released, early, backward
