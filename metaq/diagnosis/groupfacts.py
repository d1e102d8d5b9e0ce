"""The facts about a consumer group that show whether it consumes, and why not."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from metaq.client.admin.views import BrokerView, GroupMembers, GroupView, LagView, MemberWork
from metaq.errors import RouteProblem
from metaq.message import RETRY_PREFIX, MessageQueue
from metaq.protocol.remoting.leases.figures import PlaceRow, TopicRow

POP: Final = "POP"
"""A mode of groups in topics (401)."""
NEWEST: Final = 32
"""Messages of each partition that are checked against the subscriptions."""
DEFAULT_WATCH_S: Final = 12.0
"""Clients commit every 5 s, Java's too, so they commit twice in this time."""


class LeaseSide(NamedTuple):
    """One master's leases of a group in one topic."""

    topic: TopicRow
    places: tuple[PlaceRow, ...]


class BrokerSide(NamedTuple):
    """One master's knowledge of a group."""

    broker: BrokerView
    error: str | None = None
    """Why it cannot be asked; then the rest is empty."""
    settings: GroupView | None = None
    names: tuple[str, ...] = ()
    """All groups of this broker."""
    members: GroupMembers | None = None
    lags: tuple[LagView, ...] = ()
    leases: tuple[LeaseSide, ...] = ()
    """Empty when the group leases no messages, and for brokers that do not know these requests."""


class TopicState(NamedTuple):
    """A topic that a group consumes."""

    name: str
    problem: RouteProblem | None = None
    details: str = ""
    """Why it has no route."""
    queues: tuple[MessageQueue, ...] = ()
    newest: tuple[Mapping[str, str], ...] = ()
    """Properties of the newest messages."""


class GroupFacts(NamedTuple):
    """All facts together."""

    group: str
    brokers: tuple[BrokerSide, ...]
    topics: tuple[TopicState, ...] = ()
    works: Mapping[str, MemberWork | None] = {}
    """Each member's report on itself; ``None`` when it did not answer."""
    later: Mapping[MessageQueue, int] = {}
    """Committed offsets, asked again after ``watched_s``."""
    watched_s: float = 0.0
    dead_letters: int = 0
    asked_topic: str | None = None
    """The only topic that was asked about."""

    @property
    def members(self) -> dict[str, str]:
        """Addresses by client id, from all brokers."""
        sides = [side.members for side in self.brokers if side.members is not None]
        return {member.client_id: member.address for side in sides for member in side.members}

    @property
    def lags(self) -> list[LagView]:
        """The lags on all brokers, those of retries included."""
        return [lag for side in self.brokers for lag in side.lags]

    @property
    def leases(self) -> list[LeaseSide]:
        """The leases on all brokers."""
        return [leased for side in self.brokers for leased in side.leases]

    @property
    def popped(self) -> set[str]:
        """The topics in which the group's mode is POP: members have no partitions of their own."""
        return {leased.topic.topic for leased in self.leases if leased.topic.mode == POP}

    @property
    def model(self) -> str:
        """``CLUSTERING`` or ``BROADCASTING``; empty without members."""
        return next((side.members.model for side in self.brokers if side.members is not None), "")

    @property
    def settings(self) -> GroupView | None:
        """The group's settings on the first broker that knows it."""
        return next((side.settings for side in self.brokers if side.settings is not None), None)


def resting(facts: GroupFacts) -> set[MessageQueue]:
    """Return partitions with messages to consume whose offset has not moved, as far as is known."""
    lagging = [lag for lag in pulled_lags(facts) if lag.lag]
    return {lag.queue for lag in lagging if facts.members and facts.later.get(lag.queue, lag.committed) == lag.committed}


def pulled_lags(facts: GroupFacts) -> list[LagView]:
    """Return the lags of partitions in which the group's offset moves as messages are consumed: not those of retries, nor those
    from which it leases messages, where one that fails holds the offset."""
    return [lag for lag in facts.lags if lag.leased is None and not lag.queue.topic.startswith(RETRY_PREFIX)]


def consumed_topics(facts: GroupFacts, works: Mapping[str, MemberWork | None]) -> set[str]:
    """Return all topics that a member subscribes to, or that the group has offsets of, except its retries."""
    names = {topic for work in works.values() if work is not None for topic in work.subscriptions}
    names |= {topic for side in facts.brokers if side.members is not None for topic in side.members.subscriptions}
    names |= {lag.queue.topic for lag in facts.lags}
    return {name for name in names if not name.startswith(RETRY_PREFIX)}
