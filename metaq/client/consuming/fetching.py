"""Prefetching of queues: long polling into a bounded buffer."""

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from metaq.client.connecting.core import Core
from metaq.client.connecting.presence import level_of
from metaq.client.connecting.transport import Outcome, RemotingRequest, refusal
from metaq.client.consuming.records import decode_messages
from metaq.client.message import ReceivedMessage
from metaq.client.retries import READ_BACKOFF
from metaq.errors import ChecksumMismatch, ClientError, ConnectionFailed
from metaq.message import MessageQueue, QueueOffset
from metaq.protocol.remoting.codes import MASTER, PULL_HAS_SUBSCRIPTION, PULL_SUSPENDS, Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.sql92 import compile_expression
from metaq.protocol.subscription import ExpressionKind, Subscription, parse_subscription

logger = logging.getLogger(__name__)

HOLD_MS: Final = 15_000
_ANSWER_S: Final = HOLD_MS / 1000 + 15.0
"""The longest time that the answer to a pull may take: the time that the broker holds it, and more for a busy broker."""
_MOST_MESSAGES: Final = 1024
"""The most messages requested in one pull; brokers return fewer."""
QUEUE_BYTES: Final = 4 * 1024 * 1024
QUEUE_MESSAGES: Final = 8192
"""The most messages buffered of one queue; two more pulls may be in flight."""
TOTAL_BYTES: Final = 64 * 1024 * 1024
"""The most bytes buffered of all queues of a consumer; beyond it, each queue buffers only the result of one pull."""
_TOO_SOON_S: Final = 0.05
"""A broker that has no messages holds a pull. When it answers an empty pull faster than this, the next one is delayed."""


def subscription_to(topic: str, tags: str, sql: str | None, version: int = 0) -> Subscription:
    """Return the subscription of a consumer, checked before a broker sees it: ``SubscriptionInvalid`` says what is wrong."""
    if sql is None:
        return parse_subscription(topic, tags, version)
    compile_expression(sql)
    return parse_subscription(topic, sql, version, ExpressionKind.SQL92)


class PulledBatch(NamedTuple):
    """The result of one pull."""

    fetcher: "Fetcher"
    generation: int
    """The fetcher's generation; when the fetcher has another one by now, the batch must not be consumed."""
    messages: list[ReceivedMessage]
    next_offset: QueueOffset
    """The offset after the batch, and after messages that the subscription filters out."""
    size: int
    """The bytes to pass to ``Fetcher.consumed``."""


Deliver = Callable[[PulledBatch], None]


class Budget:
    """The bytes that all fetchers of one consumer hold together. Thread-safe."""

    def __init__(self, limit: int = TOTAL_BYTES) -> None:
        self._limit = limit
        self._guard = threading.Lock()  # guards what follows
        self._held = 0
        self._waiting: set[Fetcher] = set()

    def take(self, size: int) -> None:
        with self._guard:
            self._held += size

    def has_room(self, fetcher: "Fetcher") -> bool:
        """Return whether there is room; if not, the fetcher's ``pull_soon`` is called once there is."""
        with self._guard:
            if self._held < self._limit:
                return True
            self._waiting.add(fetcher)
            return False

    def give_back(self, size: int) -> None:
        with self._guard:
            self._held -= size
            if self._held >= self._limit // 2 or not self._waiting:
                return
            waiting, self._waiting = self._waiting, set()
        for fetcher in waiting:
            fetcher.pull_soon()


class FetchContext(NamedTuple):
    """The things that all fetchers of one consumer share."""

    core: Core
    group: str
    deliver: Deliver
    """The function that takes batches, those of one queue one at a time; it runs on a thread that it must not block."""
    budget: Budget


class Fetcher:
    """A reader of one queue that keeps a bounded number of messages ready, from an offset on, until it is stopped."""

    def __init__(self, source: FetchContext, queue: MessageQueue, subscription: Subscription, offset: QueueOffset) -> None:
        self.queue = queue
        self.pulled = time.monotonic()
        """The time of the last answer, as ``time.monotonic`` gives it."""
        self._source = source
        self._subscription = subscription
        self._delivering = threading.Lock()  # keeps batches in order
        self._guard = threading.Lock()  # guards what follows
        self.generation = 0
        self.stopped = False
        self._next = offset
        self._epoch = 0
        self._in_flight: int | None = None
        self._asked = 0.0
        self._messages = 0
        self._bytes = 0
        self._failures = 0
        self._replica = MASTER
        self._damaged_at: QueueOffset | None = None
        self._is_held_back = False

    def stop(self) -> None:
        """Deliver no more messages."""
        with self._guard:
            self.stopped = True
            self._leave()

    def seek(self, offset: QueueOffset) -> None:
        """Continue at ``offset`` with the next ``pull``; batches that were delivered before must not be consumed."""
        with self._guard:
            self._next = offset
            self._leave()

    def _leave(self) -> None:
        """Drop the buffered messages and the answer in flight, which the broker may hold for a long time."""
        self.generation += 1
        self._epoch += 1
        held, self._bytes, self._messages = self._bytes, 0, 0
        self._source.core.scheduler.run(functools.partial(self._source.budget.give_back, held))

    def consumed(self, generation: int, messages: int, size: int) -> None:
        """Free the room of consumed messages, and pull again if that had stopped."""
        with self._guard:
            if generation != self.generation:
                return
            self._messages -= messages
            self._bytes -= size
            is_idle = self._in_flight != self._epoch
        self._source.budget.give_back(size)
        if is_idle:  # pulling may have to connect, and this thread, perhaps an event loop's, must not block
            self.pull_soon()

    def hold_back(self) -> None:
        """Pull no more until ``go_on``. What was requested before is still delivered."""
        with self._guard:
            self._is_held_back = True

    def go_on(self) -> None:
        """Pull again after ``hold_back``."""
        with self._guard:
            self._is_held_back = False
        self.pull_soon()

    def pull_soon(self) -> None:
        """Call ``pull`` on another thread."""
        self._source.core.scheduler.run(self.pull)

    @property
    def buffered(self) -> int:
        """The number of messages that wait for their consumer."""
        return self._messages

    def pull(self) -> None:
        """Send a pull, unless one is in flight already or there is no room. It may block to connect."""
        with self._guard:
            if self.stopped or self._in_flight == self._epoch or not self._has_room():
                return
            self._in_flight = epoch = self._epoch
            offset = self._next
            self._asked = time.monotonic()
        answered = functools.partial(self._answered, epoch, offset)
        try:
            self._source.core.transport.submit(self._address(), self._request(offset), self._asked + _ANSWER_S, answered)
        except ClientError as error:  # on another thread: this one may still be handling the previous answer
            self._source.core.scheduler.run(functools.partial(answered, error))
        except Exception as error:  # noqa: BLE001 - else there would be no further pull
            with self._guard:
                self._epoch += epoch == self._epoch
            self._pause(error)

    def _address(self) -> str:
        """Return the address of the replica that the last answer suggested, if it is known, else of any replica."""
        routes, name = self._source.core.routes, self.queue.broker_name
        address = routes.address(name, self._replica) or routes.any_address(name)
        if address is None:
            raise ConnectionFailed(f"no route names broker {name}")
        return address

    def _go_elsewhere(self) -> None:
        """Choose another replica for the next pull after one did not answer; slaves send readers back to a live master."""
        numbers = list(self._source.core.routes.replicas(self.queue.broker_name))
        later = [number for number in numbers if number > self._replica]
        self._replica = (later or numbers or [MASTER])[0]
        self._source.core.look_for_masters()

    def _has_room(self) -> bool:
        if self._is_held_back:
            return False
        if not self._messages:
            return True
        return self._messages < QUEUE_MESSAGES and self._bytes < QUEUE_BYTES and self._source.budget.has_room(self)

    def _request(self, offset: int) -> RemotingRequest:
        fields = {
            "consumerGroup": self._source.group,
            "topic": self.queue.topic,
            "queueId": str(self.queue.partition),
            "queueOffset": str(offset),
            "maxMsgNums": str(_MOST_MESSAGES),
            "sysFlag": str(PULL_SUSPENDS | PULL_HAS_SUBSCRIPTION),
            "commitOffset": "0",
            "suspendTimeoutMillis": str(HOLD_MS),
            "subscription": self._subscription.expression,
            "subVersion": str(self._subscription.version),
            "expressionType": self._subscription.kind.value,
        }
        return RemotingRequest(Request.PULL_MESSAGE, fields)

    def _answered(self, epoch: int, offset: QueueOffset, outcome: Outcome) -> None:
        """Handle an answer, one at a time: after a lost connection, answers may arrive on two threads at once."""
        with self._delivering:
            with self._guard:
                self.pulled = time.monotonic()
                if epoch != self._epoch:
                    return
                self._in_flight = None
                generation = self.generation
            if isinstance(outcome, ClientError):
                self._go_elsewhere()
                self._pause(outcome)
                return
            try:
                self._took(epoch, offset, outcome)
            except Exception as error:  # noqa: BLE001 - whatever the error is, even a lack of memory, no message may be skipped
                self._again(generation, offset, error)

    def _took(self, epoch: int, offset: QueueOffset, response: RemotingCommand) -> None:
        if response.code not in _PULLED:
            if response.code in {Response.TOPIC_NOT_EXIST, Response.NO_PERMISSION}:
                self._source.core.routes.forget(self.queue.topic)
            raise refusal(response)
        following = QueueOffset(int(response.fields["nextBeginOffset"]))
        replica, self._replica = self._replica, int(response.fields.get("suggestWhichBrokerId", MASTER))
        if response.code == Response.PULL_OFFSET_MOVED:
            logger.warning("offset out of range queue=%s offset=%s reading_on_at=%s", self.queue, offset, following)
        if not response.body and following == offset:
            if self.pulled - self._asked < _TOO_SOON_S:
                self._pause(None)
                return
            with self._guard:
                self._failures = 0
            self.pull()
            return
        with self._guard:
            if epoch != self._epoch:
                return
            generation = self.generation
            self._failures = 0
            self._next = following
        (self.pull if replica == self._replica else self.pull_soon)()  # the broker reads ahead while this is decoded
        messages = self._decode(response.body, offset)
        if self._subscription.tags:
            messages = [message for message in messages if self._subscription.matches_tag(message.tag)]
        size = len(response.body)
        with self._guard:
            if generation != self.generation:
                return
            self._messages += len(messages)
            self._bytes += size
        self._source.budget.take(size)
        try:
            self._source.deliver(PulledBatch(self, generation, messages, following, size))
        except Exception:
            self.consumed(generation, len(messages), size)  # the caller pulls them again
            raise

    def _decode(self, records: bytes, offset: QueueOffset) -> list[ReceivedMessage]:
        """Decode records. Damaged ones are pulled once more; if they are damaged again, they are delivered with an error."""
        twice, self._damaged_at = self._damaged_at == offset, None
        most = self._source.core.max_inflated_bytes
        try:
            return decode_messages(records, self.queue.broker_name, self.queue.topic, most=most, damaged_too=twice)
        except ChecksumMismatch:
            self._damaged_at = offset
            raise

    def _again(self, generation: int, offset: QueueOffset, error: Exception) -> None:
        """Pull from ``offset`` again after an answer that could not be used, and ignore a pull that was sent meanwhile."""
        with self._guard:
            if generation != self.generation:
                return
            self._epoch += 1
            self._next = offset
        self._pause(error)

    def _pause(self, error: Exception | None) -> None:
        with self._guard:
            if self.stopped:
                return
            pause_s = READ_BACKOFF.pause_s(self._failures)
            self._failures += 1
        if error is not None:
            logger.log(level_of(error), "pull failed queue=%s failures=%s reason=%r", self.queue, self._failures, error)
        self._source.core.scheduler.after(pause_s, self.pull)


_PULLED: Final = frozenset(
    {Response.SUCCESS, Response.PULL_NOT_FOUND, Response.PULL_RETRY_IMMEDIATELY, Response.PULL_OFFSET_MOVED}
)
