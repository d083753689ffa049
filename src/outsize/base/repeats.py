"""Loops with equal iterations, for code that also runs on fake tensors: there, only the first and the last iteration
run, and an observer (device/observer.py) counts the first for all others.

An iteration leaves no memory behind, so the peak of a loop is that of one iteration.
"""

from collections.abc import Iterator
from contextvars import ContextVar

_times: ContextVar[int] = ContextVar("times", default=1)


def iterations(count: int, *, is_fake: bool) -> Iterator[int]:
    """The numbers of the iterations to run. The last one may be smaller than the others."""
    if not is_fake or count <= 2:
        yield from range(count)
        return
    before = _times.get()
    _times.set(before * (count - 1))
    try:
        yield 0
    finally:
        _times.set(before)
    yield count - 1


def times() -> int:
    """How many iterations an operator that runs now stands for."""
    return _times.get()
