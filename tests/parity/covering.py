"""Pairwise covering arrays: few cells in which every legal pair of values of any two factors occurs at least once.

Greedy: each new row starts with a pair that is still missing and takes, factor by factor, the value that covers most missing pairs; the best of some
tries is kept. Fixed by its seed, so the same cells run everywhere.
"""

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]
Pair = frozenset[tuple[str, Any]]
TRIES = 60


def pairs_of(row: Mapping[str, Any]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def legal_pairs(factors: Mapping[str, tuple[Any, ...]], legal: Callable[[Row], bool]) -> set[Pair]:
    """Rules are about two factors at most, so a pair is legal if a row of these two alone is."""
    found = set()
    for (one, values), (other, others) in itertools.combinations(factors.items(), 2):
        found |= {frozenset(((one, a), (other, b))) for a in values for b in others if legal({one: a, other: b})}
    return found


def covering(factors: Mapping[str, tuple[Any, ...]], legal: Callable[[Row], bool], *, seed: int) -> list[Row]:
    """`legal` is asked about rows that are not complete yet."""
    rng = random.Random(seed)
    missing = legal_pairs(factors, legal)
    rows: list[Row] = []
    while missing:
        tries = [_row(factors, legal, missing, rng) for _ in range(TRIES)]
        best = max(tries, key=lambda row: len(pairs_of(row) & missing))
        missing -= pairs_of(best)
        rows.append({name: best[name] for name in factors})
    return rows


def _row(factors: Mapping[str, tuple[Any, ...]], legal: Callable[[Row], bool], missing: set[Pair], rng: random.Random) -> Row:
    row: Row = dict(rng.choice(sorted(missing, key=lambda pair: sorted(map(str, pair)))))
    rest = [name for name in factors if name not in row]
    rng.shuffle(rest)
    for name in rest:
        values = [value for value in factors[name] if legal({**row, name: value})]
        gain = {value: sum(frozenset(((name, value), item)) in missing for item in row.items()) for value in values}
        most = max(gain.values())
        row[name] = rng.choice([value for value in values if gain[value] == most])
    return row
