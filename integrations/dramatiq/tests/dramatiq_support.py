"""Brokers and workers of dramatiq, and what they have done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from dramatiq import Message, MessageProxy, Worker
from dramatiq_metaq import MetaqBroker
from dramatiq_metaq.consumer import QueueConsumer

from tests.support.broker import BrokerProcess, wait_until

DEADLINE_S: Final = 120.0
DEADLINE_MS: Final = 120_000

MakeBroker = Callable[..., MetaqBroker]


@pytest.fixture
def make_broker(process: BrokerProcess, namespace: str) -> Iterator[MakeBroker]:
    """Makes brokers of the test's namespace, which are closed in the end."""
    made: list[MetaqBroker] = []

    def make(max_priority: int | None = None, invisible: float = 60.0) -> MetaqBroker:
        address = f"metaq://{process.registry}/?timeout_s=30"
        made.append(MetaqBroker(address, namespace=namespace, max_priority=max_priority, invisible=invisible))
        return made[-1]

    yield make
    for broker in made:
        broker.close()


@pytest.fixture
def broker(make_broker: MakeBroker) -> MetaqBroker:
    return make_broker()


@contextmanager
def working(broker: MetaqBroker, threads: int = 4) -> Iterator[Worker]:
    """A worker of all queues; its threads look every 50 ms whether they are to stop."""
    worker = Worker(broker, worker_timeout=50, worker_threads=threads)
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()


def message_for(queue: str, actor: str = "nobody", *arguments: object) -> Message[Any]:
    return Message(queue_name=queue, actor_name=actor, args=arguments, kwargs={}, options={})


def dead_letters(broker: MetaqBroker, queue: str = "default") -> list[Message[Any]]:
    """The dead letters of a queue; one that is no message of dramatiq raises."""
    group = f"{broker.namespace}-{queue}"
    return [Message.decode(letter.body) for letter in broker.client.admin().dead_letters(group)]


def taken(consumer: QueueConsumer) -> MessageProxy:
    """The next message, which must come."""
    found: list[MessageProxy] = []

    def has_come() -> bool:
        found.extend(message for message in [next(consumer)] if message is not None)
        return bool(found)

    wait_until(has_come, DEADLINE_S, "a message comes")
    return found[0]
