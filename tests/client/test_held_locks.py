"""The locks of an ordered consumer: it holds those of the queues that it consumes, and no others."""

from collections.abc import Collection
from typing import Any

import pytest

from metaq.client import PushConsumer, connect
from metaq.errors import RequestTimeout
from metaq.message import MessageQueue
from metaq.registry.assign import average
from metaq.testing import InMemoryBroker
from tests.client.test_consumers import Heard
from tests.support.broker import wait_until

QUEUE = MessageQueue("orders", "memory", 0)
SOON_S = 20.0
"""Less than the time after which a consumer no longer relies on a lock that is not renewed."""


@pytest.mark.parametrize("obstacle", ["an error", "closing"])
def test_the_lock_of_a_queue_that_was_not_begun_is_released(
    memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    """SG-118: the queue may be assigned to another member by the next time, which would wait for the lock for ever."""
    memory.create_topic("orders", 1)
    usual, tries = PushConsumer._first_offset, list[PushConsumer]()

    def first_offset(consumer: PushConsumer, queue: MessageQueue) -> Any:
        if queue == QUEUE:
            tries.append(consumer)
            if obstacle == "an error":
                raise RequestTimeout("no answer in time")
            consumer.close()
        return usual(consumer, queue)

    def once(own: str, queues: Collection[MessageQueue], members: Collection[str]) -> list[MessageQueue]:
        return [] if tries and QUEUE in queues else average(own, queues, members)

    monkeypatch.setattr(PushConsumer, "_first_offset", first_offset)
    with connect(memory.address) as client, client.listen("orders", "billing", Heard(), ordered=True, assign=once) as consumer:
        wait_until(lambda: bool(tries), SOON_S, "the queue is taken")
        locks = consumer._locks
        assert locks is not None
        wait_until(lambda: not locks.holds(QUEUE), SOON_S, "the lock is released here")
        wait_until(lambda: ("billing", QUEUE) not in memory._locks, SOON_S, "the lock is released at the broker")
        assert QUEUE not in consumer.assignment()
