"""Timeline: what each lane really did and when, for a few steps that somebody looks at. Nothing is recorded at other times."""

from dataclasses import dataclass, field

from outsize.hardware.lanes import LANES, Lane


@dataclass(frozen=True, slots=True)
class Span:
    """One action on its lane. Waiting is not part of it."""

    lane: Lane
    name: str
    """The action as the schedule writes it: `F12`, `L3`."""
    start: float
    """Seconds since the timeline began."""
    end: float


@dataclass(slots=True)
class Timeline:
    spans: list[Span] = field(default_factory=list)
    """Complete once the timeline has ended."""

    def busy_seconds(self) -> dict[str, float]:
        return {lane: sum(span.end - span.start for span in self.spans if span.lane == lane) for lane in LANES}

    @property
    def seconds(self) -> float:
        """From the first action's start to the last one's end."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)
