"""The facts about a consumer group, asked for by a client."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import click

from metaq.cli.common import Decorated
from metaq.client import Admin
from metaq.client.admin.views import BrokerView, MemberWork
from metaq.diagnosis.groupfacts import (
    DEFAULT_WATCH_S,
    NEWEST,
    BrokerSide,
    GroupFacts,
    LeaseSide,
    TopicState,
    consumed_topics,
    resting,
)
from metaq.errors import ClientError, RouteNotFound
from metaq.message import RETRY_PREFIX

_LOOK_S: Final = 0.5


def watch_option(whose: str = "") -> Callable[[Decorated], Decorated]:
    """Add ``--watch``; ``whose`` completes the words on offsets."""
    return click.option(
        "--watch",
        "watch_s",
        type=click.FloatRange(0, 600),
        default=DEFAULT_WATCH_S,
        show_default=True,
        metavar="S",
        help=f"Seconds to watch whether offsets move{whose}; ends early if they do.",
    )


def collect(admin: Admin, group: str, topic: str | None = None) -> GroupFacts:
    """Ask for all facts but ``later``; see ``watch``."""
    sides = tuple(broker_side(admin, broker, group, topic) for broker in admin.masters())
    facts = GroupFacts(group, sides, asked_topic=topic)
    works = {client_id: work_of(admin, group, client_id) for client_id in facts.members}
    names = {topic} if topic is not None else consumed_topics(facts, works)
    return facts._replace(
        works=works,
        topics=tuple(topic_state(admin, name) for name in sorted(names)),
        dead_letters=dead_letters_of(admin, group),
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


def dead_letters_of(admin: Admin, group: str) -> int:
    """Return how many dead letters a group has; 0 when its brokers cannot be asked."""
    try:
        return admin.count_dead_letters(group)
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


def look_again(admin: Admin, facts: GroupFacts, watched_s: float) -> GroupFacts:
    """Return the facts with the offsets that are committed now."""
    later = {
        lag.queue: lag.committed
        for side in facts.brokers
        if side.error is None
        for lag in admin.lag_at(side.broker.address, facts.group, facts.asked_topic)
    }
    return facts._replace(later=later, watched_s=watched_s)
