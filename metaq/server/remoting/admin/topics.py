"""Topics, for administrators: 17, 215, 21, 351, 202, 305, clean-up: 306, 316, 329 (specs: remoting protocol, section 3.3).

A topic is deleted at once, together with its consumers' offsets. Its messages stay in the log until retention deletes them, but
are no longer visible: a later topic of the same name begins after them, with a minimum offset above 0.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from metaq.config import LONGEST_WINDOW_MS
from metaq.engine.context import Context
from metaq.engine.duties import Duties
from metaq.engine.tables.topics import Topic, config_of
from metaq.errors import BadRequest, RequestFailed, UnknownTopic
from metaq.message import INTERNAL_TOPICS, MessageQueue, TopicPartition
from metaq.protocol.remoting import fastjson
from metaq.protocol.remoting.adminbodies import QueueSpan, encode_topic_stats
from metaq.protocol.remoting.codes import INHERIT, READ, WRITE, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import CreateTopic, TopicOnly, decode_header
from metaq.protocol.remoting.routes import DataVersion, TopicConfigs, encode_topic_list, encode_topic_table, topic_row
from metaq.server.access.permissions import Action, Principal, demand
from metaq.server.remoting.later import Later
from metaq.server.remoting.session import DONE, Answer, RemotingSession, RequestHandler
from metaq.store.files.filecache import Read

WINDOW_ATTRIBUTE: Final = "dedupe.window.ms"
"""The attribute of a topic in requests that is its window (``dedupe_window_ms``)."""
ANY_PERMISSION: Final = READ | WRITE | INHERIT


class TopicsHandler:
    """Creates, shows and deletes topics. A change is in force at once, and is confirmed when it is durable."""

    def __init__(
        self,
        context: Context,
        duties: Duties,
        later: Later,
        forget: Callable[[str], None],
        wait_told: Callable[[], None],
    ) -> None:
        """Prepare. ``forget`` is called with the name of a deleted topic; ``wait_told`` returns when the registries know of
        changes."""
        self._context = context
        self._topics = context.topics
        self._store = context.store
        self._duties = duties
        self._later = later
        self._forget = forget
        self._wait_told = wait_told
        self._started_ms = context.store.clock.now_ms()

    def requests(self) -> dict[int, RequestHandler]:
        """Return the handler methods by request code."""
        return {
            Request.UPDATE_AND_CREATE_TOPIC: self.create,
            Request.DELETE_TOPIC_IN_BROKER: self.delete,
            Request.GET_ALL_TOPIC_CONFIG: self.all_topics,
            Request.GET_TOPIC_CONFIG: self.topic,
            Request.GET_TOPIC_STATS_INFO: self.stats,
            Request.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: self.system_topics,
            Request.CLEAN_EXPIRED_CONSUMEQUEUE: self.clean,
            Request.CLEAN_UNUSED_TOPIC: self.clean,
            Request.DELETE_EXPIRED_COMMITLOG: self.delete_expired,
        }

    # -- changing -----------------------------------------------------------------------------------------------------

    def create(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Create or change a topic (17)."""
        header = decode_header(CreateTopic, request.fields)
        self._check_allowed(session.principal, header.topic)
        self._check_ours(header.topic)
        counts = (header.read_queue_nums, header.write_queue_nums)
        if min(counts) < 0 or max(counts) < 1:  # a topic with no partition to write is being drained
            numbers = f"{header.write_queue_nums} to write, {header.read_queue_nums} to read"
            raise BadRequest(f"the topic {header.topic} needs at least one partition, and no number may be negative: {numbers}")
        if not 0 <= header.perm <= ANY_PERMISSION:
            raise BadRequest(f"perm is {header.perm}, not a sum of {READ} (read), {WRITE} (write) and {INHERIT} (template)")
        topic = Topic(
            name=header.topic,
            partitions=header.write_queue_nums,
            read_partitions=header.read_queue_nums,
            permission=header.perm,
            sys_flag=header.topic_sys_flag,
            order=header.order,
            dedupe_window_ms=self._window_ms(header),
        )
        self._later.run(session, request, partial(self._create, session.principal, topic))

    def _window_ms(self, header: CreateTopic) -> int:
        """Return the window that a topic shall have: the one in the request, else the one that it has."""
        known = self._topics.get(header.topic)
        window_ms = 0 if known is None else known.dedupe_window_ms
        for change in header.attributes.split(","):
            name, _, value = change.strip().partition("=")
            if name == f"-{WINDOW_ATTRIBUTE}":
                window_ms = 0
            elif name == f"+{WINDOW_ATTRIBUTE}":
                if not (value.isascii() and value.isdecimal() and int(value[:18]) <= LONGEST_WINDOW_MS):
                    raise BadRequest(f"{WINDOW_ATTRIBUTE} is {value[:20]!r}, not a number of ms up to {LONGEST_WINDOW_MS}")
                window_ms = int(value)
        return window_ms

    def _check_allowed(self, principal: Principal, name: str) -> None:
        demand(principal, Action.CREATE if self._topics.get(name) is None else Action.ADMINISTER, name)

    def _create(self, principal: Principal, topic: Topic) -> Answer:
        self._check_allowed(principal, topic.name)  # another request may have created it meanwhile
        self._topics.put(topic)
        self._duties.save_topics()
        self._wait_told()  # clients look for the new topic's route next
        return DONE

    def delete(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Delete a topic (215)."""
        name = decode_header(TopicOnly, request.fields).topic
        demand(session.principal, Action.ADMINISTER, name)
        self._check_ours(name)
        self._later.run(session, request, partial(self._delete, name))

    def _delete(self, name: str) -> Answer:
        self._duties.settle()  # should this turn's append fail, it would undo what follows
        queues = {key: queue for key, queue in self._store.queues.items() if key.topic == name}
        for queue in queues.values():
            queue.hide_before(queue.next)
        self._topics.delete(name, {key: queue.next for key, queue in queues.items()})
        self._forget(name)
        self._duties.save_topics()
        return DONE

    def _check_ours(self, name: str) -> None:
        if self._topics.is_system(name) or name in INTERNAL_TOPICS:
            raise RequestFailed(
                Response.SYSTEM_ERROR, f"the topic {name} belongs to the broker: it cannot be changed or deleted"
            )

    def clean(self, session: RemotingSession, _: RemotingCommand) -> Answer:
        """Do nothing (306, 316): nothing is ever left to clean, since queue files are deleted with the log's oldest segment."""
        demand(session.principal, Action.ADMINISTER)
        return DONE

    def delete_expired(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Delete expired segments of the log now (329)."""
        demand(session.principal, Action.ADMINISTER)
        self._later.run(session, request, self._delete_expired)

    def _delete_expired(self) -> Answer:
        self._duties.delete_expired()
        return DONE

    # -- showing ------------------------------------------------------------------------------------------------------

    def all_topics(self, session: RemotingSession, _: RemotingCommand) -> Answer:
        """Return all topics (21)."""
        demand(session.principal, Action.INSPECT)
        configs = {topic.name: config_of(topic, topic.permission) for topic in self._topics}
        table = TopicConfigs(DataVersion(self._started_ms, self._topics.version), configs)
        return Answer(fields={}, body=(encode_topic_table(table),))

    def topic(self, session: RemotingSession, request: RemotingCommand) -> Answer:
        """Return one topic (351)."""
        topic = self._known(session, request)
        return Answer(body=(fastjson.encode(topic_row(config_of(topic, topic.permission))),))

    def system_topics(self, session: RemotingSession, *_: Any) -> Answer:
        """Return the names of the broker's own topics (305)."""
        demand(session.principal, Action.INSPECT)
        return Answer(body=(encode_topic_list(self._topics.of_broker()),))

    def stats(self, session: RemotingSession, request: RemotingCommand) -> None:
        """Return the offsets of each partition of a topic, and when its newest message was stored (202)."""
        self._later.read(session, request, partial(self._stats, self._known(session, request)))

    def _stats(self, topic: Topic, read: Read) -> Answer:
        broker = self._context.settings.broker_name
        spans = {
            MessageQueue(topic.name, broker, number): self._span(topic, number, read) for number in range(topic.all_partitions)
        }
        return Answer(body=(encode_topic_stats(spans),))

    def _span(self, topic: Topic, number: int, read: Read) -> QueueSpan:
        queue = self._store.queues.get(TopicPartition(topic.name, number))
        if queue is None:
            return QueueSpan(0, 0, 0)
        least = self._store.first(queue, read)[0]
        newest = self._store.reader.store_time(queue, queue.readable - 1, read) if least < queue.readable else None
        return QueueSpan(least, queue.readable, newest or 0)

    def _known(self, session: RemotingSession, request: RemotingCommand) -> Topic:
        name = decode_header(TopicOnly, request.fields).topic
        demand(session.principal, Action.INSPECT, name)
        topic = self._topics.get(name)
        if topic is None:
            raise UnknownTopic(f"the topic {name} does not exist on this broker")
        return topic
