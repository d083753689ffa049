"""One variant for every sub-block: the lowest summed score within limits on summed costs.

Scores add up well enough to choose by (`docs/prune.md`), so the choice is a small integer program, which scipy's `milp`
(extra `prune`) solves exactly. The solver works in floating point with tolerances; every answer is therefore checked
here with exact sums, and one that exceeds a limit by less than the tolerance is excluded and the rest solved again.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import numpy as np

from outsize.base.errors import ConfigError

TIME_LIMIT = 60.0
MAX_EXCLUDED = 200
"""Solutions excluded because they exceed a limit by less than the solver's tolerance."""

_LEAST = 1e-300
"""Scores are divided by this at least."""
_SCALE = 1e4
"""Rows and objective are scaled to this size: the solver's absolute tolerance, 1e-6, is then 1e-10 of a row."""


@dataclass(frozen=True)
class Option:
    """A variant of one sub-block."""

    group: str  # the sub-block, of which exactly one option is chosen
    name: str
    score: float
    costs: Mapping[str, float]


@dataclass(frozen=True)
class Limit:
    """Bounds on one summed cost, both included."""

    cost: str
    maximum: float = math.inf
    minimum: float = -math.inf

    def allows(self, value: float) -> bool:
        return self.minimum <= value <= self.maximum


@dataclass(frozen=True)
class Choice:
    """One option per group."""

    names: Mapping[str, str]  # group → option
    score: float
    costs: Mapping[str, float]
    gap: float  # (score - proven lower bound) / |score|; 0: no better choice exists, inf: no bound known

    @property
    def proven(self) -> bool:
        return self.gap <= 1e-9

    @property
    def bound(self) -> float:
        """No choice has a lower score."""
        return self.score if self.gap == 0 else self.score - self.gap * max(abs(self.score), _LEAST)


def _gap(score: float, bound: float) -> float:
    return 0.0 if score <= bound else (score - bound) / max(abs(score), _LEAST)


class TargetInfeasible(ConfigError):
    """No choice is within all limits. `nearest`: for each limit that could be relaxed alone, the value it would need;
    empty if no single limit is enough, then `alone` has each cost's range without the other limits.
    """

    def __init__(
        self, limits: Sequence[Limit], nearest: Mapping[str, float], alone: Mapping[str, tuple[float, float]]
    ) -> None:
        self.limits, self.nearest, self.alone = tuple(limits), dict(nearest), dict(alone)
        asked = ", ".join(_text(limit) for limit in limits)
        if nearest:
            maxima = {limit.cost: limit.maximum for limit in limits}
            remedies = [f"{cost} {_enough(value, is_maximum=value > maxima[cost])}" for cost, value in nearest.items()]
            advice = f"Keep the other limits and change one to: {' or '.join(remedies)}."
        else:
            ranges = [f"{cost} from {low:g} to {high:g}" for cost, (low, high) in alone.items()]
            advice = f"No single limit is enough. Reachable alone: {', '.join(ranges)}."
        super().__init__(f"No choice of variants meets the target {asked}. {advice}")

    def plus(self, fixed: Mapping[str, float]) -> "TargetInfeasible":
        """The same with costs that do not depend on the choice."""
        limits = [
            Limit(each.cost, each.maximum + fixed[each.cost], each.minimum + fixed[each.cost]) for each in self.limits
        ]
        nearest = {cost: value + fixed[cost] for cost, value in self.nearest.items()}
        alone = {cost: (low + fixed[cost], high + fixed[cost]) for cost, (low, high) in self.alone.items()}
        return TargetInfeasible(limits, nearest, alone)

    @classmethod
    def of_any(cls, errors: Sequence["TargetInfeasible"]) -> "TargetInfeasible":
        """Of several sets of choices under the same limits."""
        nearest: dict[str, float] = {}
        for limit in errors[0].limits:
            if found := [error.nearest[limit.cost] for error in errors if limit.cost in error.nearest]:
                nearest[limit.cost] = min(found, key=lambda value: max(value - limit.maximum, limit.minimum - value))
        alone = {
            cost: (min(error.alone[cost][0] for error in errors), max(error.alone[cost][1] for error in errors))
            for cost in errors[0].alone
        }
        return cls(errors[0].limits, nearest, alone)


class NoChoiceFound(ConfigError):
    """The time limit passed before any choice within the limits was found; there may be one."""


def choose(options: Sequence[Option], limits: Sequence[Limit], *, time_limit: float = TIME_LIMIT) -> Choice:
    """The choice with the lowest summed score within all limits, whatever the order of the options: of options that
    are alike in score and limited costs, the first by name. At the time limit the best one found (see `Choice.gap`).
    """
    problem = _Problem.of(options, limits)
    deadline = time.monotonic() + time_limit
    picks, bound = problem.solve(problem.scores, deadline)
    if picks is None:
        if bound == math.inf:
            raise problem.infeasible()
        picks = problem.greedy()
        if picks is None:
            raise NoChoiceFound(
                f"No choice within the limits was found in {time_limit:g} s. Raise prune.choose_seconds, or relax a "
                "limit."
            )
    return problem.choice(picks, bound)


def choose_uniform(
    options: Sequence[Option],
    limits: Sequence[Limit],
    layers: Mapping[str, tuple[str, ...]],
    *,
    skip: str = "skip",
    time_limit: float = TIME_LIMIT,
) -> Choice:
    """As `choose`, but every kept layer has the same options, and whole layers are dropped (all of their groups take
    the option `skip`).

    `layers`: the groups of each layer, in the same order in all layers.
    """
    by_key = {(option.group, option.name): option for option in options}
    layer_groups = list(layers.values())
    if len({len(groups) for groups in layer_groups}) != 1:
        raise ConfigError("prune.shape: uniform needs the same sub-blocks in all layers. Use shape: free.")
    columns = list(zip(*layer_groups, strict=True))
    shared = [
        sorted(set.intersection(*({o.name for o in options if o.group == group} for group in column)) - {skip})
        for column in columns
    ]
    deadline = time.monotonic() + time_limit
    best: Choice | None = None
    bound = math.inf
    infeasible: list[TargetInfeasible] = []
    no_choice: NoChoiceFound | None = None
    for names in product(*shared):
        merged = [
            _merged(layer, kind, [by_key[group, name] for group, name in zip(groups, each, strict=True)])
            for layer, groups in layers.items()
            for kind, each in (("keep", names), ("drop", (skip,) * len(groups)))
            if all((group, name) in by_key for group, name in zip(groups, each, strict=True))
        ]
        try:
            found = choose(merged, limits, time_limit=max(deadline - time.monotonic(), 0.01))
        except TargetInfeasible as error:
            infeasible.append(error)
            continue
        except NoChoiceFound as error:
            bound, no_choice = -math.inf, error
            continue
        bound = min(bound, found.bound)
        if best is None or found.score < best.score:
            picked = {
                group: name if found.names[layer] == "keep" else skip
                for layer, groups in layers.items()
                for group, name in zip(groups, names, strict=True)
            }
            best = Choice(picked, found.score, found.costs, found.gap)
    if best is not None:
        return replace(best, gap=_gap(best.score, bound))
    if no_choice is not None:
        raise no_choice
    if not infeasible:
        raise ConfigError("prune.shape: uniform needs a variant that all layers have. Use shape: free.")
    raise TargetInfeasible.of_any(infeasible)


def _merged(layer: str, name: str, parts: Sequence[Option]) -> Option:
    costs = {cost: math.fsum(part.costs[cost] for part in parts) for cost in parts[0].costs}
    return Option(layer, name, math.fsum(part.score for part in parts), costs)


@dataclass(frozen=True)
class _Problem:
    groups: list[list[Option]]  # sorted by name
    limits: Sequence[Limit]

    @classmethod
    def of(cls, options: Sequence[Option], limits: Sequence[Limit]) -> "_Problem":
        limited = [limit.cost for limit in limits]
        groups: dict[str, dict[tuple[float, ...], Option]] = {}
        for option in sorted(options, key=lambda each: (each.group, each.name)):
            numbers = (option.score, *(option.costs[cost] for cost in limited))
            if not all(map(math.isfinite, numbers)):
                raise ConfigError(
                    f"{option.group}, variant {option.name}: the score or a cost is not finite. Remove the variant, or "
                    "train it again."
                )
            groups.setdefault(option.group, {}).setdefault(numbers, option)  # the first of options that are alike
        if not groups:
            raise ConfigError("prune: there are no variants to choose from.")
        return cls([list(group.values()) for group in groups.values()], limits)

    @property
    def scores(self) -> list[float]:
        return [option.score for group in self.groups for option in group]

    def cost(self, name: str) -> list[float]:
        return [float(option.costs[name]) for group in self.groups for option in group]

    def options(self, picks: Sequence[int]) -> list[Option]:
        flat = [option for group in self.groups for option in group]
        return [flat[pick] for pick in picks]

    def total(self, picks: Sequence[int], name: str) -> float:
        return math.fsum(float(option.costs[name]) for option in self.options(picks))

    def allows(self, picks: Sequence[int], limits: Sequence[Limit]) -> bool:
        return all(limit.allows(self.total(picks, limit.cost)) for limit in limits)

    def choice(self, picks: Sequence[int], bound: float) -> Choice:
        chosen = self.options(picks)
        score = math.fsum(option.score for option in chosen)
        costs = {cost: math.fsum(option.costs[cost] for option in chosen) for cost in chosen[0].costs}
        return Choice({option.group: option.name for option in chosen}, score, costs, _gap(score, bound))

    def solve(
        self, objective: Sequence[float], deadline: float, limits: Sequence[Limit] | None = None
    ) -> tuple[list[int] | None, float]:
        """The picks with the smallest objective, or None, and a proven lower bound of it (inf: infeasible)."""
        limits = self.limits if limits is None else limits
        excluded: list[list[int]] = []
        bound = -math.inf
        for _ in range(MAX_EXCLUDED):
            left = deadline - time.monotonic()
            if left <= 0:
                return None, bound
            picks, found = self._milp(objective, limits, excluded, left)
            bound = max(bound, found)
            if picks is None or self.allows(picks, limits):
                return picks, bound
            excluded.append(picks)
        return None, bound

    def _milp(
        self, objective: Sequence[float], limits: Sequence[Limit], excluded: list[list[int]], seconds: float
    ) -> tuple[list[int] | None, float]:
        milp, LinearConstraint, Bounds, sparse = solver()
        target = _row(self.groups, objective)
        rows, low, high = [], [], []
        for index, group in enumerate(self.groups):
            row = np.zeros(len(target.values))
            first = sum(map(len, self.groups[:index]))
            row[first : first + len(group)] = 1
            rows.append(row)
            low.append(1.0)
            high.append(1.0)
        for limit in limits:
            scaled = _row(self.groups, self.cost(limit.cost))
            rows.append(scaled.values)
            low.append(scaled.to(limit.minimum))
            high.append(scaled.to(limit.maximum))
        for picks in excluded:
            row = np.zeros(len(target.values))
            row[picks] = 1
            rows.append(row)
            low.append(0.0)
            high.append(len(self.groups) - 1.0)
        answer = milp(
            target.values,
            integrality=np.ones(len(target.values)),
            bounds=Bounds(0, 1),
            constraints=LinearConstraint(sparse.csr_array(np.array(rows)), np.array(low), np.array(high)),
            options={"time_limit": seconds, "mip_rel_gap": 0.0},
        )
        if answer.status == 2:  # infeasible
            return None, math.inf
        known = answer.mip_dual_bound
        bound = -math.inf if known is None or not math.isfinite(known) else target.back(known)
        if answer.x is None:
            return None, bound
        first, picks = 0, []
        for group in self.groups:
            picks.append(first + int(np.argmax(answer.x[first : first + len(group)])))
            first += len(group)
        if answer.status == 0:
            # Proven: the bound differs from the answer by rounding and the solver's tolerance only.
            bound = math.fsum(objective[pick] for pick in picks)
        return picks, bound

    def greedy(self) -> list[int] | None:
        """Picks within the limits, without the solver: first the smallest excess over all limits, one change at a time,
        then better scores as long as a single change allows.
        """
        starts = np.cumsum([0, *map(len, self.groups)])
        scores = np.array(self.scores)
        costs = np.array([self.cost(limit.cost) for limit in self.limits]).reshape(len(self.limits), -1)
        scale = np.array([max(np.ptp(row), 1e-300) for row in costs])
        low = np.array([limit.minimum for limit in self.limits])
        high = np.array([limit.maximum for limit in self.limits])

        def excess(total: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            outside = np.maximum(total - high[:, None], 0) + np.maximum(low[:, None] - total, 0)
            return np.asarray((outside / scale[:, None]).sum(0))

        picks = [int(first + np.argmin(scores[first:last])) for first, last in pairwise(starts)]
        while True:
            total = costs[:, picks].sum(1)
            current = excess(total[:, None])[0]
            group_of = np.repeat(np.arange(len(self.groups)), np.diff(starts))
            changed = total[:, None] - costs[:, np.array(picks)[group_of]] + costs
            after = excess(changed)
            loss = scores - scores[np.array(picks)[group_of]]
            if current > 0:
                gain = current - after
                allowed = gain > 1e-12
                if not allowed.any():
                    return None
                best = int(np.argmin(np.where(allowed, (loss - loss.min() + 1e-12) / np.maximum(gain, 1e-12), np.inf)))
            else:
                allowed = (after <= 0) & (loss < 0)
                best = int(np.argmin(np.where(allowed, loss, np.inf)))
                if not allowed.any():
                    return picks if self.allows(picks, self.limits) else None
            picks[group_of[best]] = best

    def infeasible(self) -> TargetInfeasible:
        deadline = time.monotonic() + TIME_LIMIT
        nearest, alone = {}, {}
        for limit in self.limits:
            others = [each for each in self.limits if each is not limit]
            costs = self.cost(limit.cost)
            alone[limit.cost] = (_extreme(self.groups, costs, min), _extreme(self.groups, costs, max))
            needed = limit
            if math.isfinite(limit.maximum):
                picks, _ = self.solve(costs, deadline, [*others, Limit(limit.cost, minimum=limit.minimum)])
                needed = limit if picks is None else Limit(limit.cost, self.total(picks, limit.cost), limit.minimum)
            if needed is limit and math.isfinite(limit.minimum):
                picks, _ = self.solve([-cost for cost in costs], deadline, [*others, Limit(limit.cost, limit.maximum)])
                needed = limit if picks is None else Limit(limit.cost, limit.maximum, self.total(picks, limit.cost))
            if needed is not limit:
                side = needed.maximum if needed.maximum != limit.maximum else needed.minimum
                nearest[limit.cost] = side
        return TargetInfeasible(self.limits, nearest, alone)


def _extreme(groups: Sequence[Sequence[Option]], values: Sequence[float], pick: Any) -> float:
    first, sums = 0, []
    for group in groups:
        sums.append(pick(values[first : first + len(group)]))
        first += len(group)
    return math.fsum(sums)


@dataclass(frozen=True)
class _Row:
    """A sum over one option per group, with every group's minimum subtracted, scaled so that the largest is _SCALE."""

    values: "np.ndarray[Any, Any]"
    offset: float
    scale: float

    def to(self, bound: float) -> float:
        return (bound - self.offset) * self.scale if math.isfinite(bound) else bound

    def back(self, value: float) -> float:
        return value / self.scale + self.offset


def _row(groups: Sequence[Sequence[Option]], values: Sequence[float]) -> _Row:
    shifted = np.array(values, dtype=np.float64)
    first, offsets, ranges = 0, [], []
    for group in groups:
        part = shifted[first : first + len(group)]
        offsets.append(part.min())
        ranges.append(np.ptp(part))
        part -= part.min()
        first += len(group)
    scale = _SCALE / (math.fsum(ranges) or 1.0)
    return _Row(shifted * scale, math.fsum(offsets), scale)


def _enough(value: float, *, is_maximum: bool) -> str:
    """A limit that allows the value also after it was rounded."""
    if value.is_integer():
        return f"{value:.0f}"
    return f"{value + (1 if is_maximum else -1) * 1e-6 * abs(value):.7g}"


def _text(limit: Limit) -> str:
    parts = []
    if math.isfinite(limit.minimum):
        parts.append(f"≥ {limit.minimum:g}")
    if math.isfinite(limit.maximum):
        parts.append(f"≤ {limit.maximum:g}")
    return f"{limit.cost} {' and '.join(parts)}"


def solver() -> tuple[Any, Any, Any, Any]:
    try:
        from scipy import sparse
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise ConfigError(
            "prune.target: choosing variants needs scipy. Install it: pip install 'outsize[prune]'."
        ) from error
    return milp, LinearConstraint, Bounds, sparse
