"""Timeline: what each lane really did and when, for a few steps that somebody looks at. Nothing is recorded at other
times.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outsize.hardware.lanes import LANES, Lane


@dataclass(frozen=True, slots=True)
class Span:
    """One action on its lane. Waiting is not part of it."""

    lane: Lane
    name: str
    """The action as the schedule writes it: `F12`, `L3`."""
    start: float
    """Seconds since the timeline began. Of one that began without waiting: only spans of the same lane can be told
    apart by it.
    """
    end: float


@dataclass(slots=True)
class Timeline:
    spans: list[Span] = field(default_factory=list)
    """Complete once `Timeline.collect` says so."""
    is_open: bool = True
    """Whether what the lanes are given now is recorded here."""
    _to_come: deque[Callable[[], Span | None]] = field(default_factory=deque)

    def add_later(self, read: Callable[[], Span | None]) -> None:
        """A span whose times the device still has: `read` gives it, or None until they are there, and does not wait."""
        self._to_come.append(read)

    def collect(self) -> bool:
        """Take in the spans whose times are there by now; whether these are all. Never waits."""
        while self._to_come and (span := self._to_come[0]()) is not None:
            self.spans.append(span)
            self._to_come.popleft()
        return not self._to_come

    def busy_seconds(self) -> dict[str, float]:
        return {lane: sum(span.end - span.start for span in self.spans if span.lane == lane) for lane in LANES}

    @property
    def seconds(self) -> float:
        """From the first action's start to the last one's end."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)
