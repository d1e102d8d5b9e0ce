"""The topic table: which topics there are, with how many partitions and which permissions.

Kept in ``config/topics.json`` in RocketMQ's form. The table is a convenience: recovery finds topics and partitions in the log
and in the queue folders too, so a lost file loses no message.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from metaq.config import TopicSettings
from metaq.errors import BadRequest, Overloaded
from metaq.message import TopicPartition
from metaq.protocol.record import MAX_TOPIC_LENGTH
from metaq.store.disk import Disk
from metaq.store.documents import read_document, write_document
from metaq.store.files import Run

FOLDER: Final = "config"
TOPICS: Final = "topics.json"
MAX_PARTITIONS: Final = 1024
READ: Final = 4
WRITE: Final = 2
_NAME: Final = re.compile(r"[%|a-zA-Z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic; ``permission`` is the sum of ``READ`` and ``WRITE``."""

    name: str
    partitions: int
    permission: int = READ | WRITE


def check_topic_name(name: str) -> None:
    """Names that both protocols can carry (RocketMQ's rule); ``BadRequest`` otherwise."""
    if len(name) > MAX_TOPIC_LENGTH:
        raise BadRequest(f"a topic name of {len(name)} characters is longer than {MAX_TOPIC_LENGTH}")
    if not _NAME.fullmatch(name):
        raise BadRequest(f"the topic name {name[:40]!r} has characters other than letters, digits, %, |, _ and -")


class TopicTable:
    """All topics of this broker. Changes are in force at once and saved by whoever runs ``save``."""

    def __init__(self, directory: Path, max_topics: int) -> None:
        self._path = directory / FOLDER / TOPICS
        self._max_topics = max_topics
        self._topics: dict[str, Topic] = {}
        self._version = 0
        self._saved_version = 0

    def __len__(self) -> int:
        return len(self._topics)

    def __iter__(self) -> Iterator[Topic]:
        return iter(self._topics[name] for name in sorted(self._topics))

    def get(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def ensure(self, name: str, partitions: int) -> Topic:
        """The topic with at least so many partitions: created or grown when needed, never shrunk."""
        topic = self._topics.get(name)
        if topic is not None and topic.partitions >= partitions:
            return topic
        if partitions > MAX_PARTITIONS:
            raise BadRequest(f"{partitions} partitions are more than {MAX_PARTITIONS}")
        if topic is None:
            check_topic_name(name)
            if len(self._topics) >= self._max_topics:
                raise Overloaded(f"there are {self._max_topics} topics already (max_topics)", retry_after_ms=60_000)
            topic = Topic(name, partitions)
        self._topics[name] = topic = replace(topic, partitions=partitions)
        self._version += 1
        return topic

    def configure(self, settings: Mapping[str, TopicSettings]) -> None:
        """Bring the configured topics into being and give them their permissions."""
        for name, wanted in settings.items():
            permission = READ * wanted.accept_subscribe | WRITE * wanted.accept_publish
            topic = self.ensure(name, wanted.partitions)
            if topic.permission != permission:
                self._topics[name] = replace(topic, permission=permission)
                self._version += 1

    def load(self, disk: Disk, known: Iterable[TopicPartition]) -> list[str]:
        """Read the file and add the partitions that the store knows; return what was wrong with the file."""
        content, problems = read_document(disk, self._path)
        for name, row in {} if content is None else content["topicConfigTable"].items():
            self._topics[name] = Topic(name, row["writeQueueNums"], row["perm"])
        if content is not None:
            self._version = self._saved_version = content["dataVersion"]["counter"]
        for topic, partition in known:
            self.ensure(topic, partition + 1)
        if problems:
            self._version += 1
        return problems

    @property
    def unsaved(self) -> bool:
        return self._version != self._saved_version

    def save(self, disk: Disk, now_ms: int, run: Run) -> None:
        """Make the table as it is now durable."""
        version, content = self._version, self._content(now_ms)
        run(lambda: disk.make_directories(self._path.parent))
        run(lambda: write_document(disk, self._path, content))
        self._saved_version = version

    def _content(self, now_ms: int) -> dict[str, Any]:
        rows = {
            topic.name: {
                "topicName": topic.name,
                "readQueueNums": topic.partitions,
                "writeQueueNums": topic.partitions,
                "perm": topic.permission,
                "topicFilterType": "SINGLE_TAG",
                "topicSysFlag": 0,
                "order": False,
            }
            for topic in self._topics.values()
        }
        return {"dataVersion": {"timestamp": now_ms, "counter": self._version}, "topicConfigTable": rows}
