"""Administration: topics and their queues."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from metaq.client import checks
from metaq.client.admin.brokers import BrokerAdmin
from metaq.client.admin.views import BrokerView, QueueView, TopicView, read_queues
from metaq.client.connecting.transport import RemotingRequest, successful
from metaq.errors import BadRequest, ClientError, RouteNotFound, RouteProblem
from metaq.message import DEFAULT_TOPIC, LONGEST_WINDOW_MS, MAX_PARTITIONS, MessageQueue
from metaq.protocol.remoting import headers
from metaq.protocol.remoting.attributes import (
    DEDUPE_WINDOW_MS,
    MESSAGE_TYPE,
    NORMAL_TYPE,
    PRIORITY_MAX_WAIT_MS,
    PRIORITY_TYPE,
    write_changes,
)
from metaq.protocol.remoting.codes import INHERIT, ORDER_TOPICS, READ, WRITE, Request, Response
from metaq.protocol.remoting.headers import Int32
from metaq.protocol.remoting.routes import TopicConfig, TopicRoute, decode_topic, decode_topic_list, decode_topic_table

T = TypeVar("T")


def _by_broker(partitions: int | Mapping[str, int], names: Sequence[str]) -> dict[str, int]:
    """Return the number of partitions on each broker. ``BadRequest`` for one that cannot be, or where none is given."""
    if not isinstance(partitions, Mapping):
        return dict.fromkeys(names, partitions)
    if strangers := set(names) - partitions.keys():
        raise BadRequest(f"partitions has no number for broker {min(strangers)}")
    for count in partitions.values():
        checks.number("partitions", count, 0, MAX_PARTITIONS)
    return {name: partitions[name] for name in names}


class TopicAdmin(BrokerAdmin):
    """The administration of topics, on top of that of brokers."""

    def topics(self) -> list[str]:
        """Return all topics that the registry knows, including the brokers' own.

        Raises:
            RouteNotFound: no registry answers.
        """
        request = RemotingRequest.of(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        return sorted(decode_topic_list(successful(self._core.routes.ask_registry(request, self._core.deadline())).body))

    def route(self, topic: str) -> TopicRoute:
        """Return the route of a topic as the registry has it now.

        Args:
            topic: the name of the topic.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
        """
        self._core.routes.forget(topic)
        return self._core.routes.route(topic, self._core.deadline())

    def topic_config(self, topic: str) -> list[TopicView]:
        """Return the configuration of a topic on each broker, as far as the route has it.

        Args:
            topic: the name of the topic.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
        """
        return sorted(
            TopicView(topic, data.broker_name, data.read_queues, data.write_queues, data.permission)
            for data in self.route(topic).queues
        )

    def all_topic_configs(self) -> list[TopicView]:
        """Return the configurations of all topics on all masters, including the brokers' own topics.

        Raises:
            RouteNotFound: no registry answers.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return sorted(
            TopicView(
                topic=topic.name,
                broker_name=broker.name,
                read_partitions=topic.read_queues,
                write_partitions=topic.write_queues,
                permission=topic.permission,
                ordered=topic.order,
                priority=topic.attributes.get(MESSAGE_TYPE) == PRIORITY_TYPE,
            )
            for broker in self.masters()
            for topic in decode_topic_table(self._ask(broker.address, Request.GET_ALL_TOPIC_CONFIG).body).topics.values()
        )

    def system_topics(self) -> list[str]:
        """Return the topics that belong to the brokers themselves.

        Raises:
            RouteNotFound: no registry answers.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        code = Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER
        return sorted({topic for broker in self.masters() for topic in decode_topic_list(self._ask(broker.address, code).body)})

    def create_topic(
        self,
        topic: str,
        partitions: int | Mapping[str, int] = 4,
        *,
        permission: int | None = None,
        ordered: bool = False,
        priority: bool | None = None,
        priority_max_wait_ms: int | None = None,
        dedupe_window_ms: int | None = None,
        broker_names: tuple[str, ...] = (),
    ) -> None:
        """Create or change a topic on all masters, or on those of ``broker_names``.

        Args:
            topic: its name.
            partitions: those that take messages, on each broker, or by the name of the broker, where 0 is allowed, too; in a
                topic with priorities they are the levels. What the others have is still to be read.
            permission: the sum of 4 to read and 2 to write; by default as before on each broker, or both in a new topic.
            ordered: mark it as ordered in the registries.
            priority: whether each partition is a level of priority, the greater the more urgent; by default as before.
            priority_max_wait_ms: how long a message waits before its partition is served first; 0: for ever.
            dedupe_window_ms: how long a message is not stored again under an id that was stored; 0: it always is.
            broker_names: the masters to ask; by default all.

        Raises:
            BadRequest: an argument is invalid.
            RouteNotFound: no registry answers, or none names a master; nothing was changed then.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        checks.topic(topic)
        if not isinstance(partitions, Mapping):
            checks.partitions(partitions)
        if permission is not None:
            checks.number("permission", permission, 0, READ | WRITE | INHERIT)
        changes = {}
        if priority is not None:
            checks.flag("priority", priority)
            changes[f"+{MESSAGE_TYPE}"] = PRIORITY_TYPE if priority else NORMAL_TYPE
        if priority_max_wait_ms is not None:
            checks.number("priority_max_wait_ms", priority_max_wait_ms)
            changes[f"+{PRIORITY_MAX_WAIT_MS}"] = str(priority_max_wait_ms)
        if dedupe_window_ms is not None:
            checks.number("dedupe_window_ms", dedupe_window_ms, 0, LONGEST_WINDOW_MS)
            changes[f"+{DEDUPE_WINDOW_MS}"] = str(dedupe_window_ms)
        brokers = self._chosen(broker_names)
        counts = _by_broker(partitions, [broker.name for broker in brokers])
        if ordered:
            # brokers get the configuration of ordered topics from the registries with every registration
            shares = ";".join(f"{name}:{count}" for name, count in counts.items())
            self._tell_registries(Request.PUT_KV_CONFIG, headers.KvPair(ORDER_TOPICS, topic, shares))
        for broker in brokers:
            count = counts[broker.name]
            before = self._known(broker, topic) or TopicConfig(topic, count, count)
            wanted = before._replace(
                # what the partitions have that take no more messages is still to be read
                read_queues=before.read_queues if count == before.write_queues else max(count, before.read_queues),
                write_queues=count,
                permission=before.permission if permission is None else permission,
                order=before.order or ordered,
            )
            self._put(broker, wanted, changes)
        self._core.routes.forget(topic)

    def delete_topic(self, topic: str) -> None:
        """Delete a topic with its messages, on all masters and in all registries.

        An error of a registry is raised when the others have deleted it; it may be deleted again.

        Args:
            topic: the name of the topic.

        Raises:
            RouteNotFound: no registry answers, or none names a master; nothing was changed then.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        for broker in self._chosen(()):
            self._ask(broker.address, Request.DELETE_TOPIC_IN_BROKER, headers.TopicOnly(topic))
        try:
            self._tell_registries(Request.DELETE_TOPIC_IN_NAMESRV, headers.DeleteTopicInRegistry(topic))
        except ClientError as error:
            error.add_note(f"the brokers have deleted {topic}, and so have the registries that answer")
            raise
        finally:
            self._core.routes.forget(topic)

    def readable(self, topic: str) -> tuple[MessageQueue, ...]:
        """Return the queues of a topic that consumers can read.

        Args:
            topic: the name of the topic.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
        """
        self._core.routes.forget(topic)
        return self._core.routes.readable(topic, self._core.deadline())

    def queues(self, topic: str) -> list[QueueView]:
        """Return the offsets and the last store time of each queue of a topic.

        Args:
            topic: the name of the topic.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return self._on_topic(topic, Request.GET_TOPIC_STATS_INFO, headers.TopicOnly(topic), read_queues)

    def _chosen(self, broker_names: tuple[str, ...]) -> list[BrokerView]:
        masters = self.masters()
        if not masters:
            details = f"{', '.join(self.registries)} answered, and none of them names a master; nothing was changed"
            raise RouteNotFound("", RouteProblem.NO_LIVE_MASTER, details)
        if strangers := set(broker_names) - {broker.name for broker in masters}:
            raise BadRequest(
                f"there is no master of broker {min(strangers)}; there are {', '.join(broker.name for broker in masters)}"
            )
        return [broker for broker in masters if not broker_names or broker.name in broker_names]

    def _known(self, broker: BrokerView, topic: str) -> TopicConfig | None:
        """Return a topic as a broker has it, whatever the broker itself permits; ``None`` when it has none, or cannot say."""
        request = RemotingRequest.of(Request.GET_TOPIC_CONFIG, headers.TopicOnly(topic))
        answer = self._core.transport.call(broker.address, request, self._core.deadline())
        if answer.code in (Response.REQUEST_CODE_NOT_SUPPORTED, Response.TOPIC_NOT_EXIST):  # RocketMQ before version 5
            return None
        return decode_topic(successful(answer).body)

    def _put(self, broker: BrokerView, topic: TopicConfig, changes: Mapping[str, str]) -> None:
        """Create a topic on a broker or change it there, with these changes of its attributes."""
        header = headers.CreateTopic(
            topic.name,
            DEFAULT_TOPIC,
            Int32(topic.read_queues),
            Int32(topic.write_queues),
            Int32(topic.permission),
            topic_sys_flag=Int32(topic.sys_flag),
            order=topic.order,
            attributes=write_changes(changes) or None,
        )
        self._ask(broker.address, Request.UPDATE_AND_CREATE_TOPIC, header)

    def _on_topic(self, topic: str, code: Request, header: tuple[object, ...], read: Callable[[bytes], list[T]]) -> list[T]:
        """Return the answers of all masters that have a topic, as one list."""
        found: list[T] = []
        for broker_name in sorted({data.broker_name for data in self.route(topic).queues}):
            found += read(self._ask(self._core.master(broker_name), code, header).body)
        return found
