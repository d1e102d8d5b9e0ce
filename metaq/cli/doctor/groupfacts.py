"""The facts about a consumer group that show whether it consumes, and why not."""

import time
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from metaq.client import Admin
from metaq.client.admin.views import BrokerView, GroupMembers, GroupView, LagView, MemberWork
from metaq.errors import ClientError, RouteNotFound, RouteProblem
from metaq.message import DEAD_PREFIX, RETRY_PREFIX, MessageQueue
from metaq.protocol.remoting.leases.figures import PlaceRow, TopicRow

POP: Final = "POP"
"""A mode of groups in topics (401)."""
NEWEST: Final = 32
"""Messages of each partition that are checked against the subscriptions."""
_LOOK_S: Final = 0.5
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


def collect(admin: Admin, group: str, topic: str | None = None) -> GroupFacts:
    """Ask for all facts but ``later``; see ``watch``."""
    sides = tuple(broker_side(admin, broker, group, topic) for broker in admin.masters())
    facts = GroupFacts(group, sides, asked_topic=topic)
    works = {client_id: work_of(admin, group, client_id) for client_id in facts.members}
    names = {topic} if topic is not None else topics_of(facts, works)
    return facts._replace(
        works=works,
        topics=tuple(topic_state(admin, name) for name in sorted(names)),
        dead_letters=messages_in(admin, f"{DEAD_PREFIX}{group}"),
    )


def broker_side(admin: Admin, broker: BrokerView, group: str, topic: str | None) -> BrokerSide:
    """Ask one master."""
    try:
        groups = {view.name: view for view in admin.groups_at(broker.address)}
        members = admin.members_at(broker.address, group)
        lags = admin.lag_at(broker.address, group, topic)
        # asked for by name: a broker otherwise leaves out retries without a committed offset
        retries = admin.lag_at(broker.address, group, f"{RETRY_PREFIX}{group}")
    except ClientError as error:
        return BrokerSide(broker, str(error))
    known = tuple(sorted({*lags, *retries}, key=lambda lag: lag.queue))
    return BrokerSide(broker, None, groups.get(group), tuple(groups), members, known, leases_of(admin, broker, group, topic))


def leases_of(admin: Admin, broker: BrokerView, group: str, topic: str | None) -> tuple[LeaseSide, ...]:
    """Ask one master about leases; return none when it does not know the requests, as RocketMQ's do not."""
    leases = admin.leases()
    try:
        places = list(leases.partitions(broker.address, group, topic))
        topics = [row for row in leases.topics(broker.address, group) if topic in (None, row.topic)]
    except ClientError:
        return ()
    return tuple(LeaseSide(row, tuple(place for place in places if place.topic == row.topic)) for row in topics)


def work_of(admin: Admin, group: str, client_id: str) -> MemberWork | None:
    """Return a member's report on itself; ``None`` for a client that does not know the request, or hangs."""
    try:
        return admin.member_work(group, client_id)
    except ClientError:
        return None


def topics_of(facts: GroupFacts, works: Mapping[str, MemberWork | None]) -> set[str]:
    """Return all topics that a member subscribes to, or that the group has offsets of, except its retries."""
    names = {topic for work in works.values() if work is not None for topic in work.subscriptions}
    names |= {topic for side in facts.brokers if side.members is not None for topic in side.members.subscriptions}
    names |= {lag.queue.topic for lag in facts.lags}
    return {name for name in names if not name.startswith(RETRY_PREFIX)}


def topic_state(admin: Admin, topic: str) -> TopicState:
    """Look up a topic's partitions, and the properties of its newest messages."""
    try:
        queues = admin.readable(topic)
    except RouteNotFound as error:
        return TopicState(topic, error.reason, str(error))
    newest: list[Mapping[str, str]] = []
    try:
        for view in admin.queues(topic):
            first = max(view.begin, view.end - NEWEST)
            newest += [message.properties for message in admin.read(view.queue, first, view.end)]
    except ClientError:
        newest = []  # a broker that cannot be asked has a finding of its own
    return TopicState(topic, None, "", queues, tuple(newest))


def messages_in(admin: Admin, topic: str) -> int:
    """Return how many messages a topic has; 0 when it does not exist or its brokers cannot be asked."""
    try:
        return sum(view.end - view.begin for view in admin.queues(topic))
    except ClientError:
        return 0


def watch(admin: Admin, groups: Iterable[GroupFacts], watch_s: float) -> tuple[GroupFacts, ...]:
    """Look again for up to ``watch_s`` seconds, or until every partition with a lag has moved. With 0, do not look."""
    watched = tuple(groups)
    began = time.monotonic()
    while any(map(resting, watched)):
        passed = time.monotonic() - began
        if passed >= watch_s:
            break
        time.sleep(min(_LOOK_S, watch_s - passed))
        watched = tuple(look_again(admin, facts, time.monotonic() - began) for facts in watched)
    return watched


def resting(facts: GroupFacts) -> set[MessageQueue]:
    """Return partitions with messages to consume whose offset has not moved, as far as is known."""
    lagging = [lag for lag in pulled_lags(facts) if lag.lag]
    return {lag.queue for lag in lagging if facts.members and facts.later.get(lag.queue, lag.committed) == lag.committed}


def pulled_lags(facts: GroupFacts) -> list[LagView]:
    """Return the lags of partitions in which the group's offset moves as messages are consumed: not those of retries, nor those
    from which it leases messages, where one that fails holds the offset."""
    return [lag for lag in facts.lags if lag.leased is None and not lag.queue.topic.startswith(RETRY_PREFIX)]


def look_again(admin: Admin, facts: GroupFacts, watched_s: float) -> GroupFacts:
    """Return the facts with the offsets that are committed now."""
    later = {
        lag.queue: lag.committed
        for side in facts.brokers
        if side.error is None
        for lag in admin.lag_at(side.broker.address, facts.group, facts.asked_topic)
    }
    return facts._replace(later=later, watched_s=watched_s)
