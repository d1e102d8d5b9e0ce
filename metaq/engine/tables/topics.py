"""The topic table: the topics that exist, with their numbers of partitions and their permissions.

It is kept in ``config/topics.json`` in RocketMQ's form. A lost file loses no message: recovery also finds topics and
partitions in the log and in the queue folders.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from metaq.config import TopicSettings
from metaq.errors import AccessDenied, BadRequest, ConfigError, Overloaded
from metaq.message import (
    DEFAULT_TOPIC,
    EPOCHS_TOPIC,
    GIVEN_UP_TOPIC,
    HALF_OP_TOPIC,
    HALF_TOPIC,
    HISTORY_TOPIC,
    INTERNAL_TOPICS,
    LEASES_TOPIC,
    LOCKS_TOPIC,
    MAX_PARTITIONS,
    OFFSETS_TOPIC,
    SCHEDULE_TOPIC,
    TIMERS_TOPIC,
    TRANSACTIONS_TOPIC,
    TopicPartition,
)
from metaq.protocol.record import MAX_TOPIC_LENGTH
from metaq.protocol.remoting.attributes import (
    DEDUPE_WINDOW_MS,
    DISCARDED,
    MESSAGE_TYPE,
    PRIORITY_MAX_WAIT_MS,
    PRIORITY_TYPE,
    TOPIC_ATTRIBUTES,
    check_attributes,
    number,
)
from metaq.protocol.remoting.codes import INHERIT, READ, WRITE
from metaq.protocol.remoting.routes import TopicConfig
from metaq.protocol.spans import Spans
from metaq.store.files.disk import Disk
from metaq.store.files.documents import read_document, write_document
from metaq.store.files.filecache import Run

logger = logging.getLogger(__name__)

FOLDER: Final = "config"
TOPICS: Final = "topics.json"
LEVELS: Final = 18
"""The number of delay levels: each is one partition of the schedule topic."""
MANY_LEVELS: Final = 10
"""Levels of priority above which a topic is worth a warning: each pop looks at all of them."""
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")


FORBIDDEN: Final = INTERNAL_TOPICS | {"SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT"}
"""Topics to which no client may send (specs: remoting protocol, section 3.1)."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic; ``permission`` is the sum of ``READ``, ``WRITE`` and ``INHERIT``."""

    name: str
    partitions: int
    """The number of partitions that take messages."""
    read_partitions: int
    permission: int = READ | WRITE
    sys_flag: int = 0
    order: bool = False
    attributes: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Settings by name (``metaq.protocol.remoting.attributes``)."""

    def having(self, attributes: Mapping[str, str]) -> "Topic":
        """Return the same topic with these attributes, and its others as they are."""
        return replace(self, attributes=dict(sorted({**self.attributes, **attributes}.items())))

    @property
    def has_priorities(self) -> bool:
        """True when each partition is a level of priority, the greater the more urgent."""
        return self.attributes.get(MESSAGE_TYPE) == PRIORITY_TYPE

    @property
    def priority_max_wait_ms(self) -> int:
        """How long a message may wait before its partition is served first, whatever its level; 0: for ever."""
        return number(TOPIC_ATTRIBUTES, self.attributes, PRIORITY_MAX_WAIT_MS)

    @property
    def dedupe_window_ms(self) -> int:
        """How long after a message another one with its id is not stored again; 0: it always is."""
        return number(TOPIC_ATTRIBUTES, self.attributes, DEDUPE_WINDOW_MS)

    @property
    def discarded(self) -> Spans:
        """The ordinals of the letters of a dead-letter topic that were discarded one by one."""
        return Spans.read(self.attributes.get(DISCARDED, ""))

    @property
    def all_partitions(self) -> int:
        """The number of all partitions: while a topic shrinks or grows, some of them are only written or only read."""
        return max(self.partitions, self.read_partitions)


def config_of(topic: Topic, permission: int) -> TopicConfig:
    """Return a topic in the form in which registries and clients receive it."""
    return TopicConfig(
        name=topic.name,
        read_queues=topic.read_partitions,
        write_queues=topic.partitions,
        permission=permission,
        sys_flag=topic.sys_flag,
        order=topic.order,
        attributes=topic.attributes,
    )


def reply_topic(cluster: str) -> str:
    """Return the name of the topic to which a cluster's replies to requests are sent."""
    return f"{cluster}_REPLY_TOPIC"


def check_topic_name(name: str) -> None:
    """Raise ``BadRequest`` unless both protocols can carry a topic name (RocketMQ's rule)."""
    if len(name) > MAX_TOPIC_LENGTH:
        raise BadRequest(f"a topic name of {len(name)} characters is longer than {MAX_TOPIC_LENGTH}")
    if not _NAME.fullmatch(name):
        raise BadRequest(f"the topic name {name[:40]!r} has characters other than letters, digits, %, |, _ and -")


class TopicTable:
    """All topics of this broker. Changes take effect at once, and are durable after the next ``save``."""

    def __init__(self, directory: Path, max_topics: int) -> None:
        self._path = directory / FOLDER / TOPICS
        self.max_topics = max_topics
        self._topics: dict[str, Topic] = {}
        self._system: frozenset[str] = frozenset()
        self._version = 0
        self._saved_version = 0
        self._permission = READ | WRITE
        self._most: dict[str, int] = {}  # the most partitions that each topic ever had
        self.deleted: dict[TopicPartition, int] = {}
        """Partitions of deleted topics: the messages before this ordinal belonged to them, and no reader sees them."""
        self.changed: Callable[[str], None] = lambda _: None
        """Called with the name of each topic that was created, changed or removed."""

    def __len__(self) -> int:
        return len(self._topics)

    def __iter__(self) -> Iterator[Topic]:
        return iter(self._topics[name] for name in sorted(self._topics))

    def get(self, name: str) -> Topic | None:
        return self._topics.get(name)

    @property
    def version(self) -> int:
        """The version of the table, which rises with every change."""
        return self._version

    @property
    def permission(self) -> int:
        """The permission of the broker as a whole: a sum of ``READ`` and ``WRITE``."""
        return self._permission

    def restrict(self, permission: int) -> None:
        """Set the permission of the broker as a whole, which limits that of each topic."""
        if permission != self._permission:
            self._permission = permission
            for name in self._topics:
                self._version += 1  # for each topic: a registry ignores a registration whose version it has
                self.changed(name)

    def check(self, topic: Topic, needed: int) -> None:
        """Raise ``AccessDenied`` when topic or broker does not give the ``needed`` permission, ``READ`` or ``WRITE``."""
        verb = "give" if needed == READ else "take"
        if not topic.permission & needed:
            raise AccessDenied(f"the topic {topic.name} does not {verb} messages (perm {topic.permission})")
        if not self._permission & needed:
            raise AccessDenied(f"this broker does not {verb} messages now (broker_permission {self._permission})")

    def permission_of(self, topic: Topic) -> int:
        """Return the permission that topic and broker allow together."""
        return topic.permission & (self._permission | INHERIT)

    def is_system(self, name: str) -> bool:
        """Return whether a topic belongs to the broker, not to its users."""
        return name in self._system

    def of_broker(self) -> list[str]:
        """Return the names of the broker's own topics."""
        return sorted(self._system & self._topics.keys())

    def of_users(self) -> list[Topic]:
        """Return all topics but the broker's own, sorted by name."""
        return [topic for topic in self if topic.name not in self._system]

    def _count_of_users(self) -> int:
        return len(self._topics) - sum(name in self._topics for name in self._system)

    def ensure(self, name: str, partitions: int) -> Topic:
        """Return a topic with at least this many partitions: it is created or grown when needed, never shrunk."""
        return self.put(self._grown(name, partitions))

    def _grown(self, name: str, partitions: int) -> Topic:
        topic = self._topics.get(name)
        if topic is None:
            return Topic(name, partitions, partitions)
        if topic.partitions >= partitions:
            return topic
        return replace(topic, partitions=partitions, read_partitions=max(partitions, topic.read_partitions))

    def put(self, topic: Topic) -> Topic:
        """Create or replace a topic and return it.

        Raises ``BadRequest`` for a bad name or attribute or too many partitions, ``Overloaded`` beyond ``max_topics``.
        """
        known = self._topics.get(topic.name)
        if known == topic:
            return known
        if not 0 <= topic.all_partitions <= MAX_PARTITIONS:
            raise BadRequest(f"{topic.all_partitions} partitions are more than {MAX_PARTITIONS}")
        check_attributes(TOPIC_ATTRIBUTES, topic.attributes)
        if known is None:
            check_topic_name(topic.name)
            if topic.name not in self._system and self._count_of_users() >= self.max_topics:
                raise Overloaded(f"there are already {self.max_topics} topics (max_topics)", retry_after_ms=60_000)
        if topic.has_priorities and topic.partitions > MANY_LEVELS:
            logger.warning("topic has many priorities topic=%s levels=%d", topic.name, topic.partitions)
        return self._set(topic)

    def _set(self, topic: Topic) -> Topic:
        self._topics[topic.name] = topic
        self._most[topic.name] = max(topic.all_partitions, self._most.get(topic.name, 0))
        self._version += 1
        self.changed(topic.name)
        return topic

    def delete(self, name: str, ends: Mapping[TopicPartition, int]) -> None:
        """Remove a topic; ``ends`` are its partitions with the ordinals that come next.

        The stored messages stay until they age out; a topic of the same name that is created later continues after them.
        """
        if self._topics.pop(name, None) is not None:
            self.deleted.update(ends or {TopicPartition(name, 0): 0})  # without messages, delayed ones may still name it
            del self._most[name]
            self._version += 1
            self.changed(name)

    def add_system_topics(self, cluster: str, broker: str, *, auto_create: bool) -> None:
        """Create the topics that every broker has (specs: remoting protocol, section 3.1).

        Without ``auto_create`` there is no template topic. One that existed before stays the broker's own and allows nothing:
        registries keep a route until they receive a changed one.
        """
        everything = READ | WRITE | INHERIT
        topics = [
            Topic(cluster, 16, 16, everything),
            Topic(broker, 1, 1, everything),
            Topic("SELF_TEST_TOPIC", 1, 1),
            Topic("BenchmarkTest", 1024, 1024),
            Topic("OFFSET_MOVED_EVENT", 1, 1),
            Topic(SCHEDULE_TOPIC, LEVELS, LEVELS),
            Topic(reply_topic(cluster), 1, 1),
        ]
        template = Topic(DEFAULT_TOPIC, 16, 16, everything)
        kept = {OFFSETS_TOPIC: 1, TRANSACTIONS_TOPIC: 2, EPOCHS_TOPIC: 1, LOCKS_TOPIC: 1, HISTORY_TOPIC: 1}
        kept |= {HALF_TOPIC: 1, HALF_OP_TOPIC: 1, GIVEN_UP_TOPIC: 1, LEASES_TOPIC: 1, TIMERS_TOPIC: 2}
        own = [Topic(name, partitions, partitions, READ) for name, partitions in kept.items()]
        self._system = frozenset(topic.name for topic in (*topics, *own, template))
        for topic in topics:
            self.put(self._topics.get(topic.name, topic))
        if auto_create or template.name in self._topics:
            before = self._topics.get(template.name, template)
            self.put(replace(before, permission=everything if auto_create else 0))
        for topic in own:
            self.put(topic)  # whatever the table says: no client writes there

    def of_parked(self, name: str, partition: int) -> Topic | None:
        """Return the topic of a message that was parked for this partition; ``None`` when the topic was deleted.

        A topic that is missing otherwise is made again: a killed broker may forget one that holds no message yet.
        """
        topic = self.get(name)
        if topic is None and not any(key.topic == name for key in self.deleted):
            topic = self._set(self._grown(name, partition + 1))  # whatever the limits say: its message is there
        return topic if topic is not None and topic.all_partitions else None

    def check_settings(self, settings: Mapping[str, TopicSettings], max_topics: int) -> None:
        """Raise ``ConfigError`` when these topics cannot all exist beside the present ones: a bad name, or too many topics."""
        new = [name for name in settings if name not in self._topics]
        for name in new:
            try:
                check_topic_name(name)
            except BadRequest as error:
                raise ConfigError(f"topics: {error}") from error
        count = self._count_of_users() + sum(name not in self._system for name in new)
        if new and count > max_topics:
            raise ConfigError(
                f"topics: {count} topics would be more than {max_topics} (max_topics); the new ones are {', '.join(new)}"
            )

    def configure(self, settings: Mapping[str, TopicSettings]) -> None:
        """Create the configured topics and set their permissions; fails only where ``check_settings`` does."""
        for name, wanted in settings.items():
            permission = READ * wanted.accept_subscribe | WRITE * wanted.accept_publish
            topic = self.ensure(name, wanted.partitions)
            attributes: dict[str, str] = {}
            if wanted.priority:
                attributes[MESSAGE_TYPE] = PRIORITY_TYPE
            if wanted.dedupe_window_ms is not None:
                attributes[DEDUPE_WINDOW_MS] = str(wanted.dedupe_window_ms)
            self.put(replace(topic, permission=permission).having(attributes))

    def load(self, disk: Disk, known: Mapping[TopicPartition, int]) -> list[str]:
        """Read the file and add the partitions that the store knows; return the problems that were found in the file.

        ``known`` holds the store's partitions with the ordinals that come next.
        """
        content, problems = read_document(disk, self._path)
        for name, row in {} if content is None else content["topicConfigTable"].items():
            self._topics[name] = topic = Topic(
                name=name,
                partitions=row["writeQueueNums"],
                read_partitions=row["readQueueNums"],
                permission=row["perm"],
                sys_flag=row["topicSysFlag"],
                order=row["order"],
                attributes=row.get("attributes", {}),
            )
            self._most[name] = row.get("mostQueueNums", topic.all_partitions)
        if content is not None:
            self._version = self._saved_version = content["dataVersion"]["counter"]
            for name, ends in content.get("deleted", {}).items():
                for partition, end in ends.items():
                    self.deleted[TopicPartition(name, int(partition))] = end
        for key, following in known.items():
            self.add_stored(key, following)
        if problems:
            self._version += 1
        return problems

    def add_stored(self, key: TopicPartition, following: int) -> None:
        """Add a partition that the store has, whatever the limits say; the ordinal ``following`` comes next there.

        One whose messages were all of a deleted topic is not added, nor one that its topic had before it shrank.
        """
        if key.partition >= self._most.get(key.topic, 0) and not self.has_only_deleted(key, following):
            self._set(self._grown(key.topic, key.partition + 1))

    def has_only_deleted(self, key: TopicPartition, following: int) -> bool:
        """Return whether all messages of a partition were of a deleted topic; the ordinal ``following`` comes next there."""
        return key.topic not in self._topics and following <= self.deleted.get(key, -1)

    def forget_lost(self, known: Mapping[TopicPartition, int]) -> None:
        """Lower the ends of deleted topics to what a master's store holds; ``known`` is as in ``load``.

        After a power cut the log may have lost some deleted messages, and new messages in their place must show. A slave may
        hold less than its master, and keeps the ends: the deleted messages that are still to come must not show.
        """
        for key, end in self.deleted.items():
            self.deleted[key] = min(end, known.get(key, 0))
            self._version += self.deleted[key] < end

    def reload(self, disk: Disk, known: Mapping[TopicPartition, int]) -> None:
        """Replace the table by the file that replication has written; topics that it does not have are gone."""
        before, self._topics, self._most = self._topics, {}, {}
        self.deleted.clear()
        for problem in self.load(disk, known):
            logger.error("topic table damaged problem=%s", problem)
        for name in before.keys() | self._topics.keys():
            if before.get(name) != self._topics.get(name):
                self.changed(name)

    @property
    def unsaved(self) -> bool:
        return self._version != self._saved_version

    def save(self, disk: Disk, now_ms: int, run: Run) -> None:
        """Write the table as it is now to the file, durably."""
        version = self._version
        run(self.written(disk, now_ms))
        self._saved_version = version

    def written(self, disk: Disk, now_ms: int) -> Callable[[], None]:
        """Return a function that writes the table as it is now, durably, whenever and in whatever thread it is called."""
        content = self._content(now_ms)

        def write() -> None:
            disk.make_directories(self._path.parent)
            write_document(disk, self._path, content)

        return write

    def _content(self, now_ms: int) -> dict[str, Any]:
        rows = {
            topic.name: {
                "topicName": topic.name,
                "readQueueNums": topic.read_partitions,
                "writeQueueNums": topic.partitions,
                "perm": topic.permission,
                "topicFilterType": "SINGLE_TAG",
                "topicSysFlag": topic.sys_flag,
                "order": topic.order,
                "attributes": dict(topic.attributes),
                "mostQueueNums": self._most[topic.name],
            }
            for topic in self._topics.values()
        }
        content = {"dataVersion": {"timestamp": now_ms, "counter": self._version}, "topicConfigTable": rows}
        deleted: dict[str, dict[str, int]] = {}
        for key, end in self.deleted.items():
            deleted.setdefault(key.topic, {})[str(key.partition)] = end
        return {**content, "deleted": deleted} if deleted else content
