"""Queues that the broker assigns to the members of a group, and how they read them: 400, 401, 402.

The broker shares out the queues of all brokers among the members that it knows itself. Clients send heartbeats to all brokers,
so each broker gives the same answer once these have arrived.
"""

from functools import partial
from typing import Final, Protocol

from metaq.engine.context import Context
from metaq.engine.duties import Duties
from metaq.engine.leases.draining import Drain
from metaq.engine.tables.modes import Mode, RequestMode, mode_of
from metaq.errors import ConnectionFailed, RequestFailed, UnknownTopic
from metaq.message import MAX_PARTITIONS, RETRY_PREFIX, MessageQueue
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.codes import READ, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.heartbeats import AssignmentQuery, decode_assignment_query, encode_assignments
from metaq.protocol.remoting.routes import TopicRoute
from metaq.registry.assign import AVERAGE, STRATEGIES, popped, pulled
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import DONE, Answer, RemotingSession, RequestHandler

NOWHERE: Final = TopicRoute((), ())
NOT_NOW: Final = encode_assignments(None, Mode.PULL)


class RouteSource(Protocol):
    """The routes of topics over all brokers (``metaq.server.registering.clusterroutes``)."""

    def known(self, topic: str) -> TopicRoute | None: ...

    def fetch(self, topic: str) -> TopicRoute: ...


class AssignmentHandler:
    """Assigns queues to members of groups, and keeps the modes that administrators set."""

    def __init__(self, context: Context, duties: Duties, drain: Drain, later: Later, routes: RouteSource) -> None:
        self._context = context
        self._duties = duties
        self._drain = drain
        self._later = later
        self._routes = routes

    def requests(self) -> dict[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {
            Request.QUERY_ASSIGNMENT: self.assign,
            Request.SET_MESSAGE_REQUEST_MODE: self.set_mode,
            Request.GET_ALL_MESSAGE_REQUEST_MODE: self.modes,
        }

    # -- modes --------------------------------------------------------------------------------------------------------

    def set_mode(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Set the mode in which a group reads a topic (401). It is confirmed when it is durable."""
        mode = mode_of(fastjson.members_of(fastjson.decode_plain(request.body), "request mode"))
        demand(session.principal, Action.ADMINISTER, mode.group)
        if mode.topic.startswith(RETRY_PREFIX):
            raise RequestFailed(Response.NO_PERMISSION, f"{mode.topic[:255]} is a retry topic: those are always pulled")
        if self._context.topics.get(mode.topic) is None:
            raise UnknownTopic(f"the topic {mode.topic[:255]} does not exist on this broker")
        if self._context.groups.get(mode.group) is None:
            reason = f"the group {mode.group[:255]} does not exist on this broker"
            raise RequestFailed(Response.SUBSCRIPTION_GROUP_NOT_EXIST, reason)
        self._later.run(session, request, partial(self._set_mode, mode))

    def _set_mode(self, mode: RequestMode) -> Answer:
        """Set a mode. A group that pulls from now on gets what it has leased as retries, before this is answered."""
        self._context.modes.put(mode)
        group = self._context.groups.get(mode.group)
        if mode.mode is Mode.PULL and group is not None:
            self._drain.drain(group, mode.topic)
        self._duties.save_modes()
        return DONE

    def modes(self, session: RemotingSession, _: RemotingCommand) -> Answer:
        """Return all modes that were set (402)."""
        demand(session.principal, Action.INSPECT)
        return Answer(body=(fastjson.encode(self._context.modes.content()),))

    # -- queues -------------------------------------------------------------------------------------------------------

    def assign(self, session: RemotingSession, request: RemotingCommand) -> Answer | None:
        """Return the queues of a member (400), or ``null`` when it should keep what it has: it is not a member of the group
        here, no queue of the topic is known, or there is no strategy of this name."""
        query = decode_assignment_query(request.body)
        demand(session.principal, Action.CONSUME, query.group)
        demand(session.principal, Action.SUBSCRIBE, query.topic)
        try:
            route = self._routes.known(query.topic)
        except UnknownTopic:
            route = NOWHERE
        if route is not None:
            return self._assigned(query, route)
        self._later.run(session, request, partial(self._ask_first, query))
        return None

    def _ask_first(self, query: AssignmentQuery) -> Answer:
        try:
            route = self._routes.fetch(query.topic)
        except UnknownTopic:
            route = NOWHERE
        except ConnectionFailed:  # the share of a member cannot be told without the other brokers' queues
            return Answer(body=(NOT_NOW,))
        return self._assigned(query, route)

    def _assigned(self, query: AssignmentQuery, route: TopicRoute) -> Answer:
        queues = self._queues(query.topic, route)
        if not queues:
            return Answer(body=(NOT_NOW,))
        if query.broadcasting:
            return Answer(body=(encode_assignments(queues, Mode.PULL),))
        mode = self._context.modes.get(query.topic, query.group)
        return Answer(body=(encode_assignments(self._share(query, queues, mode), mode.mode),))

    def _share(self, query: AssignmentQuery, queues: list[MessageQueue], mode: RequestMode) -> list[MessageQueue] | None:
        strategy = AVERAGE if query.topic.startswith(RETRY_PREFIX) else query.strategy
        group = self._context.clients.consumer_group(query.group)
        if group is None or strategy not in STRATEGIES:
            return None
        if mode.mode is Mode.POP:
            return popped(strategy, query.client_id, queues, group.client_ids, mode.pop_share)
        return pulled(strategy, query.client_id, queues, group.client_ids)

    def _queues(self, name: str, route: TopicRoute) -> list[MessageQueue]:
        """Return the readable queues of a topic, sorted: this broker's as they are now, the others' as the route has them."""
        broker, topics = self._context.settings.broker_name, self._context.topics
        counts = {data.broker_name: min(data.read_queues, MAX_PARTITIONS) for data in route.queues if data.permission & READ}
        topic = topics.get(name)
        counts[broker] = topic.read_partitions if topic is not None and topics.permission_of(topic) & READ else 0
        return [MessageQueue(name, each, number) for each in sorted(counts) for number in range(counts[each])]
