"""A store folder as the driver sees it, in place of brokers."""

from collections.abc import Collection
from pathlib import Path

from metaq.message import MessageQueue, TopicPartition
from metaq.spark.reading.brokers import TopicQueues
from metaq.spark.reading.disk import Folder
from metaq.spark.reading.ranges import Layout, Range, Span


class StoreFolder:
    """The topics of one broker's store folder; the broker may run or not."""

    def __init__(self, path: str) -> None:
        """Open the folder. ``StoreError`` when it is no store folder."""
        self._folder = Folder(Path(path))

    def names(self) -> list[str]:
        return self._folder.topics()

    def topic(self, name: str) -> TopicQueues:
        """Return a topic. ``UnknownTopic`` when there is none."""
        return TopicQueues(tuple(MessageQueue(name, "", number) for number in range(self._folder.partitions(name))), {})

    def spans(self, layout: Layout) -> dict[TopicPartition, Span]:
        return {
            TopicPartition(name, queue.partition): Span(*self._folder.ends(name, queue.partition))
            for name, queues in layout.items()
            for queue in queues
        }

    def shown(self, wanted: Collection[Range], layout: Layout) -> dict[TopicPartition, Span]:
        """Return the offsets at once: a folder hides no messages."""
        return self.spans(layout)

    def await_brokers(self, names: Collection[str]) -> None:
        """Return at once: a folder needs no broker."""

    def at_time(self, queue: MessageQueue, time_ms: int) -> int:
        return self._folder.at_time(queue.topic, queue.partition, time_ms)

    def close(self) -> None:
        """Do nothing: no file stays open."""
