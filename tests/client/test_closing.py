"""What a client that is closed still does, and how those learn of it that use a part of it."""

import threading

import pytest

from metaq.client import Client, PushConsumer, ReceivedMessage, connect
from metaq.errors import ClientClosed
from metaq.testing import InMemoryBroker
from tests.client.test_consumers import DEADLINE_S, FIRST, send
from tests.support.broker import wait_until


@pytest.fixture
def client(memory: InMemoryBroker) -> Client:
    return connect(memory.address)


def test_a_listener_that_runs_when_its_client_is_closed_can_finish(memory: InMemoryBroker, client: Client) -> None:
    """P43: it may send, and a message that fails goes back to the broker; nothing new is begun."""
    memory.create_topic("orders", 1)
    producer, consumers, began = client.producer(), list[PushConsumer](), threading.Event()
    refused: list[ClientClosed] = []

    def listener(message: ReceivedMessage) -> None:
        began.set()
        wait_until(lambda: consumers[0]._closed, DEADLINE_S, "the client is being closed")
        producer.send("invoices", message.body)
        try:
            client.consumer("orders", "shipping")
        except ClientClosed as error:
            refused.append(error)
        raise ValueError("as planned")

    consumers.append(client.listen("orders", "billing", listener, consume_from=FIRST))
    send(client, 1)
    assert began.wait(DEADLINE_S)
    client.close()
    assert [message.body for message in memory.messages("invoices")] == [b"0"]
    assert memory.delayed == 1, "it will be delivered again"
    assert memory.committed("billing", "orders") == {0: 1}
    assert len(refused) == 1
    with pytest.raises(ClientClosed):
        producer.send("invoices", b"late")
