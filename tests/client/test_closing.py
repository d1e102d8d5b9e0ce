"""What a client that is closed still does, and how those learn of it that use a part of it."""

import asyncio
import threading

import pytest

import metaq.aio
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


def test_a_thread_that_polls_learns_that_its_client_is_closed(client: Client, memory: InMemoryBroker) -> None:
    """SG-120: the call that waits ends, and the next one says why."""
    memory.create_topic("orders", 1)
    consumer, found = client.pull_consumer("orders"), list[list[ReceivedMessage]]()
    consumer.assign(consumer.partitions())
    waiting = threading.Thread(target=lambda: found.append(consumer.poll(DEADLINE_S)))
    waiting.start()
    wait_until(lambda: bool(memory._held), DEADLINE_S, "the broker is asked")
    client.close()
    waiting.join(DEADLINE_S / 2)
    assert found == [[]]
    with pytest.raises(ClientClosed):
        consumer.poll()
    consumer.close()


def test_a_task_that_polls_learns_that_its_client_is_closed(memory: InMemoryBroker) -> None:
    """SG-120: as a thread does."""
    memory.create_topic("orders", 1)

    async def read() -> None:
        client = metaq.aio.connect(memory.address)
        consumer = client.pull_consumer("orders")
        await consumer.assign(await consumer.partitions())
        waiting = asyncio.create_task(consumer.poll(DEADLINE_S))
        async with asyncio.timeout(DEADLINE_S / 2):
            while not memory._held:
                await asyncio.sleep(0)
            await client.close()
            assert await waiting == []
        with pytest.raises(ClientClosed):
            await consumer.poll()

    asyncio.run(read())
