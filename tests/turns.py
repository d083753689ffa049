"""Combinations of parameters by turns: some run in `make test`, the others in `make test-all`."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def by_turns(*axes: Iterable[Any], every: int = 2) -> list[Any]:
    """All combinations, as parameters. One in `every` runs in `make test`: each value of each axis does, if the axes
    are not shorter than `every`.
    """
    found = []
    for places in itertools.product(*(list(enumerate(axis)) for axis in axes)):
        later = sum(place for place, _ in places) % every
        found.append(pytest.param(*(value for _, value in places), marks=[pytest.mark.full] if later else []))
    return found


def in_turn(cases: Iterable[Any], every: int = 2) -> list[Any]:
    """The same for cases with several values each: tuples, or parameters with an id."""
    found = []
    for place, case in enumerate(cases):
        values = case.values if hasattr(case, "marks") else case if isinstance(case, tuple) else (case,)
        marks = [*getattr(case, "marks", ()), *([pytest.mark.full] if place % every else [])]
        found.append(pytest.param(*values, marks=marks, id=getattr(case, "id", None)))
    return found
