"""Values instead of bodies: what a serializer makes of them, and what becomes of a body that it does not take."""

import asyncio
import dataclasses
import threading
from typing import Any, Final

import pytest

import metaq
import metaq.aio
from metaq.testing import InMemoryBroker
from tests.client.conftest import TIMEOUT_S
from tests.support.broker import wait_until

FIRST: Final = metaq.ConsumeFrom.FIRST
BAD: Final = b"{"
"""No JSON."""


@dataclasses.dataclass
class Order:
    number: int


class Orders:
    """A serializer of a program's own."""

    content_type = "application/x-order"

    def dumps(self, value: Order, /) -> bytes:
        return b"order %d" % value.number

    def loads(self, body: bytes, /) -> Order:
        return Order(int(body.removeprefix(b"order ")))


def send(client: metaq.Client, *bodies: bytes) -> None:
    client.admin().create_topic("orders", 1)
    client.producer().send_batch("orders", bodies)


def dead(client: metaq.Client, group: str) -> list[bytes]:
    return [letter.body for letter in client.admin().dead_letters(group)]


def test_values_are_sent_and_received(client: metaq.Client) -> None:
    """By each way of sending; the message says what its body is."""
    client.admin().create_topic("orders", 1)
    with client.producer(serializer=metaq.JSON, linger_ms=5) as producer:
        producer.send("orders", {"number": 1})
        producer.send_async("orders", [2], tag="paid").result(TIMEOUT_S)
        producer.send_batch("orders", ["3", metaq.OutgoingMessage(4.5, tag="paid", properties={"city": "Kiel"})])
        producer.send_oneway("orders", None, properties={"content-type": "application/json; charset=utf-8"})
    with client.consumer("orders", "billing", consume_from=FIRST, deserializer=metaq.JSON) as consumer:
        found = [consumer.receive(TIMEOUT_S) for _ in range(5)]
    assert [message and message.value for message in found] == [{"number": 1}, [2], "3", 4.5, None]
    assert [message and message.tag for message in found] == [None, "paid", None, "paid", None]
    types = [message and message.properties["content-type"] for message in found]
    assert types == ["application/json"] * 4 + ["application/json; charset=utf-8"]
    assert found[3] is not None
    assert found[3].properties["city"] == "Kiel"


def test_a_serializer_of_a_program(client: metaq.Client) -> None:
    """Any object with the three parts; also of requests and their replies."""
    client.admin().create_topic("orders", 1)
    desk = client.producer(serializer=Orders())

    def answer(message: metaq.ReceivedMessage) -> None:
        desk.reply(message, Order(message.value.number + 1))

    with client.listen("orders", "desk", answer, consume_from=FIRST, deserializer=Orders()):
        reply = client.producer(serializer=Orders()).request("orders", Order(4))
    assert reply.value == Order(5)
    assert reply.body == b"order 5"


def test_without_one_nothing_changes(client: metaq.Client) -> None:
    """No property is added, and a message has no value, which is told."""
    client.producer().send("orders", b"1")
    with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
        message = consumer.receive(TIMEOUT_S)
    assert message is not None
    assert "content-type" not in message.properties
    with pytest.raises(metaq.BadRequest, match="its consumer has no deserializer, such as"):
        _ = message.value


def test_a_value_without_a_body_is_refused(client: metaq.Client) -> None:
    """Before anything is sent."""
    producer = client.producer(serializer=metaq.JSON)
    with pytest.raises(metaq.BadRequest, match="body of type object has no form in application/json: Type is not JSON ser"):
        producer.send("orders", object())
    with pytest.raises(metaq.BadRequest, match="body of type set has no form"):
        producer.send_batch("orders", [1, {2}])
    for single in ({"number": 1}, "text", b"bytes", metaq.OutgoingMessage(1), 7):
        with pytest.raises(metaq.BadRequest, match=r"messages is .*; it takes several messages"):
            producer.send_batch("orders", single)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["json", len, object()])
def test_what_is_no_serializer_is_refused(client: metaq.Client, wrong: Any) -> None:
    """At the call, with the parameter's name."""
    takes = r".*; it takes an object with dumps, loads and a content_type, such as metaq.JSON"
    with pytest.raises(metaq.BadRequest, match=f"serializer is {takes}"):
        client.producer(serializer=wrong)
    for make in (client.consumer, client.lease_consumer, client.pull_consumer):
        with pytest.raises(metaq.BadRequest, match=f"deserializer is {takes}"):
            make("orders", "g", deserializer=wrong)
    with pytest.raises(metaq.BadRequest, match=f"deserializer is {takes}"):
        client.listen("orders", "g", print, deserializer=wrong)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_listener_does_not_get_what_cannot_be_decoded(client: metaq.Client, ordered: bool) -> None:
    """It fails like any other message, and those around it are consumed."""
    send(client, b"1", BAD, b"3")
    values: list[int] = []
    both = threading.Event()

    def listen(message: metaq.ReceivedMessage) -> None:
        values.append(message.value)
        if len(values) == 2:
            both.set()

    with client.listen(
        "orders", "g", listen, consume_from=FIRST, deserializer=metaq.JSON, max_reconsume_times=0, ordered=ordered
    ):
        assert both.wait(TIMEOUT_S)
        wait_until(lambda: dead(client, "g") == [BAD], TIMEOUT_S, "a dead letter")
    assert sorted(values) == [1, 3]


@pytest.mark.parametrize("iterated", [False, True])
def test_a_loop_does_not_end_at_what_cannot_be_decoded(client: metaq.Client, iterated: bool) -> None:
    """The consumer sends it back, and the loop sees the next message."""
    send(client, b"1", BAD, b"3")
    with client.consumer("orders", "g", consume_from=FIRST, deserializer=metaq.JSON, max_reconsume_times=0) as consumer:
        messages = iter(consumer) if iterated else iter(lambda: consumer.receive(TIMEOUT_S), None)
        assert [next(messages).value, next(messages).value] == [1, 3]
        consumer.commit()
    wait_until(lambda: dead(client, "g") == [BAD], TIMEOUT_S, "a dead letter")


def test_what_no_broker_takes_back_is_given_to_the_program(client: metaq.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that would be lost otherwise; its error says what is wrong with it."""
    send(client, BAD)
    with client.consumer("orders", "g", consume_from=FIRST, deserializer=metaq.JSON) as consumer:

        def refuse(message: metaq.ReceivedMessage, *, delay_level: int = 0) -> None:
            raise metaq.ConnectionFailed("gone")

        monkeypatch.setattr(consumer, "retry_later", refuse)
        message = consumer.receive(TIMEOUT_S)
        assert message is not None
        assert message.body == BAD
        with pytest.raises(metaq.DecodeError, match="the deserializer raised JSONDecodeError: "):
            _ = message.value


def test_a_reader_gets_what_cannot_be_decoded_with_its_error(client: metaq.Client) -> None:
    """It is in no group that could get it again."""
    send(client, b"1", BAD)
    with client.pull_consumer("orders", deserializer=metaq.JSON) as reader:
        reader.assign(reader.partitions())
        found: list[metaq.ReceivedMessage] = []
        while len(found) < 2:
            found += reader.poll(TIMEOUT_S)
    assert found[0].value == 1
    assert found[1].body == BAD
    assert isinstance(found[1].error, metaq.DecodeError)


@pytest.mark.parametrize("handled", [False, True])
def test_a_lease_of_what_cannot_be_decoded_is_given_back(memory: InMemoryBroker, handled: bool) -> None:
    """It comes again, to a member that takes it perhaps."""
    with metaq.connect(memory.address, timeout_s=TIMEOUT_S) as client:
        send(client, b"1", BAD, b"3")
        values: list[int] = []
        with client.lease_consumer("orders", "g", from_first=True, deserializer=metaq.JSON) as consumer:

            def handle(message: metaq.LeasedMessage) -> None:
                values.append(message.value)
                message.ack()
                if len(values) == 2:
                    consumer.close()

            if handled:
                consumer.run(handle, concurrency=1)
            else:
                for message in consumer:
                    handle(message)
        memory.advance(60.0)
        with client.lease_consumer("orders", "g", from_first=True) as consumer:
            left = consumer.receive(TIMEOUT_S)
            assert left is not None
            assert (left.body, left.attempt) == (BAD, 2)
    assert sorted(values) == [1, 3]


def test_asyncio_has_the_same(client: metaq.Client) -> None:
    """Iterating, listening and leasing."""
    send(client, b"1", BAD, b"3")

    async def consume() -> None:
        aio = metaq.aio.Client(client)
        await aio.producer(serializer=Orders()).send("mine", Order(7))
        async with await aio.consumer("mine", "g", consume_from=FIRST, deserializer=Orders()) as mine:
            own = await mine.receive(TIMEOUT_S)
            assert own is not None
            assert own.value == Order(7)
        async with await aio.consumer(
            "orders", "iterating", consume_from=FIRST, deserializer=metaq.JSON, max_reconsume_times=0
        ) as consumer:
            iterated = [await consumer.receive(TIMEOUT_S) for _ in range(2)]
            assert [message and message.value for message in iterated] == [1, 3]
        async with await aio.lease_consumer("orders", "leasing", from_first=True, deserializer=metaq.JSON) as leasing:
            leased = [await leasing.receive(TIMEOUT_S) for _ in range(2)]
            assert [message and message.value for message in leased] == [1, 3]
        values: asyncio.Queue[int] = asyncio.Queue()

        async def listen(message: metaq.ReceivedMessage) -> None:
            await values.put(message.value)

        async with await aio.listen("orders", "listening", listen, consume_from=FIRST, deserializer=metaq.JSON):
            assert {await values.get(), await values.get()} == {1, 3}

    asyncio.run(asyncio.wait_for(consume(), TIMEOUT_S))
    wait_until(lambda: dead(client, "iterating") == [BAD], TIMEOUT_S, "a dead letter")


def test_asyncio_gives_what_no_broker_takes_back_when_receive_has_timed_out(
    memory: InMemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it goes back is known later; until then no commit counts it, and it is not tried twice."""
    begun, go = threading.Event(), threading.Event()
    tries: list[bytes] = []

    def refuse(message: metaq.ReceivedMessage, *, delay_level: int = 0) -> None:
        tries.append(message.body)
        begun.set()
        assert go.wait(TIMEOUT_S)
        raise metaq.ConnectionFailed("gone")

    async def consume() -> None:
        async with (
            metaq.aio.connect(memory.address, timeout_s=TIMEOUT_S) as aio,
            await aio.consumer("orders", "g", consume_from=FIRST, deserializer=metaq.JSON) as consumer,
        ):
            monkeypatch.setattr(consumer._blocking, "retry_later", refuse)
            first = await consumer.receive(TIMEOUT_S)
            assert first is not None
            while not begun.is_set():
                assert await consumer.receive(0.05) is None
            go.set()
            await consumer.commit()
            assert memory.committed("g", "orders")[first.partition] == 1
            bad, last = [await consumer.receive(TIMEOUT_S) for _ in range(2)]
            assert bad is not None
            assert last is not None
            assert (bad.body, last.value, tries) == (BAD, 3, [BAD])
            assert isinstance(bad.error, metaq.DecodeError)
            await consumer.commit()
            assert memory.committed("g", "orders")[first.partition] == 3

    with metaq.connect(memory.address, timeout_s=TIMEOUT_S) as client:
        send(client, b"1", BAD, b"3")
    asyncio.run(asyncio.wait_for(consume(), TIMEOUT_S))
