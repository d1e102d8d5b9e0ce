"""Figures of leases, for operators. Only a master has them: slaves learn what is leased when they take over.

Each figure of a partition is at hand, however many messages are open there; so is each of the broker, except those that add up
all partitions.
"""

from collections.abc import Callable, Iterator, Mapping
from heapq import merge, nsmallest
from itertools import islice
from typing import Final, NamedTuple

from metaq.engine.context import Context
from metaq.engine.leases.leases import Leases
from metaq.engine.leases.waiting import WaitingLines
from metaq.leases.figures import PlaceFigures
from metaq.leases.state import PartitionLeases
from metaq.message import GroupPartition, TopicPartition

MOST_PLACES: Final = 20_000
"""Partitions of groups that are added up in one step, about 20 ms of work."""
SLICE: Final = 2_000
"""Open messages that are looked at in one step."""


class OpenMessage(NamedTuple):
    """A message that is open: it was given and is not finished, or is passed over because of its key."""

    ordinal: int
    times: int
    """Its deliveries so far."""
    first_ms: int
    """When it was given for the first time (Unix time); 0: never."""
    due_ms: int
    """When its lease or its delay ends, or ended; 0 for a message that was never given."""
    state: str
    """``leased``, ``delayed``, ``lined`` or ``waiting``; ``dying`` while it is on its way to the dead letters."""


class LeaseFigures:
    """Reads the figures of one broker's leases."""

    def __init__(self, context: Context, leases: Leases, lines: WaitingLines) -> None:
        self._context = context
        self.leases = leases
        self._lines = lines

    # -- partitions ---------------------------------------------------------------------------------------------------

    def of(self, place: GroupPartition) -> PlaceFigures | None:
        """Return the figures of a partition; ``None`` when nothing is open there and nothing was leased for a while."""
        state = self.leases.settled(place) if self._context.replicas.is_master else None
        return None if state is None else self._figures(place, state)

    def _figures(self, place: GroupPartition, state: PartitionLeases) -> PlaceFigures:
        queue = self._context.store.queues.get(TopicPartition(place.topic, place.partition))
        end, least = (0, 0) if queue is None else (queue.readable, queue.first)
        base = state.base
        bunch = state.find(base) if state.open else None
        following = max(state.next, least)
        ready = [*state.first_waiting(1), *([following] if following < end else [])]
        return PlaceFigures(
            base=base,
            next=state.next,
            end=end,
            fresh=max(0, end - following),
            in_flight=state.leased - state.delayed,
            waiting=state.waiting,
            delayed=state.delayed,
            lined=state.lined,
            oldest_ms=bunch.first_ms if bunch is not None and bunch.times else None,
            first_ready=min(ready, default=None),
        )

    def pairs(self) -> list[tuple[str, str]]:
        """Return the groups that lease messages, each with the topic."""
        return self.leases.pairs() if self._context.replicas.is_master else []

    def partitions(self, group: str, topic: str) -> list[GroupPartition]:
        """Return the partitions of a topic in which a group leases messages, in order."""
        if not self._context.replicas.is_master:
            return []
        return [GroupPartition(group, topic, number) for number in sorted(self.leases.of(group, topic))]

    def open_from(self, place: GroupPartition, ordinal: int, most: int, rest: Callable[[], None]) -> list[OpenMessage]:
        """Return the lowest open messages of a partition, from an ordinal on, at most so many; ``rest`` lets others go on."""
        state = self.leases.settled(place)
        if state is None or not self._context.replicas.is_master:
            return []
        singles: list[int] = []
        alone = iter(state.singles())
        while portion := list(islice(alone, SLICE)):
            singles = nsmallest(most, (*singles, *(each for each in portion if each >= ordinal)))
            rest()
        return list(self._open(place, islice(merge(singles, state.wide_from(ordinal, most)), most)))

    def _open(self, place: GroupPartition, ordinals: Iterator[int]) -> Iterator[OpenMessage]:
        """Yield the messages that are still open."""
        state, shift_ms = self.leases.settled(place), self.leases.shift_ms
        for ordinal in ordinals:
            bunch = None if state is None else state.find(ordinal)
            if state is None or bunch is None:
                continue
            if state.is_waiting(ordinal):
                name = "waiting"
            elif state.is_claimed(ordinal):
                name = "dying"
            elif state.is_lined(ordinal):
                name = "lined"
            else:
                name = "delayed" if bunch.given_back else "leased"
            due_ms = bunch.due_ms + shift_ms if bunch.times else 0
            yield OpenMessage(ordinal, bunch.times, bunch.first_ms, due_ms, name)

    # -- groups and the broker ----------------------------------------------------------------------------------------

    def waiting_consumers(self, group: str, topic: str) -> int:
        """Return how many pops and subscriptions of a group wait for messages of a topic."""
        return self._lines.count_of(group, topic)

    def has_consumers(self, group: str, topic: str) -> bool:
        """Return whether consumers of a group wait for messages of a topic, or have some."""
        if self.waiting_consumers(group, topic):
            return True
        states = (self.leases.settled(place) for place in self.partitions(group, topic))
        return any(state is not None and state.leased > state.delayed for state in states)

    @property
    def subscriptions(self) -> int:
        return self._lines.subscriptions

    @property
    def held_pops(self) -> int:
        """Pops that wait for messages. A subscription that is not reading waits, too, and is none."""
        return max(0, self._lines.count - self._lines.subscriptions)

    def numbers(self) -> Mapping[str, object]:
        """Return the figures of the broker for ``stats``, by name; without sums over more partitions than ``MOST_PLACES``."""
        leases, counts = self.leases, self.leases.counts
        return {
            "leases_given": counts.all.given,
            "leases_again": counts.all.again,
            "leases_acked": counts.acked,
            "leases_given_back": counts.given_back,
            "leases_extended": counts.extended,
            "leases_dead": counts.all.dead,
            "leases_meaningless": counts.meaningless,
            "leases_open": leases.open,
            **self._sums(),
            "leases_held_pops": self.held_pops,
            "leases_subscriptions": self.subscriptions,
            "lease_log_bytes": leases.log.size,
            "lease_snapshots": leases.log.snapshots,
            "leases_unkept": leases.unkept,
        }

    def _sums(self) -> Mapping[str, int]:
        if self.leases.count > MOST_PLACES:
            return {}
        found = [self.leases.settled(place) for place in self.leases.places()]
        states = [state for state in found if state is not None]
        waiting, delayed = sum(state.waiting for state in states), sum(state.delayed for state in states)
        leased, lined = sum(state.leased for state in states) - delayed, sum(state.lined for state in states)
        return {"leases_leased": leased, "leases_waiting": waiting, "leases_delayed": delayed, "leases_lined": lined}
