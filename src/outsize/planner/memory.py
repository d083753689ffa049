"""Device memory along a schedule: what is allocated for the whole run, plus the activations that come and go.

Activations are a ledger: every visit's Work says by how much its forward and backward raise or lower the level, the schedule says
in which order that happens. Nothing is multiplied, deflated or fitted, so the result equals what an observer of live
storages sees, to the byte. Host memory has no ledger: it is what the placement allocates (`Placement.host_bytes`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outsize.plan.placement import Placement
from outsize.plan.schedule import Action, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class HighWater:
    gpu_bytes: int
    peak_at: str
    """The action during which the device is fullest: `F3`, `B3`; `rest` when no activation adds to what is always there."""


class Entry(NamedTuple):
    """Bytes of activations along one action."""

    action: Action
    opens: int
    here: int
    """At their highest during the action."""
    closes: int


def high_water(place: Placement, schedule: Schedule, held_bytes: int) -> HighWater:
    """The fullest moment of a run. `held_bytes`: outputs of the previous step, which a loop holds until its next forward returns."""
    # Updates and copies allocate nothing, so one forward and any one backward tell all.
    peak, at = activation_peak(schedule.forward, next(iter(schedule.backward.values())), place, held_bytes)
    return HighWater(gpu_bytes=place.gpu_bytes + peak, peak_at=at)


def activation_peak(forward: Sequence[Action], backward: Sequence[Action], place: Placement, held_bytes: int) -> tuple[int, str]:
    """Highest level above what is allocated for the whole run, and the action that reaches it."""
    peak, at = 0, "rest"
    for action, _, here, _ in ledger(forward, backward, place, held_bytes):
        if here > peak:
            peak, at = here, str(action)
    return peak, at


def ledger(forward: Sequence[Action], backward: Sequence[Action], place: Placement, held_bytes: int) -> Iterator[Entry]:
    """One micro-batch: what its activations take at every action that changes it."""
    work = place.work
    dies_forward, dies_backward, stays = _deaths(place)
    level = held_bytes
    last = len(place.graph.visits) - 1
    for action in forward:
        kind, visit = action
        if kind == "F":
            cost = work[visit]
            # What a caller's frame held until here is dead before this visit reaches its own peak.
            level -= dies_forward.get(visit, 0)
            opens, level = level, level + cost.forward_delta_bytes
            here = opens + cost.forward_peak_bytes
            if visit == last:
                level -= held_bytes  # the forward returns
            yield Entry(action, opens, here, level)
        elif kind == "R":
            opens, level = level, level - work[visit].released_bytes + stays.get(visit, 0)
            yield Entry(action, opens, opens, level)
    for action in backward:
        kind, visit = action
        if kind == "B":
            cost = work[visit]
            opens, level = level, level + cost.backward_delta_bytes - dies_backward.get(visit, 0)
            yield Entry(action, opens, opens + cost.backward_peak_bytes, level)


def _deaths(place: Placement) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """What depends on other visits and so is in no visit's Work: bytes that die in a visit's forward, in its backward, and do not die when it is released."""
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    stays: dict[int, int] = {}
    for visit, cost in enumerate(place.work):
        # Of its input: what the layer that made it keeps, and did not keep when this visit was measured.
        kept = place.work[visit - cost.input_from].output_kept_bytes - cost.input_kept_bytes if cost.input_from else 0
        if cost.late_visit > visit:
            forward[cost.late_visit] = forward.get(cost.late_visit, 0) + max(0, cost.late_bytes - kept)
        elif kept > 0 and cost.sent_bytes:
            stays[visit] = min(kept, cost.released_bytes)
        elif kept:
            backward[visit] = backward.get(visit, 0) - kept
    for tensor in place.shared:
        keepers = [v for v in tensor.visits if place.graph.has_backward[v] and place.decision.strategies[v] in tensor.kept_by]
        if tensor.maker >= 0 and place.decision.strategies[tensor.maker] in tensor.maker_keeps:
            keepers.append(tensor.maker)
        if keepers:
            backward[min(keepers)] = backward.get(min(keepers), 0) + tensor.num_bytes
        elif tensor.dies_at >= 0:
            forward[tensor.dies_at] = forward.get(tensor.dies_at, 0) + tensor.num_bytes
    return forward, backward, stays
