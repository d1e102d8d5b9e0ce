"""A connected consumer group: its members, the subscriptions of each, and where these differ.

Everything is kept by topic, so that a member that joins, changes or leaves costs one step for each of its own topics, however
many members there are and whatever topics they have.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from metaq.engine.tables.connections import Connection
from metaq.protocol.remoting.heartbeats import BROADCASTING, ConsumerData
from metaq.protocol.subscription import SEPARATOR, Subscription

NAMED_AT_MOST: Final = 8
"""The most topics that a warning names, and the most clients for each expression."""


class ClientIdentity(NamedTuple):
    """A client's description of itself, which comes with every heartbeat."""

    client_id: str
    language: str
    version: int


class Member(NamedTuple):
    """A client in a group, over one connection."""

    session: Connection
    client: ClientIdentity
    beat_s: float
    """The monotonic time of its last heartbeat."""
    data: ConsumerData | None = None
    """The heartbeat's data about what it consumes; ``None`` for a producer."""

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        return () if self.data is None else self.data.subscriptions


class Difference(NamedTuple):
    """A topic to which the members of one consumer group subscribe differently.

    Members share partitions, not messages: a message that the owner of its partition filters out reaches no member.
    """

    topic: str
    wanted: dict[str, list[str]]
    """Client ids by filter expression; the empty expression stands for members that do not subscribe to the topic."""

    def __str__(self) -> str:
        return f"topic {self.topic}: " + "; ".join(
            f"{expression or 'not subscribed'} by {', '.join(clients[:NAMED_AT_MOST])}"
            for expression, clients in self.wanted.items()
        )


class _Topic:
    """The subscriptions of a group's members to one topic."""

    def __init__(self) -> None:
        self.wanted: dict[Connection, tuple[Subscription, str]] = {}
        """The subscription of each member, with its filter in a normal form that is equal for equal filters."""
        self.ways: Counter[str] = Counter()
        """The number of members that have each normal form."""

    def put(self, session: Connection, subscription: Subscription) -> None:
        words = SEPARATOR.join(sorted(subscription.tags)) or subscription.expression
        self.wanted[session] = subscription, words
        self.ways[words] += 1

    def drop(self, session: Connection) -> Subscription | None:
        subscription, words = self.wanted.pop(session, (None, ""))
        if subscription is not None:
            self.ways[words] -= 1
            if not self.ways[words]:
                del self.ways[words]
        return subscription


class ConsumerGroup:
    """The members of one consumer group that are connected now; there is at least one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: dict[Connection, Member] = {}
        self.subscriptions: dict[str, Subscription] = {}
        """By topic: the newest subscription of all members."""
        self.latest = ConsumerData(name, ())
        """The data of the last heartbeat of any member."""
        self._topics: dict[str, _Topic] = {}
        self._readers: dict[tuple[str, int], Connection] = {}  # the member that pulled last
        self._read: dict[Connection, set[tuple[str, int]]] = {}  # the same by member
        self._told: list[Difference] = []

    # -- asking -------------------------------------------------------------------------------------------------------

    def reader(self, topic: str, partition: int) -> str | None:
        """Return the client id of the member that last pulled from a partition; ``None`` when no member has."""
        session = self._readers.get((topic, partition))
        return None if session is None else self.members[session].client.client_id

    @property
    def broadcasts(self) -> bool:
        """True when the group broadcasts: every member gets every message, and keeps its offsets itself."""
        return self.latest.message_model == BROADCASTING

    @property
    def client_ids(self) -> list[str]:
        """The members' client ids, each once: after a reconnect the old connection may still be there."""
        return sorted({member.client.client_id for member in self.members.values()})

    def subscription(self, session: Connection, topic: str) -> Subscription | None:
        """Return the subscription of a connection's client to a topic; if it has none, the group's newest one, or ``None``."""
        known = self._topics.get(topic)
        own = None if known is None else known.wanted.get(session)
        return self.subscriptions.get(topic) if own is None else own[0]

    @property
    def differences(self) -> list[Difference]:
        """The topics to which members subscribe differently."""
        return [self._difference(topic) for topic in sorted(self._differing())]

    def _differing(self) -> Iterator[str]:
        count = len(self.members)
        return (name for name, topic in self._topics.items() if len(topic.ways) > 1 or len(topic.wanted) < count)

    def _difference(self, name: str) -> Difference:
        wanted: dict[str, list[str]] = defaultdict(list)
        known = self._topics[name].wanted
        for session, member in self.members.items():
            wanted[known[session][1] if session in known else ""].append(member.client.client_id)
        return Difference(name, {words: sorted(clients) for words, clients in sorted(wanted.items())})

    # -- changing -----------------------------------------------------------------------------------------------------

    def reads(self, session: Connection, topic: str, partition: int) -> None:
        """Note that a connection pulls from a partition; if it is a member, it is the partition's reader now."""
        if session in self.members:
            place = topic, partition
            self._readers[place] = session
            self._read.setdefault(session, set()).add(place)

    def put(self, member: Member) -> None:
        """Add a member, or replace it with what its heartbeat says now."""
        session, before = member.session, self.members.get(member.session)
        self.members[session] = member
        wanted = {subscription.topic: subscription for subscription in reversed(member.subscriptions)}
        for topic in subscribed_topics(before):
            self._drop(topic, session)
        for topic, subscription in wanted.items():
            if topic not in self._topics:
                self._topics[topic] = _Topic()
            self._topics[topic].put(session, subscription)
            known = self.subscriptions.get(topic)
            if known is None or known.version < subscription.version:
                self.subscriptions[topic] = subscription

    def remove(self, session: Connection) -> None:
        """Remove a member; it must be one."""
        for topic in subscribed_topics(self.members.pop(session)):
            self._drop(topic, session)
        for place in self._read.pop(session, ()):
            if self._readers.get(place) is session:
                del self._readers[place]

    def _drop(self, name: str, session: Connection) -> None:
        topic = self._topics[name]
        gone = topic.drop(session)
        if not topic.wanted:
            del self._topics[name], self.subscriptions[name]
        elif self.subscriptions[name] is gone:
            self.subscriptions[name] = max((each for each, _ in topic.wanted.values()), key=lambda each: each.version)

    def new_differences(self) -> list[Difference]:
        """Return up to ``NAMED_AT_MOST`` differences if they have changed since the last call; otherwise an empty list."""
        before, self._told = self._told, [self._difference(name) for name in islice(self._differing(), NAMED_AT_MOST)]
        return self._told if self._told != before else []


def subscribed_topics(member: Member | None) -> set[str]:
    """Return the topics that a member subscribes to; none for ``None``."""
    return set() if member is None else {subscription.topic for subscription in member.subscriptions}
