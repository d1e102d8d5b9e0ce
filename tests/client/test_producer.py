"""Sending, with the broker in memory and with a real one."""

import random
import threading

import pytest

from metaq.client import Client, OutgoingMessage, PullConsumer, ReceivedMessage, SendStatus, connect
from metaq.errors import BadRequest, ClientClosed, Refused
from metaq.testing import InMemoryBroker
from tests.support.broker import wait_until

DEADLINE_S = 60.0


def read_all(consumer: PullConsumer, count: int) -> list[ReceivedMessage]:
    """So many messages from the beginning of every partition."""
    consumer.assign(consumer.partitions())
    consumer.seek_to_begin()
    found: list[ReceivedMessage] = []

    def enough() -> bool:
        found.extend(consumer.poll(timeout_s=1.0))
        return len(found) >= count

    wait_until(enough, DEADLINE_S, f"{count} messages")
    return found


def test_a_message_arrives_as_it_was_sent(client: Client) -> None:
    """SG-126, RD-016, RD-022: body, tag, keys, properties; the result says where it is."""
    producer = client.producer("orders-desk")
    sent = producer.send("orders", "grün".encode(), tag="paid", keys=["2003", "eu"], properties={"city": "Zürich"})
    assert sent.status is SendStatus.SEND_OK
    assert (sent.queue.topic, sent.queue_offset) == ("orders", 0)
    with client.pull_consumer("orders") as consumer:
        (message,) = read_all(consumer, 1)
    assert message.body == "grün".encode()
    assert (message.tag, message.keys, message.properties["city"]) == ("paid", ("2003", "eu"), "Zürich")
    assert (message.id, message.offset_id, message.queue, message.queue_offset) == (sent.id, sent.offset_id, sent.queue, 0)
    assert message.topic == "orders"
    assert message.reconsume_times == 0
    assert message.store_ms >= message.born_ms - 60_000


def test_a_send_goes_to_all_partitions_in_turn(client: Client) -> None:
    """SG-117, RD-015, MY-005: round-robin over the queues of the route."""
    producer = client.producer()
    first = producer.send("orders", b"0")
    found = [producer.send("orders", str(number).encode()).queue.partition for number in range(1, 9)]
    assert sorted([first.queue.partition, *found][:4]) == [0, 1, 2, 3]
    assert found[:4] == found[4:]


def test_the_same_ordering_key_has_the_same_partition(client: Client) -> None:
    """SG-124, SG-005: one queue for one key, in the order of sending."""
    producer = client.producer()
    for number in range(20):
        producer.send("orders", str(number).encode(), ordering_key=f"customer-{number % 3}")
    with client.pull_consumer("orders") as consumer:
        messages = read_all(consumer, 20)
    by_key: dict[str, list[ReceivedMessage]] = {}
    for message in messages:
        by_key.setdefault(message.properties["__SHARDINGKEY"], []).append(message)
    assert len(by_key) == 3
    for number, key in enumerate(sorted(by_key)):
        assert len({message.partition for message in by_key[key]}) == 1
        assert [int(message.body) for message in by_key[key]] == list(range(number, 20, 3))


def test_an_asynchronous_send_calls_back(client: Client) -> None:
    """SG-127, RD-022: the future has the result; its callback may send again."""
    producer = client.producer()
    second: list[str] = []
    done = threading.Event()
    future = producer.send_async("orders", b"first")

    def again(finished: object) -> None:
        second.append(producer.send("orders", b"second").id)
        done.set()

    future.add_done_callback(again)
    assert future.result(DEADLINE_S).status is SendStatus.SEND_OK
    assert done.wait(DEADLINE_S)
    with client.pull_consumer("orders") as consumer:
        found = read_all(consumer, 2)
    assert {message.id for message in found} == {future.result().id, second[0]}


def test_many_sends_in_flight(client: Client) -> None:
    """SG-127, SG-097: hundreds at a time on one connection, each with its own result."""
    producer = client.producer()
    producer.send("orders", b"")
    futures = [producer.send_async("orders", str(number).encode()) for number in range(500)]
    results = [future.result(DEADLINE_S) for future in futures]
    assert len({(result.queue, result.queue_offset) for result in results}) == 500
    with client.pull_consumer("orders") as consumer:
        found = {message.id: message.body for message in read_all(consumer, 501)}
    assert all(found[result.id] == str(number).encode() for number, result in enumerate(results))


def test_an_id_is_stored_once(memory: InMemoryBroker) -> None:
    """E-07: in memory as in a topic with a window."""
    with connect(memory.address) as client:
        producer = client.producer()
        results = [producer.send("orders", b"x", dedupe_id="order-1") for _ in range(3)]
        results.append(producer.send_async("orders", b"x", dedupe_id="order-1").result(timeout=10))
        assert len({(result.queue, result.queue_offset, result.offset_id) for result in results}) == 1
        assert producer.send("orders", b"x", dedupe_id="order-2").offset_id != results[0].offset_id


def test_a_one_way_send(client: Client) -> None:
    """SG-128, RD-022: written and not waited for."""
    producer = client.producer()
    producer.send("orders", b"the topic exists")
    producer.send_oneway("orders", b"may be lost", tag="noted")
    with client.pull_consumer("orders") as consumer:
        found = read_all(consumer, 2)
    assert [(message.body, message.tag) for message in found if message.tag] == [(b"may be lost", "noted")]


def test_a_batch_is_stored_together(client: Client) -> None:
    """SG-126: one request, one partition, consecutive offsets, and each message with its own properties."""
    producer = client.producer()
    messages = [OutgoingMessage(str(number).encode(), tag=f"t{number}", keys=f"k{number}") for number in range(10)]
    results = producer.send_batch("orders", [*messages, b"plain"])
    assert len({result.queue for result in results}) == 1
    assert [result.queue_offset for result in results] == list(range(11))
    with client.pull_consumer("orders") as consumer:
        found = read_all(consumer, 11)
    assert [message.id for message in found] == [result.id for result in results]
    assert [message.offset_id for message in found] == [result.offset_id for result in results]
    assert [(message.body, message.tag, message.keys) for message in found[:2]] == [
        (b"0", "t0", ("k0",)),
        (b"1", "t1", ("k1",)),
    ]
    assert producer.send_batch("orders", []) == []


def test_a_long_body_travels_compressed(client: Client) -> None:
    """SG-098: from 4 KiB on, where that makes it shorter; who reads it sees nothing of that."""
    body = b"the same again, " * 4096
    client.producer().send("orders", body)
    with client.pull_consumer("orders") as consumer:
        (message,) = read_all(consumer, 1)
    assert message.body == body


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"topic": ""}, "topic ''"),
        ({"topic": "t" * 128}, "1 to 127"),
        ({"topic": "a b"}, "letters, digits"),
        ({"body": random.Random(1).randbytes(4 * 1024 * 1024 + 1)}, "over the limit of 4194304"),
        ({"properties": {"TAGS": "x"}}, "TAGS is reserved"),
        ({"properties": {"a\x01": "x"}}, "byte 1 or 2"),
        ({"tag": "a\x02b"}, "byte 1 or 2"),
        ({"delay_level": 19}, "delay_level is 19"),
    ],
)
def test_what_cannot_be_sent_is_told_at_once(memory: InMemoryBroker, arguments: dict[str, object], reason: str) -> None:
    """P14: the error names what is wrong and the limit."""
    message: dict[str, object] = {"topic": "orders", "body": b"x", **arguments}
    with connect(memory.address) as client, pytest.raises(BadRequest, match=reason):
        client.producer().send(**message)  # type: ignore[arg-type]


def test_properties_that_no_record_can_keep(client: Client) -> None:
    """SG-131: they are refused with their limit, by the broker for tests as by a real one."""
    with pytest.raises(Refused, match=r"properties of 4\d{4} bytes are longer than 32\d{3}"):
        client.producer().send("orders", b"x", properties={"a": "b" * 40_000})


def test_a_closed_client_says_so(client: Client) -> None:
    producer = client.producer()
    client.close()
    with pytest.raises(ClientClosed):
        producer.send("orders", b"x")
    with pytest.raises(ClientClosed):
        client.producer()
