"""What is to be known about a consumer group before one can tell whether it consumes, and why not."""

import time
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from metaq.client import Admin
from metaq.client.admin.views import BrokerView, GroupMembers, GroupView, LagView, MemberWork
from metaq.client.message import DEAD_LETTER_PREFIX, RETRY_PREFIX
from metaq.errors import ClientError, RouteNotFound, RouteProblem
from metaq.message import MessageQueue

NEWEST: Final = 32
"""Messages of each partition that are looked at for those that a subscription lets pass."""
_LOOK_S: Final = 0.5
DEFAULT_WATCH_S: Final = 12.0
"""Clients commit every 5 s, Java's too: two chances."""


class BrokerSide(NamedTuple):
    """What one master knows about a group."""

    broker: BrokerView
    error: str | None = None
    """Why it cannot be asked; then the rest is empty."""
    settings: GroupView | None = None
    names: tuple[str, ...] = ()
    """All its groups."""
    members: GroupMembers | None = None
    lags: tuple[LagView, ...] = ()


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
    """Everything together."""

    group: str
    brokers: tuple[BrokerSide, ...]
    topics: tuple[TopicState, ...] = ()
    works: Mapping[str, MemberWork | None] = {}
    """What each member says about itself; ``None`` when it did not answer."""
    later: Mapping[MessageQueue, int] = {}
    """Committed offsets, asked once more after ``watched_s``."""
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
        """Of all brokers, retries among them."""
        return [lag for side in self.brokers for lag in side.lags]

    @property
    def model(self) -> str:
        """``CLUSTERING`` or ``BROADCASTING``; empty with nobody there."""
        return next((side.members.model for side in self.brokers if side.members is not None), "")

    @property
    def settings(self) -> GroupView | None:
        """How the first broker that knows the group treats it."""
        return next((side.settings for side in self.brokers if side.settings is not None), None)


def collect(admin: Admin, group: str, topic: str | None = None) -> GroupFacts:
    """Ask for all of it but ``later``; see ``watch``."""
    sides = tuple(broker_side(admin, broker, group, topic) for broker in admin.masters())
    facts = GroupFacts(group, sides, asked_topic=topic)
    works = {client_id: work_of(admin, group, client_id) for client_id in facts.members}
    names = {topic} if topic is not None else topics_of(facts, works)
    return facts._replace(
        works=works,
        topics=tuple(topic_state(admin, name) for name in sorted(names)),
        dead_letters=messages_in(admin, f"{DEAD_LETTER_PREFIX}{group}"),
    )


def broker_side(admin: Admin, broker: BrokerView, group: str, topic: str | None) -> BrokerSide:
    """Ask one master."""
    try:
        groups = {view.name: view for view in admin.groups_at(broker.address)}
        members = admin.members_at(broker.address, group)
        lags = admin.lag_at(broker.address, group, topic)
        # without an offset in them a broker leaves them out
        retries = admin.lag_at(broker.address, group, f"{RETRY_PREFIX}{group}")
    except ClientError as error:
        return BrokerSide(broker, str(error))
    return BrokerSide(broker, None, groups.get(group), tuple(groups), members, tuple(sorted({*lags, *retries})))


def work_of(admin: Admin, group: str, client_id: str) -> MemberWork | None:
    """Some clients do not know the request, and one that hangs does not answer."""
    try:
        return admin.member_work(group, client_id)
    except ClientError:
        return None


def topics_of(facts: GroupFacts, works: Mapping[str, MemberWork | None]) -> set[str]:
    """All that any member subscribes to, or that the group has offsets of, without its retries."""
    names = {topic for work in works.values() if work is not None for topic in work.subscriptions}
    names |= {topic for side in facts.brokers if side.members is not None for topic in side.members.subscriptions}
    names |= {lag.queue.topic for lag in facts.lags}
    return {name for name in names if not name.startswith(RETRY_PREFIX)}


def topic_state(admin: Admin, topic: str) -> TopicState:
    """Where a topic is, and what its newest messages are like."""
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
        newest = []  # a broker that cannot be asked is told by itself
    return TopicState(topic, None, "", queues, tuple(newest))


def messages_in(admin: Admin, topic: str) -> int:
    """How many there are; none where no such topic is."""
    try:
        return sum(view.end - view.begin for view in admin.queues(topic))
    except ClientError:
        return 0


def watch(admin: Admin, groups: Iterable[GroupFacts], watch_s: float) -> tuple[GroupFacts, ...]:
    """Look again for up to ``watch_s``, for less when every partition that lags has moved. 0 is not to look."""
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
    """Partitions in which there is something to consume, and whose offset has not moved as far as it is known."""
    lagging = [lag for lag in facts.lags if lag.lag and not lag.queue.topic.startswith(RETRY_PREFIX)]
    return {lag.queue for lag in lagging if facts.members and facts.later.get(lag.queue, lag.committed) == lag.committed}


def look_again(admin: Admin, facts: GroupFacts, watched_s: float) -> GroupFacts:
    """The same with what is committed now."""
    later = {
        lag.queue: lag.committed
        for side in facts.brokers
        if side.error is None
        for lag in admin.lag_at(side.broker.address, facts.group, facts.asked_topic)
    }
    return facts._replace(later=later, watched_s=watched_s)
