"""PURE: the order in which a pop looks at the partitions of a topic with priorities."""

from collections.abc import Iterable
from typing import Final, NamedTuple

ALL: Final = 100
"""Pops of which ``priority_factor`` says how many go by priority."""


class ReadyPartition(NamedTuple):
    """A partition with messages that a pop may take."""

    partition: int
    waiting_ms: int
    """How long the oldest of them has been ready."""


def pop_order(ready: Iterable[ReadyPartition], *, levels: int, factor: int, pops: int, max_wait_ms: int) -> list[int]:
    """Return the partitions in the order in which a pop takes from them: from the highest down, but for two brakes.

    Partitions whose oldest message has waited for more than ``max_wait_ms`` come first (0: none does), the longest wait first.
    Of 100 pops, ``factor`` then go by priority; each of the others begins at the next of the ``levels`` partitions in turn.
    ``pops`` is the number of this group's pops from the topic before this one: it decides, not chance.
    """
    known = list(ready)
    aged = [one for one in known if max_wait_ms and one.waiting_ms > max_wait_ms]
    aged.sort(key=lambda one: (-one.waiting_ms, -one.partition))
    first = [one.partition for one in aged]
    others = sorted({one.partition for one in known}.difference(first), reverse=True)
    by_priority = pops * factor // ALL
    if (pops + 1) * factor // ALL == by_priority:
        turn = (pops - by_priority) % levels
        others.sort(key=lambda partition: partition != turn)
    return first + others
