"""Events that follow records that are missing: after a power cut the log may lack some that later ones build on.

Then nothing becomes done by silence. What lies between the last message that is known to be given and the first one of a pop
may have been given by a pop that is missing: it is open, and waits. So does what was open and is not in a later whole state:
the event that finished it is missing, an ack that is given again, or a dead letter whose copy is missing with it. Only messages
whose deaths are in the log stay dead.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

from metaq.leases.events import Dead, LeaseEvent, More, Passed, Popped, Row, Whole
from metaq.leases.state import Bunch, PartitionLeases
from metaq.message import GroupPartition

MOST_UNKNOWN: Final = 100_000
"""Messages before one pop that may have been given by others."""


class AfterGap:
    """The events of all places after a gap."""

    def __init__(self, now_ms: int) -> None:
        """Begin; ``now_ms`` names the deliveries of which nothing is known (Unix time)."""
        self._now_ms = now_ms
        self._dead: dict[GroupPartition, set[int]] = defaultdict(set)

    def events(self, place: GroupPartition, state: PartitionLeases, event: LeaseEvent) -> list[LeaseEvent]:
        """Return the events to apply in the place of one."""
        match event:
            case Popped(_, _, first, count, _):
                again: list[LeaseEvent] = []
                if first < state.next:  # a reset is missing
                    again = [Dead(ordinal) for ordinal in state.ordinals() if first <= ordinal < first + count]
                return [*again, event, *self._open(place, _between(state.next, first))]
            case Passed(following):
                return [event, *self._open(place, _between(state.next, following))]
            case Whole(_, following, rows):
                known = _ordinals(rows)
                unknown = [*state.ordinals(), *_between(state.next, following)]
                return [event, *self._open(place, (ordinal for ordinal in unknown if ordinal not in known))]
            case More(rows):
                known = _ordinals(rows)
                return [*(Dead(ordinal) for ordinal in state.ordinals() if ordinal in known), event]
            case Dead(ordinal):
                self._dead[place].add(ordinal)
                if ordinal >= state.next:
                    return [Passed(ordinal + 1), *self._open(place, _between(state.next, ordinal))]
        return [event]

    def _open(self, place: GroupPartition, ordinals: Iterable[int]) -> list[LeaseEvent]:
        dead, now_ms = self._dead[place], self._now_ms
        return [Popped(now_ms, now_ms, ordinal, 1, 1) for ordinal in ordinals if ordinal not in dead]


def _between(following: int, first: int) -> range:
    return range(max(following, first - MOST_UNKNOWN), first)


def _ordinals(rows: Iterable[Row]) -> set[int]:
    return {ordinal for row in rows for ordinal in Bunch(row.first, row.bits, 0, 0, 0, 0).ordinals()}
