"""A producer that goes on while a cluster is operated, and a check that everything it sent is there."""

import threading
from types import TracebackType
from typing import Final, Self

import metaq
from metaq.errors import ClientError
from tests.support.broker import wait_until

TOPIC: Final = "under-load"
DEADLINE_S: Final = 120.0
PAUSE_S: Final = 0.005
EMPTY_S: Final = 10.0


class Load:
    """One thread that sends numbered messages, with the retries that every client has."""

    def __init__(self, registry: str) -> None:
        self._registry = registry
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._send_forever)
        self.sent = 0
        self.failed: ClientError | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ending.set()
        self._thread.join()

    def _send_forever(self) -> None:
        with metaq.connect(self._registry) as client:
            producer = client.producer()
            try:
                while not self._ending.wait(PAUSE_S):
                    producer.send(TOPIC, b"%d" % self.sent)
                    self.sent += 1
            except ClientError as error:
                self.failed = error

    def wait_sent(self, count: int) -> None:
        """Wait until so many more are sent; none has failed."""
        goal = self.sent + count
        wait_until(lambda: self.sent >= goal or self.failed is not None, DEADLINE_S, f"{count} more messages are sent")
        self.expect_none_failed()

    def expect_none_failed(self) -> None:
        """No send has raised."""
        assert self.failed is None, f"after {self.sent} sends: {self.failed}"

    def check(self) -> None:
        """No send has failed, and every message is there."""
        self.expect_none_failed()
        found: set[int] = set()
        with metaq.connect(self._registry) as client, client.pull_consumer(TOPIC) as consumer:
            consumer.assign(consumer.partitions())
            consumer.seek_to_begin()
            while len(found) < self.sent and (messages := consumer.poll(timeout_s=EMPTY_S)):
                found.update(int(message.body) for message in messages)
        assert found == set(range(self.sent))
