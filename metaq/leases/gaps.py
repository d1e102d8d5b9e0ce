"""Events that follow records that are missing: after a power cut the log may lack some that later ones build on.

Then nothing becomes done by silence. What lies between the last message that is known to be given and the first one of a pop
may have been given by a pop that is missing: it is open, and waits. So does what was open and is not in a later whole state:
the event that finished it is missing, an ack that is given again, or a dead letter whose copy is missing with it. Only messages
whose deaths are in the log stay dead.
"""

from collections.abc import Iterable
from typing import Final

from metaq.leases.bunch import Bunch
from metaq.leases.events import Dead, LeaseEvent, Lined, More, Passed, Popped, Row, Whole
from metaq.leases.state import PartitionLeases

MOST_UNKNOWN: Final = 100_000
"""Messages before one pop that may have been given by others."""


def events_after_gap(state: PartitionLeases, event: LeaseEvent, now_ms: int) -> list[LeaseEvent]:
    """Return the events to apply to a state in the place of one that follows a gap.

    ``now_ms`` names the deliveries of which nothing is known (Unix time).
    """
    match event:
        case Popped(_, _, first, count, _):
            again: list[LeaseEvent] = []
            if first < state.next:  # a reset is missing
                again = [Dead(ordinal) for ordinal in state.ordinals() if first <= ordinal < first + count]
            return [*again, event, *_given(_between(state.next, first), now_ms)]
        case Passed(following):
            return [event, *_given(_between(state.next, following), now_ms)]
        case Lined(ordinals):
            following, lined = ordinals[-1] + 1, set(ordinals)
            before = [ordinal for ordinal in _between(state.next, following) if ordinal not in lined]
            opened = [ordinal for ordinal in ordinals if state.find(ordinal) is not None]  # as if a missing pop had given them
            return [*map(Dead, opened), Passed(following), *_given(before, now_ms), event]
        case Dead(ordinal) if ordinal >= state.next:
            return [Passed(ordinal + 1), *_given(_between(state.next, ordinal), now_ms)]
        case Whole(_, following, rows):
            known, unknown = _ordinals(rows), [*state.ordinals(), *_between(state.next, following)]
            return [event, *_given((ordinal for ordinal in unknown if ordinal not in known), now_ms)]
        case More(rows):
            known = _ordinals(rows)
            return [*(Dead(ordinal) for ordinal in state.ordinals() if ordinal in known), event]
    return [event]


def _given(ordinals: Iterable[int], now_ms: int) -> list[LeaseEvent]:
    return [Popped(now_ms, now_ms, ordinal, 1, 1) for ordinal in ordinals]


def _between(following: int, first: int) -> range:
    return range(max(following, first - MOST_UNKNOWN), first)


def _ordinals(rows: Iterable[Row]) -> set[int]:
    return {ordinal for row in rows for ordinal in Bunch(row.first, row.bits, 0, 0, 0, 0).ordinals()}
