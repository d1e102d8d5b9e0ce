"""Consuming by iteration: the program takes messages when it is ready, and commits those that are done."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from metaq.client import checks, intercepting
from metaq.client.connecting.core import Core
from metaq.client.consuming.beginning import ConsumeFrom
from metaq.client.consuming.fetching import Fetcher, PulledBatch
from metaq.client.consuming.group import GroupConsumer
from metaq.client.consuming.offsets import OFFSETS_FOLDER
from metaq.client.consuming.sendback import MAX_RECONSUME_TIMES, send_back
from metaq.client.consuming.sharing import Model
from metaq.client.message import ReceivedMessage
from metaq.client.serializers import Serializer, check_serializer, decoded
from metaq.errors import ClientError
from metaq.message import QueueOffset
from metaq.protocol.subscription import EVERYTHING
from metaq.registry.assign import Assign, average

logger = logging.getLogger(__name__)


class _Cursor:
    """The offsets up to which the messages of one fetcher are handed out, and done."""

    __slots__ = ("done", "fetcher", "generation", "handed_out")

    def __init__(self, fetcher: Fetcher, begin: QueueOffset) -> None:
        self.fetcher = fetcher
        self.generation = fetcher.generation
        self.handed_out = self.done = begin


class Inbox:
    """A queue of batches, from the threads that read connections to the thread that consumes.

    With ``by_priority``, those of greater partitions come first.
    """

    def __init__(self, *, by_priority: bool = False) -> None:
        self._by_priority = by_priority
        self._batches: deque[PulledBatch] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.on_change: Callable[[], None] = lambda: None
        """A callback that any thread calls after a batch was added, and after the inbox was closed."""

    def put(self, batch: PulledBatch) -> None:
        """Add a batch."""
        with self._changed:
            self._batches.append(batch)
            self._changed.notify()
        self.on_change()

    def get(self, timeout_s: float | None) -> PulledBatch | None:
        """Return the next batch, the oldest or that of the greatest partition.

        Return ``None`` when none comes within ``timeout_s`` or the inbox is closed.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._batches:
                left = None if deadline is None else deadline - time.monotonic()
                if self._closed or (left is not None and left <= 0):
                    return None
                self._changed.wait(left)
            if self._by_priority:  # as many batches as partitions that are read
                first = max(range(len(self._batches)), key=lambda at: self._batches[at].fetcher.queue.partition)
                self._batches.rotate(-first)
                batch = self._batches.popleft()
                self._batches.rotate(first)
                return batch
            return self._batches.popleft()

    def close(self) -> None:
        """Drop the batches that are here, and wake the thread that waits."""
        with self._changed:
            self._closed = True
            self._batches.clear()
            self._changed.notify_all()
        self.on_change()


class SimpleConsumer(GroupConsumer):
    """A member of a group that is iterated over; made by ``Client.consumer``.

    ::

        with client.consumer("orders", "billing", tags="paid || refunded") as consumer:
            for message in consumer:
                handle(message)
                consumer.commit()

    Iteration waits for messages, and ends when the consumer is closed. Messages that were not committed are delivered again, to
    this or to another member. Only one thread at a time may iterate; messages are prefetched in the background.
    """

    def __init__(
        self,
        core: Core,
        topic: str,
        group: str,
        *,
        tags: str = EVERYTHING,
        sql: str | None = None,
        model: Model = Model.CLUSTERING,
        consume_from: ConsumeFrom | datetime = ConsumeFrom.LAST,
        assign: Assign = average,
        auto_commit: bool = False,
        by_priority: bool = False,
        max_reconsume_times: int = MAX_RECONSUME_TIMES,
        offsets_folder: Path = OFFSETS_FOLDER,
        deserializer: Serializer[Any] | None = None,
    ) -> None:
        check_serializer("deserializer", deserializer)
        checks.subscription(topic, tags, sql)
        checks.flag("auto_commit", auto_commit)
        checks.flag("by_priority", by_priority)
        checks.number("max_reconsume_times", max_reconsume_times)
        super().__init__(core, group, model=model, consume_from=consume_from, assign=assign, offsets_folder=offsets_folder)
        self._loads = None if deserializer is None else deserializer.loads
        self._auto_commit = auto_commit
        self._max_reconsume_times = max_reconsume_times
        self._inbox = Inbox(by_priority=by_priority)
        self._cursors: dict[Fetcher, _Cursor] = {}
        self._cursor: _Cursor | None = None
        """The cursor of the batch that is being handed out."""
        self._batch: PulledBatch | None = None
        self._messages: deque[ReceivedMessage] = deque()
        """The rest of that batch. Messages that were handed out are not kept, because they may hold inflated bodies."""
        self._count = 0
        """The number of messages that the batch had."""
        self.subscribe(topic, tags, sql=sql)
        self._start()

    def _renew(self) -> None:
        super()._renew()
        self._inbox = Inbox()  # which stays empty
        self._batch, self._cursor, self._cursors = None, None, {}
        self._messages = deque()

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Yield messages until the consumer is closed, as ``receive`` without a time limit does, at a third of its cost.

        Raises:
            ClientClosed: the consumer was made before this process was forked.
        """
        while (message := self.receive()) is not None:
            yield message
            cursor, messages = self._cursor, self._messages
            if cursor is None or self._loads is not None or intercepting.is_intercepted():
                continue
            fetcher, generation = cursor.fetcher, cursor.generation
            while messages and fetcher.generation == generation:
                if self._auto_commit:
                    cursor.done = cursor.handed_out
                message = messages[0]
                following = QueueOffset(message.queue_offset + 1)
                messages.popleft()
                cursor.handed_out = following
                yield message

    def receive(self, timeout_s: float | None = None) -> ReceivedMessage | None:
        """Return the next message; ``None`` when none comes within ``timeout_s`` or the consumer is closed.

        Args:
            timeout_s: the most seconds to wait; by default without limit.

        Raises:
            BadRequest: an argument is invalid.
            ClientClosed: the consumer was made before this process was forked.
        """
        if timeout_s is not None:
            checks.seconds("timeout_s", timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self._next(deadline)) is not None and self._loads is not None:
            message = decoded(message, self._loads)
            if message.error is None or not self._went_back(message):
                break
        if message is not None:
            intercepting.received(self._core.id, self.group, (message,))
        return message

    def _next(self, deadline: float | None) -> ReceivedMessage | None:
        """Return the next message as it came; ``None`` when none comes until then or the consumer is closed."""
        if self._is_inherited:
            self._check_open()
        while True:
            cursor = self._cursor
            if cursor is not None:
                if self._auto_commit:
                    cursor.done = cursor.handed_out
                if self._messages and cursor.generation == cursor.fetcher.generation:
                    message = self._messages[0]
                    following = QueueOffset(message.queue_offset + 1)
                    self._messages.popleft()
                    cursor.handed_out = following
                    return message
                self._finish(cursor)
            if self._batch is None:
                self._batch = self._inbox.get(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if self._batch is None:
                return None
            self._open(self._batch)

    def _take_back(self, message: ReceivedMessage) -> None:
        """Make the message that was handed out last the next one again, so that ``commit`` does not count it."""
        if self._cursor is not None:
            self._messages.appendleft(message)
            self._cursor.handed_out = QueueOffset(message.queue_offset)

    def _went_back(self, message: ReceivedMessage) -> bool:
        """Have a message that could not be decoded delivered again later; return false when no broker takes it back.

        A broadcast consumer does not send messages back: they are done.
        """
        logger.warning("message unreadable group=%s message=%s reason=%s", self.group, message.id, message.error)
        if self._model is Model.BROADCASTING:
            return True
        try:
            self.retry_later(message)
        except ClientError as error:
            logger.warning("no broker takes a message back, the program gets it message=%s reason=%s", message.id, error)
            return False
        return True

    def _open(self, batch: PulledBatch) -> None:
        """Start to hand out the messages of a batch. Should this fail, ``receive`` does it again with the same batch."""
        cursor = self._cursors.get(batch.fetcher)
        if cursor is None or cursor.generation != batch.generation:
            self._batch = None
            return
        self._messages, self._count = deque(batch.messages), len(batch.messages)
        self._cursor = cursor
        batch.messages.clear()

    def _when_changed(self, callback: Callable[[], None]) -> None:
        """Set a callback that any thread may call, when ``receive`` may have a message and when the consumer is closed."""
        self._inbox.on_change = callback

    @property
    def closed(self) -> bool:
        """True when the consumer is closed."""
        return self._closed

    def _finish(self, cursor: _Cursor) -> None:
        """Leave a batch that is at its end, or whose queue this member has lost or repositioned."""
        batch, self._batch, self._cursor = self._batch, None, None
        if batch is not None and cursor.generation == cursor.fetcher.generation:
            if cursor.handed_out == cursor.done:
                cursor.done = batch.next_offset  # only filtered messages follow
            cursor.handed_out = batch.next_offset
            cursor.fetcher.consumed(batch.generation, self._count, batch.size)

    def commit(self) -> None:
        """Commit all messages handed out so far, and wait until the offsets are saved.

        Raises:
            ClientError: the offsets may not be saved.
            ClientClosed: the consumer was closed.
        """
        self._check_open()
        for cursor in list(self._cursors.values()):
            cursor.done = cursor.handed_out
        self._remember_all()
        self._offsets.save(deadline=self._core.deadline())

    def retry_later(self, message: ReceivedMessage, *, delay_level: int = 0) -> None:
        """Have a message delivered to the group again after a delay. After that it may be committed here.

        Args:
            message: a message of this consumer.
            delay_level: 1 to 18, see ``Producer.send``; 0 for a delay that begins at 10 s and grows each time.

        Raises:
            ClientError: no broker took it.
            BadRequest: an argument is invalid.
        """
        if not isinstance(message, ReceivedMessage):
            raise checks.wrong("message", message, "a message that was received")
        checks.number("delay_level", delay_level, 0, 18)
        if self._is_inherited:
            self._check_open()
        send_back(self._core, self.group, message, delay_level, self._max_reconsume_times, self._core.deadline())

    def _deliver(self, batch: PulledBatch) -> None:
        self._inbox.put(batch)

    def _gained(self, fetcher: Fetcher, offset: QueueOffset) -> None:
        with self._guard:
            kept = {known: cursor for known, cursor in self._cursors.items() if not known.stopped}
            self._cursors = kept | {fetcher: _Cursor(fetcher, offset)}

    def _position(self, fetcher: Fetcher) -> QueueOffset | None:
        cursor = self._cursors.get(fetcher)
        return None if cursor is None else cursor.done

    def _stop(self) -> None:
        self._inbox.close()
