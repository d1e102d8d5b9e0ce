"""The offsets of a group at brokers that cannot all be reached, and of queues that other members have taken over."""

import time
from collections.abc import Callable

import pytest

from metaq.client import Client, connect
from metaq.client.consuming.offsets import BrokerOffsets
from metaq.errors import ConnectionFailed
from metaq.message import MessageQueue, QueueOffset
from metaq.testing import InMemoryBroker
from tests.client.test_consumers import FIRST, Heard, send, take
from tests.support.broker import BrokerProcess, wait_until

DEADLINE_S = 60.0
LOST, HERE = MessageQueue("orders", "lost", 0), MessageQueue("orders", "memory", 0)


@pytest.mark.parametrize("wait_s", [DEADLINE_S, None])
def test_a_broker_that_cannot_be_reached_stops_no_commit_to_others(memory: InMemoryBroker, wait_s: float | None) -> None:
    """SG-118: the others are told, then the caller hears of it, and the next save tries again."""
    memory.create_topic("orders", 1)
    with connect(memory.address) as client:
        send(client, 3)
        offsets = BrokerOffsets(client._core, "billing")
        offsets.update(LOST, QueueOffset(1))
        offsets.update(HERE, QueueOffset(2))
        for _ in range(2):
            with pytest.raises(ConnectionFailed, match="no route names a master of lost"):
                offsets.save(deadline=None if wait_s is None else time.monotonic() + wait_s)
        assert memory.committed("billing", "orders") == {0: 2}
        offsets.forget(LOST)
        offsets.save()


def test_who_has_given_a_queue_up_commits_nothing_for_it_later(memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-118: also when its broker could not be reached when it was given up; the next member may be further by then."""
    memory.create_topic("orders", 1)
    with connect(memory.address) as client, client.consumer("orders", "billing", consume_from=FIRST) as consumer:
        send(client, 3)
        take(consumer, 1)
        consumer.commit()
        take(consumer, 1)
        with monkeypatch.context() as unreachable:
            unreachable.setattr(client._core.routes, "address", lambda name: None)
            with pytest.raises(ConnectionFailed):
                consumer.commit()
            consumer._drop([HERE])
        consumer._save_positions()
        assert memory.committed("billing", "orders") == {0: 1}


def test_a_commit_moves_an_offset_forward_only(client: Client) -> None:
    client.admin().create_topic("orders", 1)
    send(client, 3)
    with client.pull_consumer("orders", group="billing") as consumer:
        (queue,) = consumer.partitions()
        for committed, offset in ((2, 2), (1, 2), (3, 3), (0, 3)):
            consumer.commit({queue: committed})
            assert consumer.committed(queue) == offset


@pytest.mark.parametrize("taken_up", ["read", "committed", "old"])
def test_commits_of_before_a_reset_are_ignored(memory: InMemoryBroker, taken_up: str) -> None:
    """Until a member has read or committed the new offset, or a minute has passed."""
    memory.create_topic("orders", 1)
    with connect(memory.address) as client, client.pull_consumer("orders", group="billing") as consumer:
        send(client, 5)
        (queue,) = consumer.partitions()
        consumer.commit({queue: 3})
        memory.reset_offsets("billing", "orders", 1)
        consumer.commit({queue: 5})
        assert memory.committed("billing", "orders") == {0: 1}
        if taken_up == "read":
            assert consumer.committed(queue) == 1
        elif taken_up == "committed":
            consumer.commit({queue: 1})
        else:
            memory.advance(60)
        consumer.commit({queue: 4})
        assert memory.committed("billing", "orders") == {0: 4}


def test_a_reset_to_the_offset_that_is_known_is_taken_up_in_memory(
    memory: InMemoryBroker, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(memory.address) as client:
        client.admin().create_topic("orders", 1)
        consume_after_reset(client, lambda: memory.reset_offsets("billing", "orders"), caplog)
        assert memory.committed("billing", "orders") == {0: 1}


def test_a_reset_to_the_offset_that_is_known_is_taken_up(process: BrokerProcess, caplog: pytest.LogCaptureFixture) -> None:
    with connect(process.registry, timeout_s=DEADLINE_S) as client:
        admin = client.admin()
        admin.create_topic("orders", 1)
        consume_after_reset(client, lambda: admin.reset_offset("billing", "orders", 0, apply=True), caplog)
        assert list(admin.offsets("billing", "orders").values()) == [1]


@pytest.mark.parametrize(("offset", "there"), [(9, 3), (0, 2), (-1, 2)])
def test_a_reset_in_memory_to_an_offset_that_a_partition_does_not_have(
    memory: InMemoryBroker, caplog: pytest.LogCaptureFixture, offset: int, there: int
) -> None:
    """It goes to the nearer end, as with ``Admin.reset_offset``, and members go on from there."""
    heard = Heard()
    with connect(memory.address) as client:
        memory.create_topic("orders", 1)
        send(client, 2)
        client.admin().delete_topic("orders")
        memory.create_topic("orders", 1)  # goes on at the offsets of the one before
        send(client, 1)
        with client.listen("orders", "billing", heard, consume_from=FIRST):
            heard.wait(1)
            memory.reset_offsets("billing", "orders", offset)
            assert memory.committed("billing", "orders") == {0: there}
            wait_until(lambda: "offset set by command" in caplog.text, DEADLINE_S, "the member has the reset")
            send(client, 1)
            offsets = [2, *range(there, 4)]
            assert [message.queue_offset for message in heard.wait(len(offsets))] == offsets
        assert memory.committed("billing", "orders") == {0: 4}


def consume_after_reset(client: Client, reset: Callable[[], object], caplog: pytest.LogCaptureFixture) -> None:
    """Consume one message of a topic that was empty when a member of billing, which knew offset 0, was reset to it."""
    with client.pull_consumer("orders", group="billing") as consumer:
        (queue,) = consumer.partitions()
        consumer.commit({queue: 0})
    heard = Heard()
    with client.listen("orders", "billing", heard) as member:
        wait_until(lambda: queue in member.assignment(), DEADLINE_S, "the member has the queue")
        reset()
        wait_until(lambda: "offset set by command" in caplog.text, DEADLINE_S, "the member has the reset")
        send(client, 1)
        heard.wait(1)
