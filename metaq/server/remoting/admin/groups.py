"""Groups and their connections, for administrators: 200, 201, 207, 352, 203, 204, 328, 300, 343, 345.

(Specs: remoting protocol, section 3.3.)
"""

from collections.abc import Callable, Iterable
from functools import partial

from metaq.address import Address
from metaq.engine.context import Context
from metaq.engine.duties import Duties
from metaq.engine.tables.consumergroup import ConsumerGroup, Member
from metaq.engine.tables.groups import Group, group_of, with_changes
from metaq.errors import BadRequest, RequestFailed
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.adminbodies import (
    ConnectedClient,
    encode_all_producers,
    encode_consumers,
    encode_group_list,
    encode_producers,
    encode_subscription,
)
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import (
    ConsumerGroupOnly,
    DeleteGroup,
    GroupAndTopic,
    GroupOnly,
    ProducerGroupOnly,
    TopicOnly,
    decode_header,
)
from metaq.protocol.remoting.routes import encode_topic_list
from metaq.server.access.permissions import Action, demand
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import DONE, Answer, RemotingSession, RequestHandler


class GroupAdminHandler:
    """Creates, shows and deletes subscription groups, and shows connected clients. A change is confirmed when it is durable."""

    def __init__(self, context: Context, duties: Duties, later: Later, forget_pops: Callable[[str], None]) -> None:
        """Create it; ``forget_pops`` drops what is kept about the pops of a group that is deleted."""
        self._context = context
        self._forget_pops = forget_pops
        self._groups = context.groups
        self._clients = context.clients
        self._duties = duties
        self._later = later
        self._started_ms = context.store.clock.now_ms()

    def requests(self) -> dict[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {
            Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: self.put,
            Request.DELETE_SUBSCRIPTIONGROUP: self.delete,
            Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: self.all_groups,
            Request.GET_SUBSCRIPTIONGROUP_CONFIG: self.group,
            Request.GET_CONSUMER_CONNECTION_LIST: self.consumers,
            Request.GET_PRODUCER_CONNECTION_LIST: self.producers,
            Request.GET_ALL_PRODUCER_INFO: self.all_producers,
            Request.QUERY_TOPIC_CONSUME_BY_WHO: self.groups_of_topic,
            Request.QUERY_TOPICS_BY_CONSUMER: self.topics_of_group,
            Request.QUERY_SUBSCRIPTION_BY_CONSUMER: self.subscription,
        }

    # -- groups -------------------------------------------------------------------------------------------------------

    def put(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Create or change a subscription group (200)."""
        row = fastjson.decode_plain(request.body)
        if not isinstance(row, dict):
            raise BadRequest("the body is not a subscription group")
        group = group_of(row)
        demand(session.principal, Action.ADMINISTER, group.name)
        self._later.run(session, request, partial(self._put, group))

    def _put(self, group: Group) -> Answer:
        self._groups.put(with_changes(group, self._groups.get(group.name)))
        self._duties.save_groups()
        return DONE

    def delete(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Delete a subscription group, and its offsets if requested (207)."""
        header = decode_header(DeleteGroup, request.fields)
        name = header.group_name
        demand(session.principal, Action.ADMINISTER, name)
        if self._groups.is_system(name):
            raise RequestFailed(Response.SYSTEM_ERROR, f"the group {name} belongs to the broker: it cannot be deleted")
        self._later.run(session, request, partial(self._delete, name, offsets=header.remove_offset or header.clean_offset))

    def _delete(self, name: str, *, offsets: bool) -> Answer:
        self._groups.remove(name)
        self._context.statistics.forget(group=name)
        self._context.modes.forget(group=name)
        self._forget_pops(name)
        if offsets:
            self._context.offsets.remove(name)
        self._duties.save_groups()
        self._duties.save_modes()
        return DONE

    def all_groups(self, session: RemotingSession, _: RemotingCommand) -> Answer:
        """Return all subscription groups (201)."""
        demand(session.principal, Action.INSPECT)
        return Answer(body=(fastjson.encode(self._groups.content(self._started_ms)),))

    def group(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return one subscription group (352)."""
        name = decode_header(GroupOnly, request.fields).group
        demand(session.principal, Action.INSPECT, name)
        group = self._groups.get(name)
        if group is None:
            raise RequestFailed(Response.SUBSCRIPTION_GROUP_NOT_EXIST, f"the group {name} does not exist on this broker")
        return Answer(body=(fastjson.encode(group.row()),))

    # -- connections --------------------------------------------------------------------------------------------------

    def consumers(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the connected consumers of a group, with their subscriptions and the differences between them (203)."""
        group = self._online(session, decode_header(ConsumerGroupOnly, request.fields).consumer_group)
        connections = self._connections(group.members.values())
        differences = {difference.topic: difference.wanted for difference in group.differences}
        return Answer(body=(encode_consumers(connections, group.latest, group.subscriptions, differences),))

    def producers(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the connected producers of a group (204)."""
        name = decode_header(ProducerGroupOnly, request.fields).producer_group
        demand(session.principal, Action.INSPECT, name)
        members = self._clients.producers(name)
        if not members:
            raise RequestFailed(Response.SYSTEM_ERROR, f"no producer of the group {name} is connected")
        return Answer(body=(encode_producers(self._connections(members)),))

    def all_producers(self, session: RemotingSession, _: RemotingCommand) -> Answer:
        """Return all connected producers, by group (328)."""
        demand(session.principal, Action.INSPECT)
        groups = {name: self._connections(self._clients.producers(name)) for name in self._clients.producer_groups()}
        return Answer(body=(encode_all_producers(groups),))

    def _online(self, session: RemotingSession, name: str) -> ConsumerGroup:
        demand(session.principal, Action.INSPECT, name)
        group = self._clients.consumer_group(name)
        if group is None:
            raise RequestFailed(Response.CONSUMER_NOT_ONLINE, f"no consumer of the group {name} is connected")
        return group

    def _connections(self, members: Iterable[Member]) -> list[ConnectedClient]:
        clock = self._context.store.clock
        now_ms, now_s = clock.now_ms(), clock.monotonic()
        return [
            ConnectedClient(
                str(Address(*member.session.address[:2])), *member.client, now_ms - round((now_s - member.beat_s) * 1000)
            )
            for member in members
        ]

    # -- who consumes what --------------------------------------------------------------------------------------------

    def groups_of_topic(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the groups of a topic: those that subscribe to it, and those that have offsets (300)."""
        topic = decode_header(TopicOnly, request.fields).topic
        demand(session.principal, Action.INSPECT, topic)
        groups = {*self._clients.consumers_of(topic), *self._context.offsets.groups_of(topic)}
        return Answer(body=(encode_group_list(sorted(groups)),))

    def topics_of_group(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return the topics to which a group subscribes, or in which it has offsets (343)."""
        name = decode_header(GroupOnly, request.fields).group
        demand(session.principal, Action.INSPECT, name)
        return Answer(body=(encode_topic_list(sorted(topics_of_group(self._context, name))),))

    def subscription(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return a group's subscription to a topic (345)."""
        header = decode_header(GroupAndTopic, request.fields)
        demand(session.principal, Action.INSPECT, header.group)
        group, topic = self._clients.consumer_group(header.group), header.topic or ""
        subscription = None if group is None else group.subscriptions.get(topic)
        return Answer(body=(encode_subscription(header.group, topic, subscription),))


def topics_of_group(context: Context, group: str) -> set[str]:
    """Return the topics to which a group subscribes, or in which it has offsets."""
    online = context.clients.consumer_group(group)
    return {*context.offsets.topics_of(group), *(() if online is None else online.subscriptions)}
