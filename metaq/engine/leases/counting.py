"""Counts of what happened to leases since the broker started."""

from typing import Final

from metaq.leases.events import Acked, Changed, Dead, LeaseEvent, Popped, Repeated
from metaq.leases.state import PartitionLeases
from metaq.message import GroupPartition

MOST_PAIRS: Final = 20_000
"""Pairs of group and topic that are counted one by one; those beyond are only counted in all."""


class PairCounts:
    """Counts of messages, of one group in one topic or of all."""

    __slots__ = ("again", "dead", "given")

    def __init__(self) -> None:
        self.given = 0
        """Given for the first time."""
        self.again = 0
        """Given again."""
        self.dead = 0
        """Given up: as dead letters, or because they were lost or may be dropped."""


class LeaseCounts:
    """The counts of one broker."""

    def __init__(self) -> None:
        self.all = PairCounts()
        self.pairs: dict[tuple[str, str], PairCounts] = {}
        """By group and topic."""
        self.acked = 0
        self.given_back = 0
        self.extended = 0
        self.meaningless = 0
        """Receipts and ids that meant nothing (any more)."""

    def take(self, place: GroupPartition, event: LeaseEvent, state: PartitionLeases, closed: int) -> None:
        """Count an event that was applied to a state; ``closed`` messages are not open any more since."""
        if isinstance(event, Acked):
            self.acked += closed
        elif isinstance(event, Popped):
            self._give(place, event.bits.bit_count(), 0)
        elif isinstance(event, Repeated):
            first = 0 if event.same_attempt else state.given_once(event.ordinals)  # they were lined
            self._give(place, first, len(event.ordinals) - first)
        elif isinstance(event, Changed):
            self.given_back += event.given_back
            self.extended += not event.given_back
        elif isinstance(event, Dead):
            self.all.dead += closed
            self._pair(place).dead += closed

    def _give(self, place: GroupPartition, given: int, again: int) -> None:
        for counts in (self.all, self._pair(place)):
            counts.given += given
            counts.again += again

    def _pair(self, place: GroupPartition) -> PairCounts:
        key = place.group, place.topic
        known = self.pairs.get(key)
        if known is None:
            known = PairCounts()
            if len(self.pairs) < MOST_PAIRS:
                self.pairs[key] = known
        return known

    def of(self, group: str, topic: str) -> PairCounts:
        """Return the counts of a group in a topic."""
        return self.pairs.get((group, topic)) or PairCounts()

    def forget(self, group: str, topic: str) -> None:
        """Drop the counts of a group in a topic, because its leases are gone; those of all stay."""
        self.pairs.pop((group, topic), None)
