"""The connected clients: producers and consumers by group, as their heartbeats report them.

A client is in a group from its first heartbeat until it unregisters, its connection closes, or it is silent for
``client_expiry_ms``. When a consumer group gains or loses a member, or a member changes its topics, all members are notified
(request 40), so that they rebalance.
"""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from metaq.engine.tables.connections import Connection
from metaq.engine.tables.consumergroup import ClientIdentity, ConsumerGroup, Member, subscribed_topics
from metaq.engine.tables.groups import GroupTable
from metaq.errors import BadRequest
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.heartbeats import MOST_GROUPS, MOST_SUBSCRIPTIONS, Heartbeat

logger = logging.getLogger(__name__)

TOLD_AT_ONCE: Final = 256
"""Members that are notified of changes before other greenlets run; each takes some 20 µs."""


class _Joined:
    """The groups that one connection is in."""

    def __init__(self) -> None:
        self.producers: set[str] = set()
        self.consumers: dict[str, int] = {}
        """Consumer groups with the number of topics that the connection subscribes to in each."""

    def check_room(self, heartbeat: Heartbeat) -> None:
        """Raise ``BadRequest`` when the connection would be in too many groups, or have too many subscriptions."""
        consumers = {**self.consumers, **{data.group: len(data.subscriptions) for data in heartbeat.consumers}}
        groups = len(self.producers.union(heartbeat.producers)) + len(consumers)
        if groups > MOST_GROUPS:
            raise BadRequest(f"a connection cannot be in {groups} groups: at most in {MOST_GROUPS}; use several connections")
        wanted = sum(consumers.values())
        if wanted > MOST_SUBSCRIPTIONS:
            reason = f"a connection cannot have {wanted} subscriptions: at most {MOST_SUBSCRIPTIONS}"
            raise BadRequest(f"{reason}; use several connections")


class Clients:
    """The producers and consumers that are connected now."""

    def __init__(
        self, groups: GroupTable, monotonic: Callable[[], float], soon: Callable[[Callable[[], None]], object]
    ) -> None:
        """Create it; ``soon`` calls a function at the end of this turn of the loop, ``monotonic`` is the clock in seconds."""
        self._groups = groups
        self._monotonic = monotonic
        self._soon = soon
        self._consumers: dict[str, ConsumerGroup] = {}
        self._producers: dict[str, dict[Connection, Member]] = {}
        self._joined: dict[Connection, _Joined] = {}
        self._senders: dict[str, tuple[Connection, str]] = {}  # by client id, each with the name of its user
        self._client_ids: dict[Connection, str] = {}  # the client id under which each connection sends
        self._administrators: set[Connection] = set()
        self._to_notify: dict[str, None] = {}
        self._to_tell: deque[tuple[Connection, str]] = deque()
        self._notifying = False

    # -- asking -------------------------------------------------------------------------------------------------------

    def consumer_group(self, name: str) -> ConsumerGroup | None:
        """Return the connected group of this name; ``None`` when no member is connected."""
        return self._consumers.get(name)

    def consumer_groups(self) -> list[ConsumerGroup]:
        """Return all consumer groups that have a connected member, sorted by name."""
        return [self._consumers[name] for name in sorted(self._consumers)]

    def consumers_of(self, topic: str) -> list[str]:
        """Return the names of the groups that subscribe to a topic now."""
        return [group.name for group in self.consumer_groups() if topic in group.subscriptions]

    def producer_groups(self) -> list[str]:
        """Return the names of all producer groups that have a connected member."""
        return sorted(self._producers)

    def producers(self, group: str) -> list[Member]:
        """Return the members of one producer group."""
        return list(self._producers.get(group, {}).values())

    def sender(self, client_id: str) -> Connection | None:
        """Return the connection of a producer by its client id; of several of one user, the one with the last heartbeat."""
        found = self._senders.get(client_id)
        return None if found is None else found[0]

    def administers(self, session: Connection) -> bool:
        """Return whether the connection belongs to an administrator's tool."""
        return session in self._administrators

    def administer(self, session: Connection) -> None:
        """Mark a connection as an administrator's tool: it has sent a request that only such tools send."""
        if session not in self._administrators and not session.closed:
            self._administrators.add(session)
            session.at_close(partial(self._administrators.remove, session))

    # -- coming and going ---------------------------------------------------------------------------------------------

    def check_room(self, session: Connection, heartbeat: Heartbeat) -> None:
        """Raise ``BadRequest`` when a connection would be in too many groups, or have too many subscriptions."""
        self._joined.get(session, _Joined()).check_room(heartbeat)

    def beat(self, session: Connection, language: str, version: int, heartbeat: Heartbeat) -> None:
        """Take a heartbeat, and notify the members of the groups that it changes.

        The first ``TOLD_AT_ONCE`` members have been notified when this returns, the others are at the end of the turn.
        """
        if session.closed:
            return
        if session not in self._joined:
            self._joined[session] = _Joined()
            session.at_close(partial(self._closed, session))
        client, now_s, joined = ClientIdentity(heartbeat.client_id, language, version), self._monotonic(), self._joined[session]
        for name in heartbeat.producers:
            joined.producers.add(name)
            members = self._producers.setdefault(name, {})
            members[session] = Member(session, client, now_s)
            self._send_as(session, client.client_id)
        for data in heartbeat.consumers:
            joined.consumers[data.group] = len(data.subscriptions)
            self._consume(data.group, Member(session, client, now_s, data))
        self._notify()

    def _send_as(self, session: Connection, client_id: str) -> None:
        """Send replies for a client id to this connection from now on, unless a live connection of another user has the id."""
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
                client_id,
                name,
                session.address[0],
                user,
            )

    def _consume(self, name: str, member: Member) -> None:
        group = self._consumers.get(name)
        if group is None:
            group = self._consumers[name] = ConsumerGroup(name)
        before = group.members.get(member.session)
        assert member.data is not None
        group.latest = member.data
        if before is not None and (before.data, before.client) == (member.data, member.client):
            group.members[member.session] = member
            return
        group.put(member)
        self._report(group)
        if before is None or before.client != member.client or subscribed_topics(before) != subscribed_topics(member):
            self._to_notify[name] = None

    def _report(self, group: ConsumerGroup) -> None:
        differences = group.new_differences()
        if differences:
            logger.warning(
                "consumers of one group want different things, so messages will be missed group=%s wants=%s hint=%s",
                group.name,
                " | ".join(map(str, differences)),
                "subscribe all members alike, or give them different groups",
            )

    def unregister(self, session: Connection, producer_group: str | None, consumer_group: str | None) -> None:
        """Take a client out of a producer group, a consumer group, or both; nothing when it is in neither."""
        joined = self._joined.get(session)
        if joined is None:
            return
        if producer_group in joined.producers:
            self._stop_sending(session, joined, producer_group)
        if consumer_group in joined.consumers:
            self._stop_consuming(session, joined, consumer_group)
        self._notify()

    def expire(self, oldest_s: float) -> None:
        """Remove members whose last heartbeat came before a monotonic time; close connections that are then in no group."""
        for session, joined in list(self._joined.items()):
            self._expire(session, joined, oldest_s)
        self._notify()

    def _expire(self, session: Connection, joined: _Joined, oldest_s: float) -> None:
        sending = [(name, self._producers[name][session]) for name in joined.producers]
        consuming = [(name, self._consumers[name].members[session]) for name in joined.consumers]
        left = False
        for stop, members in ((self._stop_sending, sending), (self._stop_consuming, consuming)):
            for name, member in members:
                if member.beat_s < oldest_s:
                    logger.info("no heartbeat any more client=%s group=%s", member.client.client_id, name)
                    stop(session, joined, name)
                    left = True
        if left and not (joined.producers or joined.consumers):
            session.close()

    def _closed(self, session: Connection) -> None:
        joined = self._joined.pop(session)
        for name in list(joined.producers):
            self._stop_sending(session, joined, name)
        for name in list(joined.consumers):
            self._stop_consuming(session, joined, name)
        if self._to_notify:
            self._soon(self._notify)  # at the end of the turn: many connections may close at once

    def _stop_sending(self, session: Connection, joined: _Joined, name: str) -> None:
        joined.producers.remove(name)
        members = self._producers[name]
        del members[session]
        if not members:
            del self._producers[name]
        if not joined.producers:
            self._forget_sender(session)

    def _stop_consuming(self, session: Connection, joined: _Joined, name: str) -> None:
        del joined.consumers[name]
        group = self._consumers[name]
        group.remove(session)
        if group.members:
            self._report(group)
            self._to_notify[name] = None
        else:
            del self._consumers[name]

    def _forget_sender(self, session: Connection) -> None:
        client_id = self._client_ids.pop(session, None)
        if client_id is not None and self.sender(client_id) is session:
            del self._senders[client_id]

    def _notify(self) -> None:
        """Notify the members of changed groups, ``TOLD_AT_ONCE`` in one turn.

        A send may find a connection lost, which changes groups again: ``_notifying`` keeps such a call from nesting.
        """
        if self._notifying:
            return
        self._notifying = True
        try:
            for _ in range(TOLD_AT_ONCE):
                while self._to_notify and not self._to_tell:
                    self._to_tell.extend(self._members_to_tell(self._to_notify.popitem()[0]))
                if not self._to_tell:
                    return
                session, name = self._to_tell.popleft()
                session.tell(Request.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": name})
        finally:
            self._notifying = False
        self._soon(self._notify)

    def _members_to_tell(self, name: str) -> list[tuple[Connection, str]]:
        settings, group = self._groups.get(name), self._consumers.get(name)
        if group is None or (settings is not None and not settings.notify_consumer_ids_changed_enable):
            return []
        return [(session, name) for session in group.members]
