"""Administration: topics, groups, offsets, messages, brokers."""

import itertools
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from typing import Any, Final, TypeVar

import orjson

from metaq.address import Address
from metaq.client import checks
from metaq.client.admin.offsetexport import OffsetExport
from metaq.client.admin.replicas import ReplicaAdmin
from metaq.client.admin.transactions import TransactionAdmin
from metaq.client.admin.views import (
    BrokerIdentity,
    BrokerView,
    GroupMembers,
    GroupView,
    LagView,
    MemberView,
    MemberWork,
    OffsetChange,
    QueueView,
    TopicView,
    group_row,
    read_group_names,
    read_groups,
    read_identity,
    read_lags,
    read_lines,
    read_members,
    read_object,
    read_producers,
    read_queues,
    read_table,
    read_work,
)
from metaq.client.connecting.core import Core
from metaq.client.connecting.transport import RemotingRequest, ask, call, successful
from metaq.client.consuming.group import ConsumeFrom
from metaq.client.consuming.offsets import QueueEnds
from metaq.client.consuming.pull import PullConsumer
from metaq.client.consuming.records import decode_messages
from metaq.client.message import ReceivedMessage, SendResult, properties_text
from metaq.client.sending.sending import Outgoing, QueueChoice, deliver, send_fields
from metaq.errors import BadRequest, ClientError, Refused, RouteNotFound, RouteProblem
from metaq.message import DEAD_PREFIX, DEFAULT_TOPIC, RETRY_PREFIX, MessageQueue
from metaq.protocol.ids import decode_offset_id
from metaq.protocol.properties import DELAY, RETRY_TOPIC
from metaq.protocol.remoting import headers
from metaq.protocol.remoting.codes import INHERIT, INNER_PRODUCER, MASTER, ORDER_TOPICS, READ, WRITE, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32
from metaq.protocol.remoting.routes import TopicRoute, decode_topic_list, decode_topic_table

TOOLS_GROUP: Final = "TOOLS_CONSUMER"
_END: Final = -1
"""The time that means the end of a queue when offsets are reset."""
_MOST_FOUND: Final = 64
_EVER_MS: Final = (1 << 63) - 1
_POLL_S: Final = 5.0

T = TypeVar("T")


class Admin:
    """The administration of a cluster; made by ``Client.admin``. Threads may share it.

    All methods raise ``Refused`` when a broker refuses, and ``RouteNotFound`` or ``ConnectionFailed`` when a registry or a
    broker cannot be reached.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._ends = QueueEnds(core)

    @property
    def registries(self) -> tuple[str, ...]:
        """The addresses of the registries that it asks."""
        return self._core.routes.registries

    # -- brokers ------------------------------------------------------------------------------------------------------

    def brokers(self) -> list[BrokerView]:
        """Return all broker processes that the registry knows."""
        info = self._core.routes.clusters(self._core.deadline())
        return sorted(
            BrokerView(broker.cluster, broker.name, number, address)
            for broker in info.brokers.values()
            for number, address in broker.addresses.items()
        )

    def masters(self) -> list[BrokerView]:
        """Return the broker processes that are masters."""
        return [broker for broker in self.brokers() if broker.broker_id == MASTER]

    def identity(self, address: str) -> BrokerIdentity:
        """Return which process answers at an address. Servers that are not metaq's refuse with code 3."""
        return read_identity(self._ask(address, Request.IDENTITY).fields)

    def broker_info(self, address: str) -> dict[str, str]:
        """Return a broker's runtime statistics, with its own names and values."""
        return read_table(self._ask(address, Request.GET_BROKER_RUNTIME_INFO).body)

    def broker_config(self, address: str) -> dict[str, str]:
        """Return a broker's settings."""
        return read_lines(self._ask(address, Request.GET_BROKER_CONFIG).body)

    def update_broker_config(self, /, address: str, **values: str) -> None:
        """Change settings of a running broker. The broker decides which ones may change."""
        body = "".join(f"{name}={value}\n" for name, value in values.items())
        self._ask(address, Request.UPDATE_BROKER_CONFIG, None, body.encode())

    def set_broker_writable(self, broker_name: str, *, writable: bool) -> int:
        """Take write permission from all topics of a broker in one registry, or give it back; return how many topics change."""
        code = Request.ADD_WRITE_PERM_OF_BROKER if writable else Request.WIPE_WRITE_PERM_OF_BROKER
        request = RemotingRequest.of(code, headers.BrokerNameOnly(broker_name))
        response = successful(self._core.routes.ask_registry(request, self._core.deadline()))
        return int(response.fields.get("addTopicCount" if writable else "wipeTopicCount", "0"))

    # -- topics -------------------------------------------------------------------------------------------------------

    def topics(self) -> list[str]:
        """Return all topics that the registry knows, including the brokers' own."""
        request = RemotingRequest.of(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        return sorted(decode_topic_list(successful(self._core.routes.ask_registry(request, self._core.deadline())).body))

    def route(self, topic: str) -> TopicRoute:
        """Return the route of a topic as the registry has it now. ``RouteNotFound``."""
        self._core.routes.forget(topic)
        return self._core.routes.route(topic, self._core.deadline())

    def topic_config(self, topic: str) -> list[TopicView]:
        """Return the configuration of a topic on each broker, as far as the route has it."""
        return sorted(
            TopicView(topic, data.broker_name, data.read_queues, data.write_queues, data.permission)
            for data in self.route(topic).queues
        )

    def all_topic_configs(self) -> list[TopicView]:
        """Return the configurations of all topics on all masters, including the brokers' own topics."""
        return sorted(
            TopicView(topic.name, broker.name, topic.read_queues, topic.write_queues, topic.permission, topic.order)
            for broker in self.masters()
            for topic in decode_topic_table(self._ask(broker.address, Request.GET_ALL_TOPIC_CONFIG).body).topics.values()
        )

    def system_topics(self) -> list[str]:
        """Return the topics that belong to the brokers themselves."""
        code = Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER
        return sorted({topic for broker in self.masters() for topic in decode_topic_list(self._ask(broker.address, code).body)})

    def create_topic(
        self,
        topic: str,
        partitions: int = 4,
        *,
        permission: int = READ | WRITE,
        ordered: bool = False,
        broker_names: tuple[str, ...] = (),
    ) -> None:
        """Create or change a topic on all masters, or on those of ``broker_names``; ``BadRequest`` for invalid arguments."""
        checks.topic(topic)
        checks.partitions(partitions)
        checks.number("permission", permission, 0, READ | WRITE | INHERIT)
        count = Int32(partitions)
        header = headers.CreateTopic(topic, DEFAULT_TOPIC, count, count, Int32(permission), order=ordered)
        brokers = self._chosen(broker_names)
        if ordered:
            # brokers get the configuration of ordered topics from the registries with every registration
            shares = ";".join(f"{broker.name}:{partitions}" for broker in brokers)
            self._tell_registries(Request.PUT_KV_CONFIG, headers.KvPair(ORDER_TOPICS, topic, shares))
        for broker in brokers:
            self._ask(broker.address, Request.UPDATE_AND_CREATE_TOPIC, header)
        self._core.routes.forget(topic)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its messages, on all masters and in all registries."""
        for broker in self._chosen(()):
            self._ask(broker.address, Request.DELETE_TOPIC_IN_BROKER, headers.TopicOnly(topic))
        self._tell_registries(Request.DELETE_TOPIC_IN_NAMESRV, headers.DeleteTopicInRegistry(topic))
        self._core.routes.forget(topic)

    def readable(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the queues of a topic that consumers can read. ``RouteNotFound``."""
        self._core.routes.forget(topic)
        return self._core.routes.readable(topic, self._core.deadline())

    def queues(self, topic: str) -> list[QueueView]:
        """Return the offsets and the last store time of each queue of a topic."""
        return self._on_topic(topic, Request.GET_TOPIC_STATS_INFO, headers.TopicOnly(topic), read_queues)

    # -- groups -------------------------------------------------------------------------------------------------------

    def groups(self) -> list[GroupView]:
        """Return all consumer groups, each with the configuration of the first master that knows it."""
        found: dict[str, GroupView] = {}
        for broker in self.masters():
            for group in self.groups_at(broker.address):
                found.setdefault(group.name, group)
        return sorted(found.values())

    def groups_at(self, address: str) -> list[GroupView]:
        """Return all consumer groups with their configuration at one broker."""
        return read_groups(self._ask(address, Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG).body)

    def groups_of_topic(self, topic: str) -> list[str]:
        """Return the groups that consume a topic or did so before."""
        header = headers.TopicOnly(topic)
        return sorted(set(self._on_topic(topic, Request.QUERY_TOPIC_CONSUME_BY_WHO, header, read_group_names)))

    def update_group(self, group: GroupView) -> None:
        """Create a group, or change its configuration, on all masters."""
        for broker in self.masters():
            self._ask(broker.address, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, None, orjson.dumps(group_row(group)))

    def delete_group(self, group: str, *, with_offsets: bool = True) -> None:
        """Delete a group with its retry topic and its dead-letter topic, and by default with its offsets."""
        header = headers.DeleteGroup(group, with_offsets, with_offsets)
        for broker in self.masters():
            self._ask(broker.address, Request.DELETE_SUBSCRIPTIONGROUP, header)
        for prefix in (RETRY_PREFIX, DEAD_PREFIX):
            self.delete_topic(f"{prefix}{group}")

    def topics_of_group(self, group: str) -> list[str]:
        """Return the topics that a group subscribes to or has offsets of, including its retry topic."""
        header = headers.GroupOnly(group)
        code = Request.QUERY_TOPICS_BY_CONSUMER
        bodies = [self._ask(broker.address, code, header).body for broker in self.masters()]
        return sorted({topic for body in bodies for topic in decode_topic_list(body)})

    def members(self, group: str) -> GroupMembers | None:
        """Return the members of a group and their subscriptions; ``None`` when no member is connected."""
        found: GroupMembers | None = None
        for broker in self.masters():
            seen = self.members_at(broker.address, group)
            if found is not None and seen is not None:
                seen = seen._replace(members=tuple(sorted({*found.members, *seen.members})))
            found = seen or found
        return found

    def members_at(self, address: str, group: str) -> GroupMembers | None:
        """Return the members of a group that are connected to one broker; ``None`` when there are none."""
        request = RemotingRequest.of(Request.GET_CONSUMER_CONNECTION_LIST, headers.ConsumerGroupOnly(group))
        response = call(self._core.transport, address, request, self._core.deadline())
        return None if response.code == Response.CONSUMER_NOT_ONLINE else read_members(successful(response).body)

    def producers(self) -> dict[str, list[MemberView]]:
        """Return the connected producers by group."""
        found: dict[str, set[MemberView]] = {}
        for broker in self.masters():
            for group, members in read_producers(self._ask(broker.address, Request.GET_ALL_PRODUCER_INFO).body).items():
                found.setdefault(group, set()).update(members)
        return {group: sorted(found[group]) for group in sorted(found)}

    def member_state(self, group: str, client_id: str) -> dict[str, Any]:
        """Return the state that a member reports, with RocketMQ's names; ``Refused`` when the member is not connected."""
        header = headers.RunningInfo(group, client_id)
        return self._first(lambda address: read_object(self._ask(address, Request.GET_CONSUMER_RUNNING_INFO, header).body))

    def member_work(self, group: str, client_id: str) -> MemberWork:
        """Return the known parts of the state that a member reports; ``Refused`` when the member is not connected."""
        header = headers.RunningInfo(group, client_id)
        return self._first(lambda address: read_work(self._ask(address, Request.GET_CONSUMER_RUNNING_INFO, header).body))

    def group_lag(self, group: str, topic: str | None = None) -> list[LagView]:
        """Return a group's lag in each queue of a topic, or of all its topics, on all masters."""
        return sorted(lag for broker in self.masters() for lag in self.lag_at(broker.address, group, topic))

    def lag_at(self, address: str, group: str, topic: str | None = None) -> list[LagView]:
        """Return a group's lag in each queue of one broker."""
        return read_lags(self._ask(address, Request.GET_CONSUME_STATS, headers.ConsumeStats(group, topic)).body)

    def offsets(self, group: str, topic: str) -> dict[MessageQueue, int]:
        """Return the offsets that a group has committed in the queues of a topic."""
        return {view.queue: view.committed for view in self.group_lag(group, topic)}

    def reset_offset(
        self,
        group: str,
        topic: str,
        to: ConsumeFrom | datetime | int,
        *,
        partitions: Collection[int] | None = None,
        apply: bool = False,
    ) -> list[OffsetChange]:
        """Reset a group's offsets in a topic, and return the changes; without ``apply`` only return what would change.

        Args:
            to: the beginning, the end, the first message stored at a time or later, or an offset. An offset that a partition
                does not have becomes the nearer end of the partition.
            partitions: the numbers of the partitions to reset; by default all.
            apply: reset the offsets. Connected members continue at the new offsets at once; they may still finish messages
                that they are consuming.
        """
        if isinstance(to, bool) or not isinstance(to, int):
            checks.choice("to", to, ConsumeFrom, or_time=True)
        before = self.offsets(group, topic)
        deadline = self._core.deadline()
        queues = [
            queue
            for queue in self._core.routes.readable(topic, deadline)
            if partitions is None or queue.partition in partitions
        ]
        changes = [OffsetChange(queue, before.get(queue), self._target(queue, to, deadline)) for queue in sorted(queues)]
        if apply:
            if partitions is None and not isinstance(to, int):
                self._reset_topic(group, topic, to, changes)
            else:
                self._reset_queues(group, topic, changes)
        return changes

    def _target(self, queue: MessageQueue, to: ConsumeFrom | datetime | int, deadline: float) -> int:
        if isinstance(to, datetime):
            return self._ends.at_time(queue, round(to.timestamp() * 1000), deadline)
        if isinstance(to, int):
            return min(max(to, self._ends.begin(queue, deadline)), self._ends.end(queue, deadline))
        return self._ends.begin(queue, deadline) if to is ConsumeFrom.FIRST else self._ends.end(queue, deadline)

    def _reset_topic(self, group: str, topic: str, to: ConsumeFrom | datetime, changes: list[OffsetChange]) -> None:
        """Reset all partitions of each broker with one request; this is the only form that RocketMQ 4.x brokers know."""
        edges = {ConsumeFrom.FIRST: 0, ConsumeFrom.LAST: _END}
        time_ms = round(to.timestamp() * 1000) if isinstance(to, datetime) else edges[to]
        for broker_name in sorted({change.queue.broker_name for change in changes}):
            header = headers.ResetOffset(topic, group, time_ms, is_force=True)
            self._reset(broker_name, header, [change for change in changes if change.queue.broker_name == broker_name])

    def _reset_queues(self, group: str, topic: str, changes: list[OffsetChange]) -> None:
        """Reset each partition with a request of its own, as RocketMQ 5.x does."""
        for change in changes:
            queue = change.queue
            header = headers.ResetOffset(topic, group, _END, True, Int32(queue.partition), change.after)
            self._reset(queue.broker_name, header, [change])

    def _reset(self, broker_name: str, header: headers.ResetOffset, changes: list[OffsetChange]) -> None:
        """Have a broker reset offsets and inform the members; when none is connected, commit the offsets for the group."""
        address = self._core.master(broker_name)
        request = RemotingRequest.of(Request.INVOKE_BROKER_TO_RESET_OFFSET, header)
        response = call(self._core.transport, address, request, self._core.deadline())
        if response.code != Response.CONSUMER_NOT_ONLINE:
            successful(response)
            return
        for change in changes:
            offset = headers.UpdateConsumerOffset(header.group, header.topic, Int32(change.queue.partition), change.after)
            self._ask(address, Request.UPDATE_CONSUMER_OFFSET, offset)

    # -- messages -----------------------------------------------------------------------------------------------------

    def query_by_key(
        self,
        topic: str,
        key: str,
        *,
        most: int = 32,
        begin: datetime | None = None,
        end: datetime | None = None,
    ) -> list[ReceivedMessage]:
        """Return the newest ``most`` messages of a topic that have a key, the oldest first. Each broker looks at 64 at most."""
        checks.text("key", key)
        checks.number("most", most, 1)
        found = self._query(topic, key, most, _ms(begin, 0), _ms(end, _EVER_MS), {})
        return [message for message in found if key in message.keys][-most:]

    def query_by_id(self, topic: str, message_id: str) -> list[ReceivedMessage]:
        """Return the messages with the id that their sender made: usually one, or the deliveries of one message."""
        found = self._query(topic, message_id, _MOST_FOUND, 0, _EVER_MS, {"_UNIQUE_KEY_QUERY": "true"})
        return [message for message in found if message.id == message_id]

    def query_by_offset_id(self, offset_id: str) -> ReceivedMessage | None:
        """Return the message with the id that its broker made; ``None`` when that broker does not have it (any more)."""
        where = decode_offset_id(offset_id)
        address = str(Address(where.address, where.port))
        known = {broker.address: broker.name for broker in self.brokers()}
        request = RemotingRequest.of(Request.VIEW_MESSAGE_BY_ID, headers.ViewMessage(where.log_offset))
        response = call(self._core.transport, address, request, self._core.deadline())
        if response.code == Response.SYSTEM_ERROR:
            return None
        return decode_messages(successful(response).body, known.get(address, ""), most=self._core.max_inflated_bytes)[0]

    def query_by_time(self, topic: str, begin: datetime, end: datetime | None = None) -> Iterator[ReceivedMessage]:
        """Yield the messages of a topic that were stored from ``begin`` on and before ``end``, partition after partition."""
        for queue in self._core.routes.readable(topic, self._core.deadline()):
            deadline = self._core.deadline()
            first = self._ends.at_time(queue, _ms(begin, 0), deadline)
            behind = self._ends.end(queue, deadline) if end is None else self._ends.at_time(queue, _ms(end, 0), deadline)
            yield from self.read(queue, first, behind)

    def dead_letters(self, group: str, *, most: int | None = None) -> list[ReceivedMessage]:
        """Return a group's dead letters, partition after partition, the oldest first, and at most ``most`` of them."""
        topic = f"{DEAD_PREFIX}{group}"
        try:
            queues = self._core.routes.readable(topic, self._core.deadline())
        except RouteNotFound as error:
            if error.retriable:
                raise
            return []  # the first dead letter creates the topic
        found: list[ReceivedMessage] = []
        for queue in queues:
            deadline = self._core.deadline()
            letters = self.read(queue, self._ends.begin(queue, deadline), self._ends.end(queue, deadline))
            found += itertools.islice(letters, None if most is None else most - len(found))
        return found

    def replay(self, group: str, dead_letter: ReceivedMessage) -> SendResult:
        """Send a copy of a dead letter to its group, as if for the first time; ``BadRequest`` when it is not a dead letter."""
        topic = f"{RETRY_PREFIX}{group}"
        origin = dead_letter.properties.get(RETRY_TOPIC)
        if origin is None:
            raise BadRequest(f"{dead_letter!r} does not say which topic it came from; is it a dead letter?")
        properties = {name: value for name, value in dead_letter.properties.items() if name != DELAY}
        body, sys_flag = dead_letter.packed()
        fields = send_fields(INNER_PRODUCER, topic, properties_text(properties), sys_flag, dead_letter.flag)
        outgoing = Outgoing(topic, fields, body, Request.SEND_MESSAGE_V2, (dead_letter.id,), None)
        return deliver(
            self._core.transport, QueueChoice(self._core.routes, self._core.health), outgoing, self._core.deadline()
        )[0]

    def read(self, queue: MessageQueue, first: int, end: int) -> Iterator[ReceivedMessage]:
        """Yield the messages of a queue from offset ``first`` on and before ``end``; ``ClientError`` when none come for 5 s."""
        with PullConsumer(self._core, queue.topic, TOOLS_GROUP) as consumer:
            consumer.read_from(queue, first)
            while consumer.position(queue) < end:
                messages = consumer.poll(timeout_s=_POLL_S)
                if not messages and consumer.position(queue) < end:
                    raise ClientError(
                        f"{queue} gave nothing for {_POLL_S} s at {consumer.position(queue)}, before its end {end}"
                    )
                yield from (message for message in messages if message.queue_offset < end)

    def _query(
        self, topic: str, key: str, most: int, begin_ms: int, end_ms: int, marks: dict[str, str]
    ) -> list[ReceivedMessage]:
        header = headers.QueryMessage(topic, key, Int32(most), begin_ms, end_ms)
        request = RemotingRequest(Request.QUERY_MESSAGE, {**headers.encode_header(header), **marks})
        found: list[ReceivedMessage] = []
        for broker_name in sorted({data.broker_name for data in self.route(topic).queues}):
            response = call(self._core.transport, self._core.master(broker_name), request, self._core.deadline())
            if response.code != Response.QUERY_NOT_FOUND:
                found += decode_messages(successful(response).body, broker_name, most=self._core.max_inflated_bytes)
        return sorted(found, key=lambda message: (message.store_ms, message.queue))

    # -- transactions -------------------------------------------------------------------------------------------------

    def transactions(self) -> TransactionAdmin:
        """Return the administration of undecided XA branches and transactional messages."""
        return TransactionAdmin(self._core)

    def replicas(self) -> ReplicaAdmin:
        """Return the administration of replicas and their roles."""
        return ReplicaAdmin(self._core)

    def offset_export(self) -> OffsetExport:
        """Return the export of all groups' offsets, now and in the past."""
        return OffsetExport(self._core, self.query_by_time)

    # -- asking -------------------------------------------------------------------------------------------------------

    def _ask(self, address: str, code: Request, header: tuple[object, ...] | None = None, body: bytes = b"") -> RemotingCommand:
        return ask(self._core.transport, address, RemotingRequest.of(code, header, body), self._core.deadline())

    def _tell_registries(self, code: Request, header: tuple[object, ...]) -> None:
        """Send a request to every registry, because registries do not share their state."""
        for address in self._core.routes.registries:
            self._ask(address, code, header)

    def _chosen(self, broker_names: tuple[str, ...]) -> list[BrokerView]:
        masters = self.masters()
        if not masters:
            details = f"{', '.join(self.registries)} answered, and none of them names a master; nothing was changed"
            raise RouteNotFound("(any)", RouteProblem.NO_LIVE_MASTER, details)
        if strangers := set(broker_names) - {broker.name for broker in masters}:
            raise BadRequest(f"no master of broker {min(strangers)}; there are {', '.join(broker.name for broker in masters)}")
        return [broker for broker in masters if not broker_names or broker.name in broker_names]

    def _on_topic(self, topic: str, code: Request, header: tuple[object, ...], read: Callable[[bytes], list[T]]) -> list[T]:
        """Return the answers of all masters that have a topic, as one list."""
        found: list[T] = []
        for broker_name in sorted({data.broker_name for data in self.route(topic).queues}):
            found += read(self._ask(self._core.master(broker_name), code, header).body)
        return found

    def _first(self, ask_one: Callable[[str], T]) -> T:
        """Return the answer of the first master that does not refuse; ``Refused`` when all do."""
        refused: Refused | None = None
        for broker in self.masters():
            try:
                return ask_one(broker.address)
            except Refused as error:
                refused = error
        raise refused if refused is not None else ClientError("the registry knows no master")


def _ms(when: datetime | None, otherwise: int) -> int:
    return otherwise if when is None else round(when.timestamp() * 1000)
