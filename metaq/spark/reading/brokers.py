"""The driver's questions to brokers before tasks read: topics, partitions, their offsets, offsets by time, and groups."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple, Protocol, TypeVar

from metaq.client import connect
from metaq.errors import ClientError, ConnectionFailed, RouteNotFound
from metaq.message import INTERNAL_TOPICS, MessageQueue, TopicPartition
from metaq.spark.login import Login
from metaq.spark.reading.ranges import Layout, Range, Span

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 10.0
PATIENCE_S: Final = 60.0
"""How long brokers that have answered before may be away until a query fails: a master is replaced in seconds."""
PAUSE_S: Final = 0.5
_LAST_MS: Final = int(datetime(9999, 1, 1, tzinfo=UTC).timestamp()) * 1000
"""Python's dates end there."""

T = TypeVar("T")


class TopicQueues(NamedTuple):
    """The queues of a topic and the brokers that have them."""

    queues: tuple[MessageQueue, ...]
    """In the order in which Spark numbers them."""
    addresses: Mapping[str, tuple[str, ...]]
    """The addresses of each broker by its name, the master's first."""


class MessageOrigin(Protocol):
    """The source of messages, as the driver sees it: brokers, or a store folder."""

    def names(self) -> list[str]:
        """Return the topics that users have made."""
        ...

    def topic(self, name: str) -> TopicQueues:
        """Return a topic. ``MetaqError`` when there is none."""
        ...

    def spans(self, layout: Layout) -> dict[TopicPartition, Span]:
        """Return the offsets that each partition holds now, without partitions that are gone."""
        ...

    def shown(self, wanted: Collection[Range], layout: Layout) -> dict[TopicPartition, Span]:
        """Return the offsets as ``spans`` does, as soon as they reach all that is wanted, or else after some patience."""
        ...

    def await_brokers(self, names: Collection[str]) -> None:
        """Wait until brokers with these names are there. ``ConnectionFailed`` when they do not come."""
        ...

    def at_time(self, queue: MessageQueue, time_ms: int) -> int:
        """Return the offset of the first message stored at this time or later; the partition's end when there is none."""
        ...

    def close(self) -> None: ...


class Brokers:
    """Registries and masters as the origin of messages.

    A request that fails with a retriable error is repeated for ``PATIENCE_S`` once an earlier one has been answered. Before the
    first answer it fails at once.
    """

    def __init__(self, servers: str, login: Login) -> None:
        """Make a client of the servers. ``BadRequest`` for an address, or certificates, that cannot be read."""
        self._client = connect(servers, timeout_s=TIMEOUT_S, **login.for_client())
        self._admin = self._client.admin()
        self._met = False

    def names(self) -> list[str]:
        system = self._asked(self._admin.system_topics)
        return sorted(set(self._asked(self._admin.topics)) - INTERNAL_TOPICS - set(system))

    def topic(self, name: str) -> TopicQueues:
        """Return a topic. ``RouteNotFound`` when there is none."""
        queues = self._asked(lambda: self._admin.readable(name))
        brokers = self._asked(lambda: self._admin.route(name)).brokers
        replicas = {broker.name: broker.addresses for broker in brokers}
        return TopicQueues(queues, {name: tuple(one[number] for number in sorted(one)) for name, one in replicas.items()})

    def spans(self, layout: Layout) -> dict[TopicPartition, Span]:
        """Ask the masters what the partitions hold: a slave may be behind, which would look like a loss."""
        found = {}
        for name, queues in layout.items():
            try:
                views = self._asked(partial(self._admin.queues, name))
            except RouteNotFound as error:
                if error.retriable:
                    raise
                logger.warning("topic is gone topic=%s reason=%s", name, error)
                continue
            held = {view.queue: Span(view.begin, view.end) for view in views}
            found.update({TopicPartition(name, at): held[queue] for at, queue in enumerate(queues) if queue in held})
        return found

    def shown(self, wanted: Collection[Range], layout: Layout) -> dict[TopicPartition, Span]:
        """Return what the partitions hold, as soon as they show all that is wanted, or else after ``PATIENCE_S``.

        A new master hides messages until its replicas have reported that they have them, too: none of them is lost.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = self.spans(layout)
            hidden = [one.partition for one in wanted if one.partition in found and found[one.partition].most < one.end]
            if not hidden or time.monotonic() >= deadline:
                return found
            logger.warning("partitions end too early, asked again partitions=%s", ",".join(map(str, hidden)))
            time.sleep(PAUSE_S)

    def await_brokers(self, names: Collection[str]) -> None:
        """Wait until brokers with these names are there. ``ConnectionFailed`` when they do not come; that is no data loss."""

        def look() -> None:
            there = {broker.name for broker in self._admin.masters()}
            if absent := set(names) - there:
                raise ConnectionFailed(f"broker {', '.join(sorted(absent))}, which has messages to read, is not there")

        self._asked(look)

    def at_time(self, queue: MessageQueue, time_ms: int) -> int:
        when = datetime.fromtimestamp(min(time_ms, _LAST_MS) / 1000, UTC)
        return self._asked(lambda: self._client.pull_consumer(queue.topic).offset_at(queue, when))

    def commit(self, group: str, offsets: Mapping[MessageQueue, int]) -> None:
        """Commit next offsets of a group to the brokers, topic by topic.

        Raise the ``ClientError`` of the first topic that failed, after all others; but once ``TIMEOUT_S`` have passed, no topic
        is tried after one that failed.
        """
        deadline = time.monotonic() + TIMEOUT_S
        errors = []
        for topic in sorted({queue.topic for queue in offsets}):
            try:
                with self._client.pull_consumer(topic, group) as consumer:
                    consumer.partitions()  # looks up the routes, without which a commit reaches no broker
                    consumer.commit({queue: offset for queue, offset in offsets.items() if queue.topic == topic})
            except ClientError as error:
                errors.append(error)
                if time.monotonic() >= deadline:  # a silent broker, which would take as long for each topic that it has
                    break
        if errors:
            raise errors[0]

    def close(self) -> None:
        self._client.close()

    def _asked(self, ask: Callable[[], T]) -> T:
        deadline = time.monotonic() + (PATIENCE_S if self._met else 0.0)
        while True:
            try:
                answer = ask()
            except ClientError as error:
                if not error.retriable or time.monotonic() >= deadline:
                    raise
                logger.warning("brokers do not answer, asked again reason=%s", error)
                time.sleep(PAUSE_S)
            else:
                self._met = True
                return answer
