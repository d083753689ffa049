"""Trainable weights that several visits use, and what follows for a trial run that skips visits.

The gradient of such a weight lives from the backward of its last user to that of its first, and the users between them hold both the sum so far and
their own part. So a visit that stands for others must have the same place among the users of its weights, and wherever one user of a weight
runs, its first and its last user run too: without them a sum is neither begun nor kept.
"""

from collections.abc import Iterable, Mapping, Sequence


class SharedWeights:
    def __init__(self, users: Iterable[Sequence[int]]):
        """`users`: per trainable weight, the visits whose backward gives it a gradient, in forward order."""
        self._users = [tuple(visits) for visits in users if len(visits) > 1]
        self._of: dict[int, list[tuple[int, ...]]] = {}
        for visits in self._users:
            for visit in visits:
                self._of.setdefault(visit, []).append(visits)

    def place(self, visit: int) -> tuple[tuple[bool, bool], ...]:
        """Per weight that it shares: whether an earlier visit uses it too, and whether a later one does."""
        return tuple((visits[0] < visit, visits[-1] > visit) for visits in self._of.get(visit, ()))

    def complete(self, visits: Iterable[int]) -> set[int]:
        """These visits and all that must run with them."""
        found: set[int] = set()
        to_do = list(visits)
        while to_do:
            visit = to_do.pop()
            if visit not in found:
                found.add(visit)
                to_do += [end for users in self._of.get(visit, ()) for end in (users[0], users[-1])]
        return found


def visits_to_run(keys: Mapping[int, object], always: Iterable[int], weights: SharedWeights) -> set[int]:
    """The first two visits of every kind, those that run in any case, and what must run with them. `keys`: the kind of every visit of a layer."""
    counts: dict[object, int] = {}
    first: list[int] = []
    for visit, key in sorted(keys.items()):
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= 2:
            first.append(visit)
    return weights.complete([*first, *always])
