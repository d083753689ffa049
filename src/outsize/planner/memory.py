"""Device memory along a schedule: what is allocated for the whole run, plus the activations that come and go.

Activations are a ledger: every visit's Work says by how much its forward and backward raise or lower the level, the schedule says
in which order that happens. Nothing is multiplied, deflated or fitted, so the result equals what an observer of live
storages sees, to the byte. Host memory has no ledger: it is what the placement allocates (`Placement.host_bytes`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outsize.plan.placement import Placement
from outsize.plan.schedule import Action, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class HighWater:
    gpu_bytes: int
    peak_at: str
    """The action during which the device is fullest: `F3`, `B3`; `rest` when no activation adds to what is always there."""


def high_water(place: Placement, schedule: Schedule, held_bytes: int) -> HighWater:
    """The fullest moment of a run. `held_bytes`: outputs of the previous step, which a loop holds until its next forward returns."""
    # Updates and copies allocate nothing, so one forward and any one backward tell all.
    peak, at = activation_peak(schedule.forward, next(iter(schedule.backward.values())), place, held_bytes)
    return HighWater(gpu_bytes=place.gpu_bytes + peak, peak_at=at)


def activation_peak(forward: Sequence[Action], backward: Sequence[Action], place: Placement, held_bytes: int) -> tuple[int, str]:
    """Highest level above what is allocated for the whole run, and the action that reaches it."""
    work = place.work
    dies_forward, dies_backward = _deaths(place)
    peak, at, level = 0, "rest", 0
    for action in forward:
        kind, visit = action
        if kind == "F":
            cost = work[visit]
            # What a caller's frame held until here is dead before this visit reaches its own peak.
            level -= dies_forward.get(visit, 0)
            here = held_bytes + level + cost.forward_peak_bytes
            if here > peak:
                peak, at = here, str(action)
            level += cost.forward_delta_bytes
        elif kind == "R":
            level -= work[visit].released_bytes
    for action in backward:
        kind, visit = action
        if kind == "B":
            cost = work[visit]
            here = level + cost.backward_peak_bytes
            if here > peak:
                peak, at = here, str(action)
            level += cost.backward_delta_bytes - dies_backward.get(visit, 0)
    return peak, at


def _deaths(place: Placement) -> tuple[dict[int, int], dict[int, int]]:
    """Bytes that die in a visit's forward and in its backward without being in its Work, since that depends on other visits."""
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    for visit, cost in enumerate(place.work):
        if cost.late_visit > visit:
            forward[cost.late_visit] = forward.get(cost.late_visit, 0) + cost.late_bytes
    for tensor in place.shared:
        keepers = [v for v in tensor.visits if place.graph.has_backward[v] and place.decision.strategies[v] in tensor.kept_by]
        if keepers:
            backward[min(keepers)] = backward.get(min(keepers), 0) + tensor.num_bytes
        elif tensor.dies_at >= 0:
            forward[tensor.dies_at] = forward.get(tensor.dies_at, 0) + tensor.num_bytes
    return forward, backward
