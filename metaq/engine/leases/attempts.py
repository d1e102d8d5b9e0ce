"""Attempts of ordered pops: a pop that is made once more, because its answer was lost, gets the same messages again.

A consumer names its attempt. As long as a partition is leased to it, and to nobody else, another pop of that name gets what is
not finished of it, as a delivery of its own that does not count: only the new receipts mean something. Attempts are in memory
only; after a restart the partition is given again when the lease ends.
"""

from collections.abc import Sequence
from typing import NamedTuple

from metaq.engine.leases.leases import Leases
from metaq.message import GroupPartition


class _Attempt(NamedTuple):
    """The messages of one partition that one pop gave."""

    name: str
    pop_ms: int
    ordinals: Sequence[int]


class Attempts:
    """The last attempt in each partition that groups read in order."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._last: dict[GroupPartition, _Attempt] = {}

    def note(self, place: GroupPartition, name: str | None, pop_ms: int, ordinals: Sequence[int]) -> None:
        """Remember what an attempt was given in the place of the one before; ``None``: it has no name."""
        if name is None:
            self._last.pop(place, None)
        else:
            self._last[place] = _Attempt(name, pop_ms, ordinals)

    def held(self, place: GroupPartition, name: str | None) -> list[int]:
        """Return what is still leased to the attempt of this name; nothing while others hold, or delay, a message there."""
        attempt, state = self._last.get(place), self._leases.settled(place)
        if attempt is None or attempt.name != name or state is None:
            return []
        held = [ordinal for ordinal in attempt.ordinals if state.is_out(ordinal, attempt.pop_ms)]
        return held if len(held) == state.leased else []

    def forget(self, *, topic: str | None, group: str | None) -> None:
        """Drop what is kept about a topic, or a group, that is deleted."""
        for place in [place for place in self._last if group == place.group or topic == place.topic]:
            del self._last[place]
