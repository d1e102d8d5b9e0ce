"""Programs of kombu itself, for tests: connections, publishing, and consumers that keep what they get."""

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from kombu import Connection, Consumer, Producer, Queue

COME_S: Final = 60.0
"""The time in which what must happen happens."""
NONE_S: Final = 0.3
LEASE_S: Final = 1.5


@pytest.fixture
def connect(url: str) -> Iterator[Callable[..., Connection]]:
    """Make connections, which are closed at the end."""
    made: list[Connection] = []

    def new(**options: Any) -> Connection:
        connection = Connection(url, transport_options={"visibility_timeout": LEASE_S, **options})
        made.append(connection)
        return connection

    yield new
    for connection in made:
        connection.release()


class Got:
    """A consumer that keeps its messages."""

    def __init__(self, connection: Connection, *queues: Queue, prefetch: int = 0, no_ack: bool = False) -> None:
        self.connection = connection
        self.messages: list[Any] = []
        self.consumer = Consumer(connection.channel(), list(queues), callbacks=[self._take], no_ack=no_ack)
        if prefetch:
            self.consumer.qos(prefetch_count=prefetch)
        self.consumer.consume()

    def _take(self, body: Any, message: Any) -> None:
        self.messages.append(message)

    @property
    def bodies(self) -> list[Any]:
        return [message.payload for message in self.messages]

    def wait_for(self, count: int) -> list[Any]:
        """Return the bodies when so many messages have come."""
        end = time.monotonic() + COME_S
        while len(self.messages) < count:
            assert time.monotonic() < end, self.bodies
            self.drain(1.0)
        return self.bodies

    def drain(self, timeout_s: float = NONE_S) -> None:
        """Take what comes until nothing has come for so long."""
        try:
            while True:
                self.connection.drain_events(timeout=timeout_s)
                timeout_s = 0.0
        except TimeoutError:
            pass


def publish(connection: Connection, queue: Queue, *bodies: Any, **options: Any) -> None:
    producer = Producer(connection.default_channel)
    for body in bodies:
        producer.publish(body, exchange="", routing_key=queue.name, declare=[queue], **options)


def in_an_hour() -> dict[str, str]:
    """The headers of a task that is planned."""
    return {"eta": (datetime.now(UTC) + timedelta(hours=1)).isoformat()}
