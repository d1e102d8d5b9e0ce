"""The locks of an ordered consumer: it holds those of the queues that it consumes, and no others."""

import threading
from collections.abc import Collection
from typing import Any

import pytest

from metaq.client import PushConsumer, connect
from metaq.client.connecting.core import Core, GroupMember
from metaq.client.consuming.fetching import Fetcher
from metaq.errors import RequestTimeout
from metaq.message import MessageQueue, QueueOffset
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


def test_a_consumer_leaves_its_client_only_when_no_thread_takes_queues_for_it(
    memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next consumer of the group could lock the same queue, and such a thread would then release that lock."""
    memory.create_topic("orders", 1)
    usual, leaves = PushConsumer._first_offset, Core.remove_consumer
    allowed, taking, left = threading.Event(), threading.Event(), threading.Event()
    locked_then: list[bool] = []

    def first_offset(consumer: PushConsumer, queue: MessageQueue) -> QueueOffset:
        if queue == QUEUE:
            taking.set()
            wait_until(lambda: consumer._closed, SOON_S, "the consumer is being closed")
            left.wait(0.2)  # it comes only when the consumer does not wait for this
        return usual(consumer, queue)

    def remove_consumer(core: Core, member: GroupMember) -> None:
        locked_then.append(("billing", QUEUE) in memory._locks)
        left.set()
        leaves(core, member)

    def later(own: str, queues: Collection[MessageQueue], members: Collection[str]) -> list[MessageQueue]:
        return average(own, queues, members) if allowed.is_set() else []

    monkeypatch.setattr(PushConsumer, "_first_offset", first_offset)
    monkeypatch.setattr(Core, "remove_consumer", remove_consumer)
    with connect(memory.address) as client:
        consumer = client.listen("orders", "billing", Heard(), ordered=True, assign=later)
        allowed.set()
        thread = threading.Thread(target=consumer._rebalance)
        thread.start()
        assert taking.wait(SOON_S)
        consumer.close()
        thread.join(SOON_S)
    assert locked_then == [False]


def test_the_lock_of_a_queue_that_is_given_up_at_once_is_kept_until_its_offset_is_saved(
    memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that gives it up releases the lock, after that."""
    memory.create_topic("orders", 1)
    usual, given = PushConsumer._gained, list[Fetcher]()

    def gained(consumer: PushConsumer, fetcher: Fetcher, offset: QueueOffset) -> None:
        usual(consumer, fetcher, offset)
        if fetcher.queue == QUEUE:
            given.append(fetcher)
            with consumer._guard:  # as another thread begins to give it up
                consumer._fetchers.pop(QUEUE).stop()

    def once(own: str, queues: Collection[MessageQueue], members: Collection[str]) -> list[MessageQueue]:
        return [] if given else average(own, queues, members)

    monkeypatch.setattr(PushConsumer, "_gained", gained)
    with connect(memory.address) as client, client.listen("orders", "billing", Heard(), ordered=True, assign=once) as consumer:
        wait_until(lambda: bool(given), SOON_S, "the queue is taken")
        with consumer._rebalancing:
            assert ("billing", QUEUE) in memory._locks
        consumer._let_go([QUEUE])
        assert ("billing", QUEUE) not in memory._locks
