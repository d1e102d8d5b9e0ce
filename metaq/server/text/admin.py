"""The text commands ``stats``, ``version``, ``help`` and ``create``, and ``sync``, which is refused."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Protocol

import gevent

import metaq
from metaq.checksum import crc32
from metaq.engine.context import Context
from metaq.engine.figures.counters import Meter
from metaq.engine.tables.topics import Topic
from metaq.errors import AccessDenied, MetaqError, NotWritable, StoreError
from metaq.fields import plain
from metaq.form import FORM
from metaq.message import INTERNAL_TOPICS, TopicPartition
from metaq.protocol.remoting.attributes import MESSAGE_TYPE, PRIORITY_TYPE
from metaq.protocol.remoting.codes import READ, WRITE
from metaq.protocol.text.commands import Create, Help, Stats, Sync, Version
from metaq.protocol.text.replies import FORBIDDEN, OK, UNAVAILABLE, write_result
from metaq.server.access.permissions import Action, allowed, demand, denied
from metaq.server.stacks import stacks
from metaq.server.wire.memory import Memory
from metaq.server.wire.session import Session
from metaq.store.figures import StoreFigures
from metaq.store.files.filecache import ColdRead, Read, read_cached
from metaq.store.queues.consumequeue import ConsumeQueue

HELP: Final = """\
put TOPIC PARTITION LENGTH FLAG [CHECKSUM] OPAQUE, then LENGTH bytes   store a message; partition -1: the broker chooses
put TOPIC PARTITION LENGTH FLAG OPTION=VALUE... OPAQUE                the same with options: priority=N, id=WORD, key=WORD,
                                                                      and delay=MS or at=MS: store one for later; the answer
                                                                      ends with a handle
cancel HANDLE OPAQUE                                                  cancel it
get TOPIC GROUP PARTITION POSITION MAXSIZE OPAQUE [wait=MS]           read messages from a position on
offset TOPIC GROUP PARTITION POSITION OPAQUE                          the valid position nearest to one
subscribe TOPIC GROUP [ready=N] [invisible=MS] [OPAQUE]               have messages pushed, N at once, each leased for MS
ready N [TOPIC GROUP] [OPAQUE]                                        have others at once
unsubscribe TOPIC GROUP [OPAQUE]                                      end it
pop TOPIC GROUP [COUNT] [invisible=MS] [wait=MS] [OPAQUE]             lease messages once
ack ID[,ID...] [OPAQUE]                                               finish leased messages
nack ID[,ID...] [delay=MS | dead] [OPAQUE]                            give them back, or up
extend ID[,ID...] MS [OPAQUE]                                         lease them for longer
create TOPIC PARTITIONS [priority=yes] OPAQUE                         create a topic or give it more partitions; with the
                                                                      option each partition is a level of priority
auth USER PASSWORD OPAQUE                                             log in
transaction KEY SESSION TYPE [TIMEOUT] [QUALIFIER] OPAQUE             messages put together, with their KEY before the OPAQUE
stats [ITEM] OPAQUE                                                   statistics; `stats help 1` lists the items
version OPAQUE                                                        the version
quit                                                                  close the connection
OPAQUE is a number of your choice that comes back with the answer.
"""
STATS_HELP: Final = """\
stats <opaque>           the broker
stats help <opaque>      this list
stats topics <opaque>    all topics
stats offsets <opaque>   first and next position of every partition
stats realtime <opaque>  counters since the last reset
stats config <opaque>    the settings in force and the topics, as an INI file
stats stacks <opaque>    what each thread and each greenlet is doing
stats reset <opaque>     begin new real-time counters
stats <topic> <opaque>   one topic
"""
FOR_ADMINISTRATORS: Final = ("reset", "stacks")
"""These change what others see, or stop the loop for a moment."""
REALTIME_S: Final = 1800
"""Real-time counters are reset by themselves after half an hour, as in the original broker."""

NO_DATA: Final = 2
UNKNOWN: Final = 1


class Connections(Protocol):
    """All connections of this process."""

    memory: Memory

    @property
    def connections(self) -> int:
        """The number of open connections."""
        ...


class AdminHandler:
    """Answers at once: figures that are not in the page cache, or that the disk cannot give, are left out."""

    def __init__(
        self,
        context: Context,
        connections: Connections,
        save_topics: Callable[[], None],
        transactions: Callable[[Read], Mapping[str, object]],
    ) -> None:
        """Prepare. ``save_topics`` returns when the current topic table is durable; ``transactions`` returns figures by
        name."""
        self._context = context
        self._connections = connections
        self._save_topics = save_topics
        self._transactions = transactions
        self._put_before = self._put_ever()
        """The messages and bytes that partitions had when real-time counting began."""

    # -- commands -----------------------------------------------------------------------------------------------------

    def version(self, session: Session, version: Version) -> None:
        session.reply(write_result(OK, metaq.__version__, version.opaque))

    def help(self, session: Session, help_: Help) -> None:
        session.reply(write_result(OK, _crlf(HELP), help_.opaque))

    def sync(self, session: Session, sync: Sync) -> None:
        session.reply(write_result(UNAVAILABLE, "sync is answered by synchronous slaves only", sync.opaque))

    def create(self, session: Session, create: Create) -> None:
        if not self._context.replicas.is_master:
            reason = f"this replica is a slave; create {create.topic} on its master"
            session.reply(write_result(UNAVAILABLE, reason, create.opaque))
            return
        action = Action.CREATE if self._context.topics.get(create.topic) is None else Action.ADMINISTER
        try:
            demand(session.principal, action, create.topic)
            if self._context.topics.is_system(create.topic) or create.topic in INTERNAL_TOPICS:
                raise AccessDenied(f"the topic {create.topic} belongs to the broker: it cannot be created or changed")
            topic = self._context.topics.ensure(create.topic, create.partitions)
            if create.priority:
                topic = self._context.topics.put(topic.having({MESSAGE_TYPE: PRIORITY_TYPE}))
        except MetaqError as error:
            session.reply(write_result(error.status, str(error), create.opaque))
        else:
            session.owed += 1
            gevent.spawn(self._created, session, create, topic)

    def _created(self, session: Session, create: Create, topic: Topic) -> None:
        """Answer when the topic would survive a power cut; it may have been deleted since."""
        try:
            self._save_topics()
            answer = write_result(OK, str(topic.partitions), create.opaque)
        except (NotWritable, StoreError) as error:
            answer = write_result(error.status, f"{topic.name} exists, but may be forgotten: {error}", create.opaque)
        session.answer(1, 0, answer)

    def commands(self) -> dict[type, Callable[..., None]]:
        """Return the handler methods by command."""
        return {Stats: self.stats, Version: self.version, Help: self.help, Create: self.create, Sync: self.sync}

    def stats(self, session: Session, stats: Stats) -> None:
        item, opaque = stats.item, stats.opaque
        action = Action.ADMINISTER if item in FOR_ADMINISTRATORS else Action.INSPECT
        if not allowed(session.principal, action, ""):
            session.reply(write_result(FORBIDDEN, str(denied(session.principal, action)), opaque))
            return
        if stats.item_only and self._is_opaque(item):
            item, opaque = "", item
        session.reply(write_result(OK, self._text(item), opaque))

    def _is_opaque(self, item: str) -> bool:
        return item.removeprefix("-").isdecimal() and self._context.topics.get(item) is None

    # -- statistics ---------------------------------------------------------------------------------------------------

    def _text(self, item: str) -> str:
        if time.monotonic() - self._context.counters.since_s > REALTIME_S:
            self._reset()
        if item == "config":
            return self._config()
        if item == "reset":
            self._reset()
        lines = self._lines(item)
        return "".join(f"{line}\r\n" for line in ("STATS", *lines, "END"))

    def _lines(self, item: str) -> Iterable[str]:
        match item:
            case "":
                return self._broker_lines()
            case "topics":
                return self._topics_lines()
            case "offsets":
                return self._offsets_lines()
            case "realtime":
                return self._realtime_lines()
            case "stacks":
                return stacks().splitlines()
            case "help":
                return STATS_HELP.splitlines()
            case "reset":
                return ["reset ok"]
            case topic:
                return self._topic_lines(topic)

    def _config(self) -> str:
        """Return the settings in the form of the original's ``server.ini``: a slave of its kind reads its topics from here."""
        context, settings = self._context, self._context.settings
        at_disk = settings.durability.on_disk
        sections: dict[str, dict[str, object]] = {
            "system": {
                "brokerId": settings.broker_number,
                "hostName": context.host,
                "serverPort": context.port,
                "numPartitions": settings.default_partitions,
                "unflushThreshold": 0 if at_disk else settings.flush_messages,
                "unflushInterval": settings.flush_interval_ms,
                "maxSegmentSize": settings.segment_bytes,
                "maxTransferSize": settings.max_transfer_bytes,
                "deletePolicy": f"delete,{settings.keep_hours:g}h",
            },
            "metaq": plain(settings, without=("topics",)),
        }
        for topic in context.topics.of_users():
            sections[f"topic={topic.name}"] = {
                "numPartitions": topic.partitions,
                "acceptPublish": str(bool(topic.permission & WRITE)).lower(),
                "acceptSubscribe": str(bool(topic.permission & READ)).lower(),
            }
        return "\n".join(
            f"[{name}]\n" + "".join(f"{key}={value}\n" for key, value in section.items()) for name, section in sections.items()
        )

    def _broker_lines(self) -> Iterator[str]:
        context, counters = self._context, self._context.counters
        store = StoreFigures.of(context.store)
        yield f"pid {os.getpid()}"
        yield f"broker_id {context.settings.broker_number}"
        yield f"port {context.port}"
        yield f"uptime {int(time.monotonic() - counters.started_s)}"
        yield f"version {metaq.__version__}"
        yield f"form {FORM}"
        yield f"slave {str(not context.replicas.is_master).lower()}"
        yield f"curr_connections {self._connections.connections}"
        yield f"connections_bytes {self._connections.memory.held}"
        yield f"connections_evicted {self._connections.memory.evicted}"
        yield "threads 1"
        yield f"cmd_put {counters.put.count}"
        yield f"cmd_get {counters.get.count}"
        yield f"cmd_offset {counters.offset.count}"
        yield f"tx_begin {counters.tx_begin.count}"
        yield f"tx_xa_begin {counters.tx_xa_begin.count}"
        yield f"tx_commit {counters.tx_commit.count}"
        yield f"tx_rollback {counters.tx_rollback.count}"
        yield f"get_miss {counters.get_miss.count}"
        yield f"put_failed {counters.put_failed.count}"
        users = [queue for queue in context.store.queues.values() if queue.topic not in INTERNAL_TOPICS]
        yield f"total_messages {sum(queue.readable - self._first(queue)[0] for queue in users)}"
        yield f"topics {len(context.topics.of_users())}"
        yield f"config_checksum {crc32(self._config().encode())}"
        yield f"durability {context.settings.durability}"
        yield from (f"{name} {value}" for name, value in context.replicas.numbers().items())
        yield f"log_begin {store.begin}"
        yield f"log_end {store.end}"
        yield f"log_durable_end {store.durable_end}"
        yield f"log_segments {store.segments}"
        yield f"syncs {store.syncs}"
        yield f"damaged_reads {store.damaged_reads}"
        yield f"damaged_index_reads {store.index_damaged}"
        yield f"index_behind {store.index_behind_bytes}"
        yield f"indexing {'no: ' + store.index_paused if store.index_paused else 'yes'}"
        yield f"writable {'no: ' + refusal if (refusal := self._refusal()) else 'yes'}"
        with contextlib.suppress(ColdRead, StoreError):
            yield from (f"{name} {value}" for name, value in self._transactions(read_cached).items())

    def _refusal(self) -> str | None:
        try:
            self._context.store.check_writable()
        except MetaqError as error:
            return str(error)
        return None

    def _first(self, queue: ConsumeQueue) -> tuple[int, int]:
        try:
            return self._context.store.first(queue, read_cached)
        except (ColdRead, StoreError):
            return queue.first, queue.first_position

    def _queues(self, topic: Topic) -> list[ConsumeQueue]:
        """Return the partitions of a topic that ever had a message."""
        found = (self._context.store.queues.get(TopicPartition(topic.name, number)) for number in range(topic.partitions))
        return [queue for queue in found if queue is not None and queue.readable]

    def _totals(self, topic: Topic) -> tuple[int, int]:
        """Return the number of messages and of bytes that can be read."""
        messages = size = 0
        for queue in self._queues(topic):
            ordinal, position = self._first(queue)
            messages += queue.readable - ordinal
            size += queue.readable_text_end - position
        return messages, size

    def _topics_lines(self) -> Iterator[str]:
        for topic in self._context.topics.of_users():
            queues = self._queues(topic)
            if not queues:
                yield f"{topic.name} *Empty*"
                continue
            messages, size = self._totals(topic)
            publish, subscribe = (str(bool(topic.permission & bit)).lower() for bit in (WRITE, READ))
            yield (
                f"{topic.name} partitions {len(queues)} message_count {messages} message_bytes {size} "
                f"accept_publish {publish} accept_subscribe {subscribe}"
            )

    def _offsets_lines(self) -> Iterator[str]:
        for topic in self._context.topics.of_users():
            for queue in self._queues(topic):
                yield (
                    f"{topic.name} part {queue.partition} min_offset {self._first(queue)[1]} "
                    f"max_offset {queue.readable_text_end}"
                )

    def _topic_lines(self, name: str) -> Iterator[str]:
        yield name
        topic = self._context.topics.get(name)
        if topic is None:
            yield f"resultCode {UNKNOWN}"
            return
        queues = self._queues(topic)
        messages, size = self._totals(topic)
        yield f"resultCode {0 if queues else NO_DATA}"
        yield f"partitions {len(queues)}"
        yield f"message_count {messages}"
        yield f"bytes {size}"
        put, put_size = self._put_lately(queues)
        yield f"topic_realtime_put {self._meter(Meter(recent_count=put))}"
        counters = self._context.topic_counters(name)
        yield f"topic_realtime_get {self._meter(counters.get)}"
        yield f"topic_realtime_offset {self._meter(counters.offset)}"
        yield f"topic_realtime_get_miss {self._meter(counters.get_miss)}"
        yield f"topic_realtime_put_failed {self._meter(counters.put_failed)}"
        yield f"topic_realtime_message_size {self._meter(Meter(recent_count=put, recent_value=put_size))}"

    def _put_ever(self) -> dict[TopicPartition, tuple[int, int]]:
        """Return the number of messages and of bytes ever put, by partition."""
        return {key: (queue.readable, queue.readable_text_end) for key, queue in self._context.store.queues.items()}

    def _put_lately(self, queues: Iterable[ConsumeQueue]) -> tuple[int, int]:
        """Return the number of messages and of bytes put to partitions since real-time counting began."""
        messages = size = 0
        for queue in queues:
            before = self._put_before.get(TopicPartition(queue.topic, queue.partition), (0, 0))
            messages += queue.readable - before[0]
            size += queue.readable_text_end - before[1]
        return messages, size

    def _reset(self) -> None:
        self._context.counters.reset()
        self._put_before = self._put_ever()

    def _realtime_lines(self) -> Iterator[str]:
        counters = self._context.counters
        sizes = Meter(recent_count=counters.put.recent_count, recent_value=counters.put.recent_value)
        events = {"put": counters.put, "get": counters.get, "offset": counters.offset}
        for name, meter in {**events, "get_miss": counters.get_miss, "put_failed": counters.put_failed}.items():
            yield f"realtime_{name} {self._meter(Meter(recent_count=meter.recent_count))}"
        yield f"realtime_message_size {self._meter(sizes)}"

    def _meter(self, meter: Meter) -> str:
        """Return a counter in the original's form; the value of a plain counter is its count."""
        count, value = meter.recent_count, meter.recent_value or meter.recent_count
        if not count:
            return "null"
        seconds = max(1, int(time.monotonic() - self._context.counters.since_s))
        average, rate = f"{value / count:.2f}".rstrip("0").rstrip("."), f"{count / seconds:.2f}".rstrip("0").rstrip(".")
        return f"Count={count},Value={value},Value/Count={average},Count/Duration={rate},Duration={seconds}"


def _crlf(text: str) -> str:
    return text.replace("\n", "\r\n")
