"""What a client that is closed still does, and how those learn of it that use a part of it."""

import asyncio
import threading
from collections.abc import Callable

import pytest

import metaq.aio
from metaq.client import Client, LeasedMessage, PushConsumer, ReceivedMessage, connect
from metaq.client.leasing.holder import LeaseHolder
from metaq.errors import ClientClosed
from metaq.testing import InMemoryBroker
from tests.client.test_consumers import DEADLINE_S, FIRST, Heard, send
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


class Closing:
    """A consumer whose listener or handler runs ``handle`` while another thread closes the consumer, and waits for that."""

    def __init__(self, client: Client, handle: Callable[["Closing"], None], kind: str) -> None:
        self._began, self.ended = threading.Event(), threading.Event()
        self._handle = handle
        if kind == "listen":
            listening = client.listen("orders", "billing", self._call, consume_from=FIRST)
            self.close, self.is_closed = listening.close, lambda: listening._closed
        else:
            leasing = client.lease_consumer("orders", "billing", from_first=True)
            self.close, self.is_closed = leasing.close, lambda: leasing.closed
            threading.Thread(target=leasing.run, args=(self._call,), daemon=True).start()
        send(client, 1)
        assert self._began.wait(DEADLINE_S)
        self.thread = threading.Thread(target=self._close, daemon=True)
        self.thread.start()
        wait_until(self.is_closed, DEADLINE_S, "the consumer is being closed")

    def _close(self) -> None:
        self.close()
        self.ended.set()

    def _call(self, message: ReceivedMessage | LeasedMessage) -> None:
        self._began.set()
        wait_until(self.is_closed, DEADLINE_S, "the consumer is being closed")
        self._handle(self)


KINDS = pytest.mark.parametrize("kind", ["listen", "lease"])


@KINDS
def test_a_client_waits_for_a_consumer_that_is_being_closed(memory: InMemoryBroker, client: Client, kind: str) -> None:
    """What its listener still sends is sent."""
    memory.create_topic("orders", 1)
    producer, closed = client.producer(), threading.Event()

    def handle(closing: Closing) -> None:
        wait_until(lambda: client._core.is_closing, DEADLINE_S, "the client is being closed, too")
        closed.wait(0.2)  # it comes only when the client does not wait for this
        producer.send("invoices", b"0")

    closing = Closing(client, handle, kind)
    client.close()
    closed.set()
    assert closing.ended.wait(DEADLINE_S)
    assert [message.body for message in memory.messages("invoices")] == [b"0"]


@KINDS
def test_a_listener_does_not_wait_for_the_close_that_waits_for_it(memory: InMemoryBroker, client: Client, kind: str) -> None:
    memory.create_topic("orders", 1)
    waited: list[bool] = []

    def handle(closing: Closing) -> None:
        closing.close()
        waited.append(closing.ended.is_set())

    closing = Closing(client, handle, kind)
    assert closing.ended.wait(DEADLINE_S)
    assert waited == [False]
    client.close()


def test_a_close_that_is_interrupted_closes_the_rest(
    memory: InMemoryBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by Ctrl-C while it waits for a listener: nobody could close the client later."""
    memory.create_topic("orders", 1)
    heard, usual, interrupts = Heard(), PushConsumer._stop, [KeyboardInterrupt()]
    members = [client.listen("orders", group, heard, consume_from=FIRST) for group in ("billing", "shipping")]
    producer = client.producer()
    send(client, 1)
    heard.wait(2)

    def stop(consumer: PushConsumer) -> None:
        usual(consumer)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(PushConsumer, "_stop", stop)
    with pytest.raises(KeyboardInterrupt):
        client.close()
    assert [memory.committed(member.group, "orders") for member in members] == [{0: 1}, {0: 1}]
    assert client._core._consumers == {}
    with pytest.raises(ClientClosed):
        producer.send("orders", b"late")
    client.close()


def test_a_lease_consumer_whose_close_is_interrupted_ends_its_acks(
    memory: InMemoryBroker, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.create_topic("orders", 1)
    consumer = client.lease_consumer("orders", "billing", from_first=True)
    send(client, 1)
    message = consumer.receive(DEADLINE_S)
    assert message is not None

    def interrupted(holder: LeaseHolder, inside: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LeaseHolder, "_drain", interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.close()
    with pytest.raises(ClientClosed):
        message.ack()
