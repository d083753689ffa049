"""Timeline: what each lane did and when, while recording is on."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outsize.hardware.lanes import LANES, Lane


@dataclass(frozen=True, slots=True)
class Span:
    """One action on its lane. Waiting is not part of it."""

    lane: Lane
    name: str
    """The action as in the schedule: `F12`, `L3`."""
    start: float
    """Seconds since the timeline began. If that did not wait for the lanes, only spans of one lane are comparable."""
    end: float


@dataclass(slots=True)
class Timeline:
    spans: list[Span] = field(default_factory=list)
    """Complete once `collect` returns True."""
    is_open: bool = True
    """Whether actions are recorded now."""
    _to_come: deque[Callable[[], Span | None]] = field(default_factory=deque)

    def add_later(self, read: Callable[[], Span | None]) -> None:
        """Add a span whose times are not known yet. `read` returns it, or None until then; it never waits."""
        self._to_come.append(read)

    def collect(self) -> bool:
        """Add the spans whose times are known by now; returns whether these are all. Never waits."""
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
