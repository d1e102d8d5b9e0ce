"""Who is connected: producers and consumers by group, as their heartbeats tell it.

A client is in a group from its first heartbeat until it says goodbye, its connection closes, or it is silent for
``client_expiry_ms``. When a consumer group gains or loses a member, or a member changes its topics, all members are told
(request 40), so that they share the partitions anew.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from typing import Final, NamedTuple

from metaq.protocol.codes import Request
from metaq.protocol.heartbeats import BROADCASTING, ConsumerData, Heartbeat
from metaq.protocol.subscription import SEPARATOR, Subscription
from metaq.server.groups import GroupTable
from metaq.server.remoting import RemotingSession

logger = logging.getLogger(__name__)

NAMED_AT_MOST: Final = 8
"""Clients that a warning names for each expression."""

PRODUCER: Final = False
CONSUMER: Final = True


class Identity(NamedTuple):
    """What a client says about itself with every heartbeat."""

    client_id: str
    language: str
    version: int


class Member(NamedTuple):
    """A client in a group, over one connection."""

    session: RemotingSession
    client: Identity
    beat_s: float
    """The monotonic time of its last heartbeat."""
    data: ConsumerData | None = None
    """What it consumes; ``None`` for a producer."""

    @property
    def subscriptions(self) -> tuple[Subscription, ...]:
        return () if self.data is None else self.data.subscriptions


class Difference(NamedTuple):
    """Members of one consumer group want different things of a topic.

    They share partitions, not messages: what the owner of a partition does not want, nobody of the group gets.
    """

    topic: str
    wanted: dict[str, list[str]]
    """Client ids by expression; by an empty one those that do not subscribe to the topic."""

    def __str__(self) -> str:
        return f"topic {self.topic}: " + "; ".join(
            f"{expression or 'not subscribed'} by {', '.join(clients[:NAMED_AT_MOST])}"
            for expression, clients in self.wanted.items()
        )


class ConsumerGroup:
    """The members of one consumer group that are connected now; there is at least one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: dict[RemotingSession, Member] = {}
        self.subscriptions: dict[str, Subscription] = {}
        """By topic: the newest of all members."""
        self.latest = ConsumerData(name, ())
        """What the last heartbeat said."""
        self.differences: list[Difference] = []
        self.readers: dict[tuple[str, int], RemotingSession] = {}
        """By topic and partition: the member that has pulled last."""

    def reader(self, topic: str, partition: int) -> str | None:
        """The client id of the member that pulls from a partition, as far as this broker can know it."""
        session = self.readers.get((topic, partition))
        return None if session is None else self.members[session].client.client_id

    @property
    def broadcasts(self) -> bool:
        """Whether every member gets every message, and keeps its offsets itself."""
        return self.latest.message_model == BROADCASTING

    @property
    def client_ids(self) -> list[str]:
        """Each once: after a new connect the old connection may still be there."""
        return sorted({member.client.client_id for member in self.members.values()})

    def subscription(self, session: RemotingSession, topic: str) -> Subscription | None:
        """What the client of this connection wants of a topic; of one that has not sent a heartbeat, what its group wants."""
        member = self.members.get(session)
        if member is not None:
            for subscription in member.subscriptions:
                if subscription.topic == topic:
                    return subscription
        return self.subscriptions.get(topic)

    def summarize(self) -> bool:
        """Bring the summary up to date after members changed; true when they begin to differ, or differ in another way."""
        self.subscriptions = {}
        for member in self.members.values():
            for subscription in member.subscriptions:
                known = self.subscriptions.get(subscription.topic)
                if known is None or known.version < subscription.version:
                    self.subscriptions[subscription.topic] = subscription
        before, self.differences = self.differences, _differences(self.members.values())
        return bool(self.differences) and self.differences != before


class Clients:
    """All producers and consumers that are connected now."""

    def __init__(
        self, groups: GroupTable, monotonic: Callable[[], float], soon: Callable[[Callable[[], None]], object]
    ) -> None:
        """``soon`` calls what it is given at the end of this turn of the loop."""
        self._groups = groups
        self._monotonic = monotonic
        self._soon = soon
        self._consumers: dict[str, ConsumerGroup] = {}
        self._producers: dict[str, dict[RemotingSession, Member]] = {}
        self._joined: dict[RemotingSession, set[tuple[bool, str]]] = {}  # (is consumer, group)
        self._senders: dict[str, tuple[RemotingSession, str]] = {}  # by client id, with the name of its user
        self._client_ids: dict[RemotingSession, str] = {}  # under which each sends
        self._administrators: set[RemotingSession] = set()
        self._to_notify: dict[str, None] = {}
        self._notifying = False

    # -- asking -------------------------------------------------------------------------------------------------------

    def consumer_group(self, name: str) -> ConsumerGroup | None:
        """The group, if any member is connected."""
        return self._consumers.get(name)

    def consumer_groups(self) -> list[ConsumerGroup]:
        """All that have a member, by name."""
        return [self._consumers[name] for name in sorted(self._consumers)]

    def consumers_of(self, topic: str) -> list[str]:
        """The names of the groups that subscribe to a topic now."""
        return [group.name for group in self.consumer_groups() if topic in group.subscriptions]

    def producer_groups(self) -> list[str]:
        """The names of all that have a member."""
        return sorted(self._producers)

    def producers(self, group: str) -> list[Member]:
        """The members of one producer group."""
        return list(self._producers.get(group, {}).values())

    def sender(self, client_id: str) -> RemotingSession | None:
        """The connection of a client that sends; of several of one user, the one whose heartbeat came last."""
        found = self._senders.get(client_id)
        return None if found is None else found[0]

    def administers(self, session: RemotingSession) -> bool:
        """Whether the connection is an administrator's tool."""
        return session in self._administrators

    def administer(self, session: RemotingSession) -> None:
        """The connection has asked what only administrators' tools ask."""
        if session not in self._administrators and not session.closed:
            self._administrators.add(session)
            session.closing.append(partial(self._administrators.remove, session))

    # -- coming and going ---------------------------------------------------------------------------------------------

    def beat(self, session: RemotingSession, language: str, version: int, heartbeat: Heartbeat) -> None:
        """Take a heartbeat. Groups that it changes have been told when this returns."""
        if session.closed:
            return
        if session not in self._joined:
            self._joined[session] = set()
            session.closing.append(partial(self._closed, session))
        client, now_s = Identity(heartbeat.client_id, language, version), self._monotonic()
        for name in heartbeat.producers:
            self._joined[session].add((PRODUCER, name))
            members = self._producers.setdefault(name, {})
            members[session] = Member(session, client, now_s)
            self._send_as(session, client.client_id)
        for data in heartbeat.consumers:
            self._joined[session].add((CONSUMER, data.group))
            self._consume(data.group, Member(session, client, now_s, data))
        self._notify()

    def _send_as(self, session: RemotingSession, client_id: str) -> None:
        """Replies to the client come here from now on, unless they belong to another user whose connection lives."""
        before = self._client_ids.get(session)
        if before != client_id:
            self._forget_sender(session)
            self._client_ids[session] = client_id
        name = session.principal.name
        holder, user = self._senders.get(client_id, (session, name))
        if holder is session or user == name:
            self._senders[client_id] = session, name
        elif before != client_id:
            logger.warning(
                "client id belongs to another user, who gets the replies client=%.255r user=%s address=%s holder=%s",
                *(client_id, name, session.address[0], user),
            )

    def _consume(self, name: str, member: Member) -> None:
        group = self._consumers.setdefault(name, ConsumerGroup(name))
        before = group.members.get(member.session)
        group.members[member.session] = member
        assert member.data is not None
        group.latest = member.data
        if before is not None and (before.data, before.client) == (member.data, member.client):
            return
        self._summarize(group)
        if before is None or before.client != member.client or _topics(before) != _topics(member):
            self._to_notify[name] = None

    def _summarize(self, group: ConsumerGroup) -> None:
        if group.summarize():
            logger.warning(
                "consumers of one group want different things, so messages will be missed group=%s wants=%s hint=%s",
                *(group.name, " | ".join(map(str, group.differences))),
                "subscribe all members alike, or give them different groups",
            )

    def unregister(self, session: RemotingSession, producer_group: str | None, consumer_group: str | None) -> None:
        """A client leaves one group, or two."""
        if producer_group is not None:
            self._leave(session, PRODUCER, producer_group)
        if consumer_group is not None:
            self._leave(session, CONSUMER, consumer_group)
        self._notify()

    def expire(self, oldest_s: float) -> None:
        """Take members out whose last heartbeat came before a monotonic time, and close what is in no group any more."""
        everybody = [(PRODUCER, name, member) for name, group in self._producers.items() for member in group.values()]
        everybody += [(CONSUMER, group.name, member) for group in self.consumer_groups() for member in group.members.values()]
        for kind, name, member in everybody:
            if member.beat_s < oldest_s:
                logger.info("no heartbeat any more client=%s group=%s", member.client.client_id, name)
                self._leave(member.session, kind, name)
                if self._joined.get(member.session) == set():
                    member.session.close()
        self._notify()

    def _closed(self, session: RemotingSession) -> None:
        for kind, name in list(self._joined[session]):
            self._leave(session, kind, name)
        del self._joined[session]
        if self._to_notify:
            self._soon(self._notify)  # many connections may close at once

    def _leave(self, session: RemotingSession, kind: bool, name: str) -> None:
        joined = self._joined.get(session, set())
        if (kind, name) not in joined:
            return
        joined.remove((kind, name))
        if kind == CONSUMER:
            group = self._consumers[name]
            del group.members[session]
            group.readers = {place: reader for place, reader in group.readers.items() if reader is not session}
            if group.members:
                self._summarize(group)
                self._to_notify[name] = None
            else:
                del self._consumers[name]
            return
        members = self._producers[name]
        del members[session]
        if not members:
            del self._producers[name]
        if not any(kind == PRODUCER for kind, _ in joined):
            self._forget_sender(session)

    def _forget_sender(self, session: RemotingSession) -> None:
        client_id = self._client_ids.pop(session, None)
        if client_id is not None and self.sender(client_id) is session:
            del self._senders[client_id]

    def _notify(self) -> None:
        """Tell the members of changed groups. Telling may find a connection lost, which changes groups again."""
        if self._notifying:
            return
        self._notifying = True
        try:
            while self._to_notify:
                name, _ = self._to_notify.popitem()
                settings, group = self._groups.get(name), self._consumers.get(name)
                if group is None or (settings is not None and not settings.notify_consumer_ids_changed_enable):
                    continue
                for session in list(group.members):
                    session.tell(Request.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": name})
        finally:
            self._notifying = False


def _topics(member: Member) -> set[str]:
    return {subscription.topic for subscription in member.subscriptions}


def _differences(members: Collection[Member]) -> list[Difference]:
    """The topics of which members want different things."""
    wanted: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for topic in sorted(set().union(*map(_topics, members))):
        for member in members:
            wanted[topic][_expression(member, topic)].append(member.client.client_id)
    return [
        Difference(topic, {expression: sorted(clients) for expression, clients in sorted(by_expression.items())})
        for topic, by_expression in wanted.items()
        if len(by_expression) > 1
    ]


def _expression(member: Member, topic: str) -> str:
    """What a member wants of a topic, in words that are equal when it is the same."""
    for subscription in member.subscriptions:
        if subscription.topic == topic:
            return SEPARATOR.join(sorted(subscription.tags)) or subscription.expression
    return ""
