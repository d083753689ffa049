"""Hazards: which actions an action waits for, derived from the buffers that actions read and write.

Lanes run concurrently, each in the order of issue. An action runs after the last writer of each buffer it reads, and
after the last writer and all later readers of each buffer it writes. Vector clocks remove the waits that follow from
the lane's own order or from other waits, so the remaining set is minimal. No wait is placed by hand. Planner and
runtime each pass their actions through a `Hazards` object.
"""

from collections.abc import Iterable, Sequence

from outsize.hardware.lanes import LANES, Lane
from outsize.schedule.buffers import Buffer

Token = tuple[Lane, int]
"""The n-th action of a lane."""
_Clock = dict[Lane, int]


class Hazards:
    def __init__(self) -> None:
        self._known: dict[Lane, _Clock] = {lane: dict.fromkeys(LANES, 0) for lane in LANES}
        """By lane: how many actions of each lane are known to complete before its next action."""
        self._writer: dict[Buffer, tuple[Token, _Clock]] = {}
        self._readers: dict[Buffer, dict[Lane, tuple[Token, _Clock]]] = {}

    def before(self, lane: Lane, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> Sequence[Token]:
        """The actions that the next action on `lane` waits for."""
        known = self._known[lane]
        needed: dict[Lane, tuple[Token, _Clock]] = {}

        def need(entry: tuple[Token, _Clock]) -> None:
            (other, count), _ = entry
            if other != lane and count > known[other] and (other not in needed or count > needed[other][0][1]):
                needed[other] = entry

        for buffer in reads:
            if buffer in self._writer:
                need(self._writer[buffer])
        for buffer in writes:
            if buffer in self._writer:
                need(self._writer[buffer])
            for entry in self._readers.get(buffer, {}).values():
                need(entry)
        waits = [
            (token, clock)
            for token, clock in needed.values()
            if not any(other is not clock and other[token[0]] >= token[1] for _, other in needed.values())
        ]
        for _, clock in waits:
            for other, count in clock.items():
                known[other] = max(known[other], count)
        return [token for token, _ in waits]

    def after(self, lane: Lane, reads: Iterable[Buffer], writes: Iterable[Buffer]) -> Token:
        """Record the action; returns the token that others wait for."""
        known = self._known[lane]
        known[lane] += 1
        entry = ((lane, known[lane]), dict(known))
        for buffer in reads:
            self._readers.setdefault(buffer, {})[lane] = entry
        for buffer in writes:
            self._writer[buffer] = entry
            self._readers.pop(buffer, None)
        return entry[0]

    def wanted(self) -> set[Token]:
        """The actions that a later one may still have to wait for."""
        latest = [token for token, _ in self._writer.values()]
        return {*latest, *(token for readers in self._readers.values() for token, _ in readers.values())}
