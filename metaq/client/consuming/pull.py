"""Consuming chosen queues: the program decides which queues it reads, from which offsets, and which offsets it commits."""

import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Final, Self

from metaq.client import checks, intercepting
from metaq.client.connecting.core import Core
from metaq.client.connecting.forks import MADE_BEFORE, renewed_in_children
from metaq.client.consuming.consumer import Inbox
from metaq.client.consuming.fetching import Budget, FetchContext, Fetcher, PulledBatch, subscription_to
from metaq.client.consuming.offsets import BrokerOffsets, QueueEnds
from metaq.client.message import ReceivedMessage, unix_ms
from metaq.client.serializers import Serializer, check_serializer, decoded
from metaq.errors import BadRequest, ClientClosed
from metaq.message import MessageQueue, QueueOffset
from metaq.protocol.subscription import EVERYTHING

DEFAULT_GROUP = "metaq_pull"
MOST_POLLED: Final = 1000


class PullConsumer:
    """A reader of chosen queues; made by ``Client.pull_consumer``, a context manager. One thread at a time may use it.

    ::

        with client.pull_consumer("orders") as consumer:
            consumer.assign(consumer.partitions())
            consumer.seek_to_begin()
            while messages := consumer.poll(timeout_s=1.0):
                ...

    It is not a member of its group: it takes no part in rebalancing, and it commits only when ``commit`` is called.
    """

    def __init__(
        self,
        core: Core,
        topic: str,
        group: str = DEFAULT_GROUP,
        *,
        tags: str = EVERYTHING,
        sql: str | None = None,
        by_priority: bool = False,
        deserializer: Serializer[Any] | None = None,
    ) -> None:
        checks.subscription(topic, tags, sql)
        checks.flag("by_priority", by_priority)
        checks.group(group)
        check_serializer("deserializer", deserializer)
        self._loads = None if deserializer is None else deserializer.loads
        self.topic = topic
        self.group = group
        self._core = core
        self._subscription = subscription_to(topic, tags, sql)
        self._ends = QueueEnds(core)
        self._offsets = BrokerOffsets(core, group)
        self._inbox = Inbox(by_priority=by_priority)
        self._source = FetchContext(core, group, self._inbox.put, Budget())
        self._fetchers: dict[MessageQueue, Fetcher] = {}
        self._positions: dict[MessageQueue, QueueOffset] = {}
        self._batch: PulledBatch | None = None
        self._at = 0
        self._closed = False
        self._is_inherited = False
        core.add_part(self)
        renewed_in_children(self)

    def _renew(self) -> None:
        """Become closed in a child of a fork: the fetched messages and the positions are the parent's."""
        self._is_inherited = self._closed = True
        self._inbox = Inbox()
        self._fetchers = {}
        self._leave_batch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # -- queues and their ends ----------------------------------------------------------------------------------------

    def partitions(self) -> list[MessageQueue]:
        """Return all queues of the topic, on all brokers.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
        """
        return list(self._core.routes.readable(self.topic, self._core.deadline()))

    def begin_offset(self, queue: MessageQueue) -> QueueOffset:
        """Return the offset of the oldest message of a queue that is still there, or the end offset.

        Args:
            queue: a queue of the topic.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return self._ends.begin(queue, self._core.deadline())

    def end_offset(self, queue: MessageQueue) -> QueueOffset:
        """Return the offset that the next message of a queue will have.

        Args:
            queue: a queue of the topic.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return self._ends.end(queue, self._core.deadline())

    def offset_at(self, queue: MessageQueue, when: datetime) -> QueueOffset:
        """Return the offset of the first message of a queue that was stored at ``when`` or later, or the end offset.

        Args:
            queue: a queue of the topic.
            when: a time; without a time zone it is local time.

        Raises:
            BadRequest: an argument is invalid.
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        checks.time("when", when)
        return self._ends.at_time(queue, unix_ms(when), self._core.deadline())

    def committed(self, queue: MessageQueue) -> QueueOffset | None:
        """Return the offset that was last committed for the group in a queue; ``None`` when there is none.

        Args:
            queue: a queue of the topic.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
        """
        return self._offsets.read(queue, self._core.deadline())

    # -- what is read -------------------------------------------------------------------------------------------------

    def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Read these queues and no others: new ones from the group's committed offset, or else from their beginning.

        Args:
            queues: queues, as ``partitions`` gives them.

        Raises:
            BadRequest: it is not a queue, or one of another topic.
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
            ClientClosed: the consumer was closed.
        """
        self._check_open()
        if isinstance(queues, MessageQueue) or not isinstance(queues, Iterable):
            raise checks.wrong("queues", queues, "several queues, as partitions() gives them")
        wanted = set(queues)
        for queue in wanted:
            checks.queue(queue)
        if strangers := [queue for queue in wanted if queue.topic != self.topic]:
            raise BadRequest(f"{strangers[0]} is not a queue of topic {self.topic}")
        self._core.routes.route(self.topic, self._core.deadline())
        for queue in self._fetchers.keys() - wanted:
            self._fetchers.pop(queue).stop()
            del self._positions[queue]
        for queue in sorted(wanted - self._fetchers.keys()):
            offset = self.committed(queue)
            self.read_from(queue, self.begin_offset(queue) if offset is None else offset)

    def read_from(self, queue: MessageQueue, offset: int) -> None:
        """Read one more queue, from ``offset`` on; in one that is read already, continue there.

        Args:
            queue: a queue of the topic.
            offset: an offset; one that does not exist becomes the nearer end of the queue.

        Raises:
            BadRequest: an argument is invalid.
            ClientClosed: the consumer was closed.
        """
        checks.queue(queue)
        checks.number("offset", offset, None)
        self._check_open()
        if queue in self._fetchers:
            self.seek(queue, offset)
            return
        self._positions[queue] = QueueOffset(offset)
        self._fetchers[queue] = Fetcher(self._source, queue, self._subscription, QueueOffset(offset))

    def assignment(self) -> list[MessageQueue]:
        """Return the queues that are read."""
        return sorted(self._fetchers)

    def position(self, queue: MessageQueue) -> QueueOffset:
        """Return the offset from which an assigned queue will be read next.

        Args:
            queue: an assigned queue.

        Raises:
            BadRequest: the queue is not assigned.
            ClientClosed: the consumer was closed.
        """
        return self._positions[self._known(queue)]

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue at ``offset`` in an assigned queue. An offset that does not exist becomes the nearer end of the queue.

        Args:
            queue: an assigned queue.
            offset: an offset; one that does not exist becomes the nearer end of the queue.

        Raises:
            BadRequest: the queue is not assigned, or the offset is no number.
            ClientClosed: the consumer was closed.
        """
        checks.number("offset", offset, None)
        self._fetchers[self._known(queue)].seek(QueueOffset(offset))
        self._positions[queue] = QueueOffset(offset)

    def seek_to_begin(self) -> None:
        """Continue with the oldest message of each assigned queue.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
            ClientClosed: the consumer was closed.
        """
        for queue in self.assignment():
            self.seek(queue, self.begin_offset(queue))

    def seek_to_end(self) -> None:
        """Continue with the messages that are stored from now on, in each assigned queue.

        Raises:
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
            ClientClosed: the consumer was closed.
        """
        for queue in self.assignment():
            self.seek(queue, self.end_offset(queue))

    def seek_to_time(self, when: datetime) -> None:
        """Continue with the first message of each assigned queue that was stored at ``when`` or later.

        Args:
            when: a time; without a time zone it is local time.

        Raises:
            BadRequest: an argument is invalid.
            RouteNotFound: no registry answers, or no broker serves the topic; ``reason`` says why.
            Refused: a broker refuses; ``text`` says why.
            ConnectionFailed: a broker cannot be reached.
            RequestTimeout: no answer in time.
            ClientClosed: the consumer was closed.
        """
        checks.time("when", when)
        for queue in self.assignment():
            self.seek(queue, self.offset_at(queue, when))

    def poll(self, timeout_s: float = 0.0, max_messages: int = MOST_POLLED) -> list[ReceivedMessage]:
        """Return messages of one assigned queue, in order; an empty list when none come within ``timeout_s``.

        Args:
            timeout_s: the most seconds to wait.
            max_messages: the most messages to return.

        Raises:
            BadRequest: an argument is invalid.
            ClientClosed: the consumer was closed.
        """
        checks.seconds("timeout_s", timeout_s)
        checks.number("max_messages", max_messages, 1)
        self.fetch()
        deadline = time.monotonic() + timeout_s
        while not (messages := self.take(max_messages)):
            self._batch = self._inbox.get(max(0.0, deadline - time.monotonic()))
            if self._batch is None:
                break
        return messages

    def fetch(self) -> None:
        """Request messages, if there is room for them; ``poll`` does this itself.

        Raises:
            ClientClosed: the consumer was closed.
        """
        self._check_open()
        for fetcher in self._fetchers.values():
            fetcher.pull()

    def take(self, max_messages: int = MOST_POLLED) -> list[ReceivedMessage]:
        """Return messages that are here already, as ``poll`` does, but without waiting and without requesting more.

        Args:
            max_messages: the most messages to return.

        Raises:
            BadRequest: an argument is invalid.
        """
        checks.number("max_messages", max_messages, 1)
        while (batch := self._batch or self._inbox.get(0.0)) is not None:
            self._batch = batch
            fetcher, queue = batch.fetcher, batch.fetcher.queue
            if batch.generation != fetcher.generation:
                self._leave_batch()
                continue
            messages = batch.messages[self._at : self._at + max_messages]
            after = self._at + len(messages)
            if after < len(batch.messages):
                position = QueueOffset(messages[-1].queue_offset + 1)
                self._positions[queue], self._at = position, after
            else:
                self._positions[queue] = batch.next_offset
                self._leave_batch()
                fetcher.consumed(batch.generation, len(batch.messages), batch.size)
            if messages:
                if self._loads is not None:
                    messages = [decoded(message, self._loads) for message in messages]
                intercepting.received(self._core.id, self.group, messages)
                return messages
        return []

    def _when_changed(self, callback: Callable[[], None]) -> None:
        """Set a callback that any thread may call, when ``take`` may have messages and when the consumer is closed."""
        self._inbox.on_change = callback

    @property
    def closed(self) -> bool:
        """True when the consumer is closed."""
        return self._closed

    def _leave_batch(self) -> None:
        self._batch, self._at = None, 0

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Commit offsets for the group, by default the positions of all assigned queues.

        Args:
            offsets: the offsets by queue.

        Raises:
            ClientError: the offsets may not be saved.
            BadRequest: an argument is invalid.
            ClientClosed: the consumer was closed.
        """
        self._check_open()
        for queue, offset in (self._positions if offsets is None else offsets).items():
            checks.queue(queue)
            checks.number("offset", offset)
            self._offsets.update(queue, QueueOffset(offset))
        self._offsets.save(deadline=self._core.deadline())

    # -- end ----------------------------------------------------------------------------------------------------------

    def _known(self, queue: MessageQueue) -> MessageQueue:
        checks.queue(queue)
        self._check_open()
        if queue not in self._fetchers:
            raise BadRequest(f"{queue} is not assigned; call assign() first")
        return queue

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed(f"this consumer {MADE_BEFORE if self._is_inherited else 'was closed'}")

    def close(self) -> None:
        """Stop reading; a ``poll`` that waits returns. The client stays open; closing it closes this consumer, too."""
        self._closed = True
        for fetcher in list(self._fetchers.values()):  # a thread that reads may add one while another one closes
            fetcher.stop()
        self._inbox.close()
