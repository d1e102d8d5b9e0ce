"""Topics that are deleted and made again, with the broker in memory and with a real one."""

from collections.abc import Callable
from datetime import timedelta

import pytest

from metaq.client import Client, Outcome, connect
from metaq.errors import LeaseLost, RouteNotFound
from metaq.testing import InMemoryBroker
from tests.client.conftest import Connect
from tests.client.test_consumers import DEADLINE_S, FIRST, send, take
from tests.support.broker import wait_until

SOON_S = 0.3
"""How long a test waits for what must not come."""


@pytest.fixture
def pass_by(request: pytest.FixtureRequest, address: str) -> Callable[[float], None]:
    """Lets seconds pass, where they do not pass by themselves."""
    memory: InMemoryBroker | None = request.getfixturevalue("memory") if address.startswith("memory") else None
    return memory.advance if memory is not None else lambda seconds: None


def make_again(client: Client) -> None:
    client.admin().delete_topic("orders")
    client.admin().create_topic("orders", 1)


def test_a_group_gets_the_messages_of_the_new_topic(new_client: Connect) -> None:
    """Its offset is forgotten with the topic, and the new messages continue the offsets of the deleted ones."""
    client = new_client()
    client.admin().create_topic("orders", 1)
    send(client, 3)
    with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
        take(consumer, 3)
        consumer.commit()
    make_again(client)
    with client.pull_consumer("orders") as pull:
        (queue,) = pull.partitions()
        assert (pull.begin_offset(queue), pull.end_offset(queue)) == (3, 3)
    ids = send(client, 3)
    with new_client().consumer("orders", "billing", consume_from=FIRST) as consumer:
        found = take(consumer, 3)
        assert consumer.receive(timeout_s=SOON_S) is None
    assert [(message.id, message.queue_offset) for message in found] == list(zip(ids, [3, 4, 5], strict=True))


def test_leases_are_forgotten_with_the_topic(client: Client, pass_by: Callable[[float], None]) -> None:
    """What was leased does not come again, and its receipt means nothing; leases of the new topic go on."""
    client.admin().create_topic("orders", 1)
    send(client, 2)
    with client.lease_consumer("orders", "billing", invisible=1, batch=1, from_first=True) as consumer:
        held = consumer.receive(timeout_s=DEADLINE_S)
        assert held is not None
        make_again(client)
        with pytest.raises(LeaseLost):
            held.nack()
        assert consumer.receive(timeout_s=SOON_S) is None
        pass_by(60)
        (sent,) = send(client, 1)
        message = consumer.receive(timeout_s=DEADLINE_S)
        assert message is not None
        assert (message.id, message.attempt, message.queue_offset) == (sent, 1, 2)
        message.ack()


def test_delayed_messages_of_a_deleted_topic_are_dropped(client: Client, pass_by: Callable[[float], None]) -> None:
    producer = client.producer()
    for topic in ("invoices", "orders"):
        producer.send(topic, b"x", delay=timedelta(seconds=1))
    client.admin().delete_topic("invoices")
    pass_by(1)
    with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
        take(consumer, 1)  # which was sent after the other one
    with pytest.raises(RouteNotFound):
        client.admin().route("invoices")


def test_delayed_messages_go_to_a_topic_that_was_made_again(memory: InMemoryBroker) -> None:
    """They go to the partitions that it has then."""
    with connect(memory.address) as client:
        memory.create_topic("orders", 4)
        bodies = [b"%d" % number for number in range(4)]
        for body in bodies:
            client.producer().send("orders", body, delay=timedelta(hours=1))
        make_again(client)
        memory.advance(3600)
        assert [(message.body, message.partition) for message in memory.messages("orders")] == [(body, 0) for body in bodies]


def test_a_transaction_of_a_deleted_topic_is_not_committed(memory: InMemoryBroker) -> None:
    """It stays undecided until the topic is made again."""
    with connect(memory.address, timeout_s=DEADLINE_S) as client:
        client.admin().create_topic("orders", 1)

        def delete(*given: object) -> Outcome:
            client.admin().delete_topic("orders")
            return Outcome.COMMIT

        producer = client.transaction_producer("desk", delete, check=lambda half: Outcome.COMMIT)
        producer.send("orders", b"x")
        for _ in range(2):
            assert (len(memory.undecided), memory.messages("orders")) == (1, [])
            assert "orders" not in client.admin().topics()
        client.admin().create_topic("orders", 1)
        memory.check_transactions()
        wait_until(lambda: not memory.undecided, DEADLINE_S, "it is decided")
        assert [message.body for message in memory.messages("orders")] == [b"x"]
