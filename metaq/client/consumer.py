"""Consuming by iteration: the program takes messages when it is ready, and says what is done."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Final

from metaq.client import checks
from metaq.client.core import Core
from metaq.client.fetching import Batch, Fetcher
from metaq.client.group import ConsumeFrom, GroupConsumer, Model
from metaq.client.message import ReceivedMessage
from metaq.client.offsets import OFFSETS_FOLDER
from metaq.client.sendback import MAX_RECONSUME_TIMES, send_back
from metaq.message import MessageQueue, QueueOffset
from metaq.protocol.subscription import EVERYTHING
from metaq.registry.assign import Assign, average

_NO_MESSAGES: Final[Iterator[ReceivedMessage]] = iter(())


class Inbox:
    """Batches on their way from the threads that read connections to the one that consumes."""

    def __init__(self) -> None:
        self._batches: deque[Batch] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.on_change: Callable[[], None] = lambda: None
        """Called after something has come, and after the end, by any thread."""

    def put(self, batch: Batch) -> None:
        """Add what came."""
        with self._changed:
            self._batches.append(batch)
            self._changed.notify()
        self.on_change()

    def get(self, timeout_s: float | None) -> Batch | None:
        """The oldest batch; ``None`` after the time, or when the inbox is closed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._batches:
                left = None if deadline is None else deadline - time.monotonic()
                if self._closed or (left is not None and left <= 0):
                    return None
                self._changed.wait(left)
            return self._batches.popleft()

    def close(self) -> None:
        """Nothing comes any more, and what is here is dropped."""
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

    Iteration waits for messages, and ends when the consumer is closed. What was not committed is delivered again, to this or to
    another member. One thread at a time iterates; fetching ahead happens beside it.
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
        max_reconsume_times: int = MAX_RECONSUME_TIMES,
        offsets_folder: Path = OFFSETS_FOLDER,
    ) -> None:
        checks.subscription(topic, tags, sql)
        checks.flag("auto_commit", auto_commit)
        checks.number("max_reconsume_times", max_reconsume_times)
        super().__init__(core, group, model=model, consume_from=consume_from, assign=assign, offsets_folder=offsets_folder)
        self._auto_commit = auto_commit
        self._max_reconsume_times = max_reconsume_times
        self._inbox = Inbox()
        self._batch: Batch | None = None
        self._messages = _NO_MESSAGES
        self._handed_out: dict[MessageQueue, QueueOffset] = {}
        self._done: dict[MessageQueue, QueueOffset] = {}
        self.subscribe(topic, tags, sql=sql)
        self._start()

    def renew(self) -> None:
        super().renew()
        self._inbox = Inbox()  # which nothing will ever come into
        self._batch, self._messages = None, _NO_MESSAGES

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """As ``receive`` without a time limit, again and again, at a third of its cost."""
        handed_out = self._handed_out
        while (message := self.receive()) is not None:
            yield message
            batch = self._batch
            if batch is None:
                continue
            fetcher, generation, queue = batch.fetcher, batch.generation, batch.fetcher.queue
            for message in self._messages:
                if fetcher.generation != generation:
                    break
                handed_out[queue] = QueueOffset(message.queue_offset + 1)
                yield message
                if self._auto_commit:
                    self._done[queue] = handed_out[queue]

    def receive(self, timeout_s: float | None = None) -> ReceivedMessage | None:
        """The next message; ``None`` when none came in time, or the consumer is closed."""
        if timeout_s is not None:
            checks.seconds("timeout_s", timeout_s)
        if self._is_inherited:
            self._check_open()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._auto_commit:
            self._done.update(self._handed_out)
        while True:
            batch = self._batch
            if batch is not None:
                message = next(self._messages, None)
                if message is not None and batch.generation == batch.fetcher.generation:
                    self._handed_out[message.queue] = QueueOffset(message.queue_offset + 1)
                    return message
                self._finish(batch)
            self._batch = self._inbox.get(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if self._batch is None:
                return None
            self._messages = iter(self._batch.messages)

    def when_changed(self, callback: Callable[[], None]) -> None:
        """Call back, from any thread, when ``receive`` may have something, and when the consumer is closed."""
        self._inbox.on_change = callback

    @property
    def closed(self) -> bool:
        return self._closed

    def _finish(self, batch: Batch) -> None:
        """The batch is at its end, or no longer this member's to consume."""
        self._batch, self._messages = None, _NO_MESSAGES
        queue = batch.fetcher.queue
        if batch.generation == batch.fetcher.generation:
            if self._handed_out.get(queue) == self._done.get(queue):
                self._done[queue] = batch.next_offset  # behind what is committed there are only messages that were not wanted
            self._handed_out[queue] = batch.next_offset
            batch.fetcher.consumed(batch.generation, len(batch.messages), batch.size)

    def commit(self) -> None:
        """All messages handed out so far are done: brokers know it when this returns. ``ClientError``: they may not."""
        self._check_open()
        self._done.update(self._handed_out)
        self._remember_all()
        self._offsets.save(deadline=self._core.deadline())

    def retry_later(self, message: ReceivedMessage, *, delay_level: int = 0) -> None:
        """Have the message delivered to the group again after a while; then it may be committed here.

        Args:
            message: one of this consumer's.
            delay_level: 1 to 18, see ``Producer.send``; 0 for a delay that grows from 10 s on with each time.

        Raises:
            ClientError: no broker took it.
        """
        if not isinstance(message, ReceivedMessage):
            raise checks.wrong("message", message, "a message that was received")
        checks.number("delay_level", delay_level, 0, 18)
        if self._is_inherited:
            self._check_open()
        send_back(self._core, self.group, message, delay_level, self._max_reconsume_times, self._core.deadline())

    def _deliver(self, batch: Batch) -> None:
        self._inbox.put(batch)

    def _gained(self, fetcher: Fetcher, offset: QueueOffset) -> None:
        self._handed_out[fetcher.queue] = self._done[fetcher.queue] = offset

    def _position(self, fetcher: Fetcher) -> QueueOffset | None:
        return self._done.get(fetcher.queue)

    def _stop(self) -> None:
        self._inbox.close()
