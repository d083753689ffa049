"""Loops with equal iterations, for code that also runs on fake tensors: there, only the first, the second and the last
iteration run, and an observer (device/observer.py) counts the second for those between.

Only the first iteration may leave memory behind, so the peak of a loop is that of one of these.
"""

from collections.abc import Iterator
from contextvars import ContextVar

_times: ContextVar[int] = ContextVar("times", default=1)


def iterations(count: int, *, is_fake: bool) -> Iterator[int]:
    """The numbers of the iterations to run. The last one may be smaller than the others."""
    if not is_fake or count <= 3:
        yield from range(count)
        return
    yield 0
    before = _times.get()
    _times.set(before * (count - 2))
    try:
        yield 1
    finally:
        _times.set(before)
    yield count - 1


def times() -> int:
    """How many iterations an operator that runs now stands for."""
    return _times.get()
