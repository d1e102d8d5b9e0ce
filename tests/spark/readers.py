"""Readers of a stream, asked for their ranges; brokers that hide messages from them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metaq.client import Client, TextClient, connect
from metaq.message import MessageQueue, TopicPartition
from metaq.spark.reading.brokers import Brokers
from metaq.spark.reading.options import ReadOptions
from metaq.spark.reading.ranges import Layout, Span
from metaq.spark.reading.stream import StreamReader
from metaq.spark.reading.tasks import Task
from tests.spark.topics import DEADLINE_S
from tests.support.broker import BrokerProcess, RegistryProcess, wait_until


class NewMaster(Brokers):
    """Brokers of which one hides messages: it shows 3 of each partition at the first looks, and all at later ones.

    Messages come between the last of these looks and a search by time.
    """

    def __init__(self, options: ReadOptions, looks: int) -> None:
        super().__init__(options.servers, options.login)
        self._looks = looks

    def spans(self, layout: Layout) -> dict[TopicPartition, Span]:
        self._looks -= 1
        found = super().spans(layout)
        return found if self._looks < 0 else {key: Span(span.least, min(span.most, 3)) for key, span in found.items()}

    def at_time(self, queue: MessageQueue, time_ms: int) -> int:
        found = super().at_time(queue, time_ms)
        return found if self._looks <= 0 else min(found, 3)


def hide(reader: StreamReader, looks: int) -> None:
    """Have a stream ask a ``NewMaster`` from now on."""
    reader._connected = NewMaster(reader.options, looks)


@contextmanager
def two_brokers(folder: Path, topic: str, count: int) -> Iterator[tuple[BrokerProcess, Client]]:
    """Run a registry with the brokers m and n, of which each has one partition of a topic with so many messages.

    Yield m, and a client of both.
    """
    with RegistryProcess(folder / "registry") as registry, connect(registry.address, timeout_s=60) as client:
        flags = ("--registries", registry.address, "--broker-name")
        with BrokerProcess(folder / "m", *flags, "m") as broker, BrokerProcess(folder / "n", *flags, "n") as other:
            broker.registry = registry.address
            wait_until(lambda: masters(client) == {"m", "n"}, DEADLINE_S, "both are registered")
            client.admin().create_topic(topic, 1)
            for one in (broker, other):
                with TextClient(one.host, one.port, timeout_s=60) as text:
                    text.put_many(topic, [b"x"] * count, partition=0)
            yield broker, client


def masters(client: Client) -> set[str]:
    return {broker.name for broker in client.admin().masters()}


def offsets(position: dict[str, Any]) -> list[int]:
    """Return the offset of each partition of the only topic, in order."""
    (row,) = (row for name, row in position.items() if not name.startswith("#"))
    return list(row.values())


def ranges(reader: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[tuple[int, int, int]]:
    """Return the partition, the begin and the end of all parts of a batch."""
    tasks = [task for task in reader.partitions(start, end) if isinstance(task, Task)]
    return [(part.range.partition.partition, part.range.begin, part.range.end) for task in tasks for part in task.parts]
