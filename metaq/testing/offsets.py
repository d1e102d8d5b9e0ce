"""The offsets of groups in memory. They only move forward, except by a reset."""

from collections.abc import Callable
from typing import Final

from metaq.message import GroupPartition

RESET_STANDS_MS: Final = 60_000
"""How long a reset overrides commits of members that have not received it yet."""
_NONE: Final = -1


class InMemoryOffsets:
    """The queue offset that each group wants next in each partition. Not thread-safe."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._offsets: dict[GroupPartition, int] = {}
        self._resets: dict[GroupPartition, int] = {}
        """Until when each reset stands, while no member has asked for its offset or committed it."""

    def get(self, place: GroupPartition) -> int | None:
        """Return the offset of a group in a partition; ``None`` when it has none."""
        return self._offsets.get(place)

    def of(self, group: str, topic: str) -> dict[int, int]:
        """Return the offsets of a group in a topic, by partition."""
        return {place.partition: offset for place, offset in self._offsets.items() if place[:2] == (group, topic)}

    def taken_up(self, place: GroupPartition) -> None:
        """Note that a member has asked for its offset, and goes on from there."""
        self._resets.pop(place, None)

    def commit(self, place: GroupPartition, offset: int) -> None:
        """Take a member's commit; one of a lower offset, and one of before a reset, is ignored."""
        known = self._offsets.get(place, _NONE)
        if offset == known:
            self.taken_up(place)
        elif offset > known and self._resets.get(place, 0) <= self._now_ms():
            self.lead(place, offset)

    def lead(self, place: GroupPartition, offset: int) -> None:
        """Take the offset that follows from the leases of a group, unless it is lower."""
        self.taken_up(place)
        self._offsets[place] = max(offset, self._offsets.get(place, _NONE))

    def reset(self, place: GroupPartition, offset: int) -> None:
        """Set an offset to any value. Other commits are ignored until a member has taken it up."""
        self._offsets[place] = offset
        self._resets[place] = self._now_ms() + RESET_STANDS_MS

    def forget(self, topic: str) -> None:
        """Forget the offsets in a topic, because it was deleted."""
        for place in [place for place in self._offsets if place.topic == topic]:
            del self._offsets[place]
            self.taken_up(place)
