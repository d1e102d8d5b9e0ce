"""The broker of dramatiq: it sends and leases messages of metaq."""

import time
from datetime import timedelta
from typing import Any, Final

from dramatiq import Broker, Middleware
from dramatiq.errors import QueueJoinTimeout, QueueNotFound
from dramatiq.message import Message

import metaq
from dramatiq_metaq.consumer import LeasedProxy, QueueConsumer, batch_of
from dramatiq_metaq.errors import told_to_dramatiq
from dramatiq_metaq.topics import Topics

_MOST_PRIORITY: Final = 255


class MetaqBroker(Broker):
    """A broker that keeps each queue in a topic of metaq, and leases its messages to workers.

    ::

        dramatiq.set_broker(MetaqBroker("127.0.0.1:9876"))

    Delays are timers of metaq: until it is due, no worker has the message. So there are no delay queues.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:9876",
        *,
        middleware: list[Middleware] | None = None,
        namespace: str = "dramatiq",
        max_priority: int | None = None,
        invisible: timedelta | float = 60.0,
    ) -> None:
        """Create it. It connects when it is first used.

        Args:
            address: one or more registries of metaq, as ``metaq.connect`` takes them, with user, time limit and TLS in a URL:
                ``metaq://user:password@host:9876/?timeout_s=5&tls=true``.
            middleware: all middleware; by default that of dramatiq.
            namespace: what the names of topics and groups begin with: the queue ``default`` is ``dramatiq-default``.
            max_priority: the greatest ``broker_priority`` of messages, from 1 to 255, in queues that this broker makes. Two
                to ten are enough for most.
            invisible: the time after which others get the messages of a worker that died, a ``timedelta`` or seconds.

        Raises:
            metaq.BadRequest: the address cannot be read.
            ValueError: the priority is out of its range.
        """
        super().__init__(middleware=middleware)
        if max_priority is not None and not 0 < max_priority <= _MOST_PRIORITY:
            raise ValueError(f"max_priority is {max_priority}; it takes 1 to {_MOST_PRIORITY}, or None")
        self.queues: set[str] = set()
        self.client = metaq.connect(address)
        """Also for what dramatiq has no words for, such as ``client.admin().dead_letters("dramatiq-default")``."""
        self.namespace = namespace
        self._invisible = invisible
        self._topics = Topics(self.client, namespace, max_priority)
        self._producer = self.client.producer(namespace)

    def close(self) -> None:
        """Close the connections. Workers must have been stopped."""
        self.client.close()

    def declare_queue(self, queue_name: str) -> None:
        """Declare a queue. Its topic is made when it is first used.

        Args:
            queue_name: the name of the queue.
        """
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues.add(queue_name)
            self.emit_after("declare_queue", queue_name)

    def get_declared_queues(self) -> set[str]:
        """Return the names of all queues that were declared."""
        return self.queues.copy()

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> QueueConsumer:
        """Return a consumer of a queue. A process has one for each queue.

        Args:
            queue_name: the name of the queue.
            prefetch: how many messages it may have at once from each broker.
            timeout: the milliseconds after which it returns ``None`` when there is no message.

        Raises:
            QueueNotFound: the queue was not declared.
            ConnectionClosed: no broker can be reached; the worker tries again.
            metaq.ClientError: the broker refuses, or the queue has a consumer already.
        """
        if queue_name not in self.queues:
            raise QueueNotFound(queue_name)
        with told_to_dramatiq():
            topic = self._topics.ensure(queue_name)
            leases = self.client.lease_consumer(
                topic, topic, batch=batch_of(prefetch), invisible=self._invisible, from_first=True, keep=True
            )
        return QueueConsumer(leases, prefetch, timeout / 1000)

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Send a message, and return it when the broker has stored it.

        Args:
            message: the message. Its option ``broker_priority`` counts in queues with priorities: the greater, the sooner.
            delay: the milliseconds that it waits in the broker first, up to ``max_delay_ms`` of that, 400 days by default.

        Raises:
            ConnectionClosed: no broker can be reached, or all are busy, for as long as the client's time limit.
            metaq.MetaqError: the broker refuses the message, for example a delay that is too long.
        """
        self.declare_queue(message.queue_name)
        self.emit_before("enqueue", message, delay)
        try:
            with told_to_dramatiq():
                self._producer.send(
                    self._topics.ensure(message.queue_name),
                    message.encode(),
                    keys=message.message_id,
                    priority=message.options.get("broker_priority"),
                    delay=None if delay is None else timedelta(milliseconds=max(0, delay)),
                )
        except Exception:
            if isinstance(message, LeasedProxy):
                # The retry of a message: middleware may not fail, so dramatiq would ack it now, and it would be lost.
                message.again_s = max(0, delay or 0) / 1000
            raise
        self.emit_after("enqueue", message, delay)
        return message

    def flush(self, queue_name: str) -> None:
        """Drop all messages of a queue, also those that are delayed or being processed. Its dead letters stay.

        Args:
            queue_name: the name of the queue.

        Raises:
            ConnectionClosed: no broker can be reached.
            metaq.ClientError: the broker refuses.
        """
        with told_to_dramatiq():
            self._topics.flush(queue_name)

    def flush_all(self) -> None:
        """Drop all messages of all declared queues, as ``flush`` does."""
        for queue_name in self.get_declared_queues():
            self.flush(queue_name)

    def join(self, queue_name: str, *, interval: int = 100, timeout: int | None = None) -> None:
        """Wait until all messages of a queue have been processed, also those that are delayed. For tests.

        Args:
            queue_name: the name of the queue.
            interval: the milliseconds between two looks.
            timeout: the most milliseconds to wait; by default without limit.

        Raises:
            QueueJoinTimeout: there are still messages after that time.
            ConnectionClosed: no broker can be reached.
            metaq.ClientError: the broker refuses.
        """
        until_s = None if timeout is None else time.monotonic() + timeout / 1000
        with told_to_dramatiq():
            while not self._topics.is_done(queue_name):
                if until_s is not None and time.monotonic() >= until_s:
                    raise QueueJoinTimeout(queue_name)
                time.sleep(interval / 1000)
