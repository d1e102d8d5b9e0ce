"""Membership of clients in groups: 34, 35, 38, 46 (specs: remoting protocol, section 3.2.6)."""

from typing import Final

import orjson

from metaq.engine.context import Context
from metaq.engine.leases.waiting import WaitingLines
from metaq.engine.reading.filters import filter_of
from metaq.engine.tables.topics import Topic
from metaq.errors import RequestFailed
from metaq.protocol.remoting.codes import INNER_PRODUCER, UNIT_SUBSCRIBED, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import ConsumerGroupOnly, UnregisterClient, decode_header
from metaq.protocol.remoting.heartbeats import ConsumerData, Heartbeat, decode_client_check, decode_heartbeat
from metaq.protocol.subscription import ExpressionKind
from metaq.server.access.permissions import Action, Principal, demand
from metaq.server.remoting.session import DONE, Answer, RemotingSession, RequestHandler

NO_SQL_FILTER: Final = "this broker does not filter by SQL92 expressions (sql_filter)"

EMPTY: Final = Answer(fields={})
"""Success, with the empty header that clients expect."""


class HeartbeatHandler:
    """Handles heartbeats and unregistrations, and lists the members of groups."""

    def __init__(self, context: Context, lines: WaitingLines) -> None:
        self._context = context
        self._lines = lines

    def requests(self) -> dict[int, RequestHandler]:
        return {
            Request.HEART_BEAT: self.beat,
            Request.UNREGISTER_CLIENT: self.unregister,
            Request.GET_CONSUMER_LIST_BY_GROUP: self.members,
            Request.CHECK_CLIENT_CONFIG: self.check,
        }

    def beat(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Take a client's heartbeat, and notify the members of the groups that it changes (34).

        In a large group, some of them receive that only after this is answered.
        """
        heartbeat = decode_heartbeat(request.body)
        self._check(session.principal, heartbeat)
        self._context.clients.check_room(session, heartbeat)
        for data in heartbeat.consumers:
            self._make_group(data)
        self._context.clients.beat(session, request.language, request.version, heartbeat)
        return DONE

    def _check(self, principal: Principal, heartbeat: Heartbeat) -> None:
        """Raise ``AccessDenied`` when the client may not join.

        Producers are asked about transactional messages and receive them, and any client id may be sent replies, so these need
        a right to publish.
        """
        is_producer = any(group != INNER_PRODUCER for group in heartbeat.producers)
        if is_producer or not (heartbeat.consumers or principal.named):
            demand(principal, Action.PUBLISH)
        for data in heartbeat.consumers:
            demand(principal, Action.CONSUME, data.group)
            for subscription in data.subscriptions:
                demand(principal, Action.SUBSCRIBE, subscription.topic)

    def _make_group(self, data: ConsumerData) -> None:
        """Make the group and its retry topic, at a master. A group that is not created is still shown to administrators."""
        if not self._context.replicas.is_master:
            return
        groups, topics = self._context.groups, self._context.topics
        try:
            group = groups.ensure(data.group)
        except RequestFailed:
            return
        if group.retry_queue_nums > 0 and topics.get(group.retry_topic) is None:
            count = group.retry_queue_nums
            topics.put(Topic(group.retry_topic, count, count, sys_flag=UNIT_SUBSCRIBED * data.unit_mode))

    def unregister(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Remove a client from its groups (35); its pops that wait are answered."""
        header = decode_header(UnregisterClient, request.fields)
        if header.consumer_group:
            demand(session.principal, Action.CONSUME, header.consumer_group)
        self._context.clients.unregister(session, header.producer_group, header.consumer_group)
        if header.consumer_group:
            self._lines.leave(session, header.consumer_group)
        return EMPTY

    def members(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the client ids of a consumer group (38). All members see the same list, with each client once."""
        header = decode_header(ConsumerGroupOnly, request.fields)
        demand(session.principal, Action.CONSUME, header.consumer_group)
        group = self._context.clients.consumer_group(header.consumer_group)
        if group is None:
            reason = f"no consumer of the group {header.consumer_group} is connected"
            raise RequestFailed(Response.SYSTEM_ERROR, reason)
        return Answer(fields={}, body=(orjson.dumps({"consumerIdList": group.client_ids}),))

    def check(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Check that a subscription is possible (46).

        Raise an error when its SQL92 expression is invalid, or such filters are off.
        """
        subscription = decode_client_check(request.body)
        demand(session.principal, Action.SUBSCRIBE, subscription.topic)
        if subscription.kind is ExpressionKind.SQL92:
            if not self._context.settings.sql_filter:
                raise RequestFailed(Response.SYSTEM_ERROR, NO_SQL_FILTER)
            filter_of(subscription)
        return DONE
