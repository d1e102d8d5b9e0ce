"""Ids of messages that are stored once, with the broker in memory and with a real one."""

from datetime import timedelta

from metaq.client import Client, SendResult
from metaq.protocol.remoting.recall import decode_recall
from tests.client.test_consumers import FIRST, take

HOUR = timedelta(hours=1)


def make(client: Client) -> None:
    client.admin().create_topic("orders", 1, dedupe_window_ms=3_600_000)


def timer_of(result: SendResult) -> str:
    """The delayed message that a send says it has made: the handle also names the id of what was sent."""
    assert result.handle is not None
    return decode_recall(result.handle).handle


def bodies(client: Client, count: int) -> list[bytes]:
    with client.consumer("orders", "billing", consume_from=FIRST) as consumer:
        return [message.body for message in take(consumer, count)]


def test_the_id_of_a_cancelled_message_is_free(client: Client) -> None:
    """A cancel and a new send move a message to another time."""
    make(client)
    producer = client.producer()
    first = producer.send("orders", b"1", delay=HOUR, dedupe_id="r1")
    assert timer_of(producer.send("orders", b"1", delay=HOUR, dedupe_id="r1")) == timer_of(first)
    client.cancel(str(first.handle))
    second = producer.send("orders", b"2", delay=2 * HOUR, dedupe_id="r1")
    assert timer_of(second) != timer_of(first)
    client.cancel(str(first.handle))  # does nothing any more, and frees no id
    assert timer_of(producer.send("orders", b"2", delay=2 * HOUR, dedupe_id="r1")) == timer_of(second)
    client.cancel(str(second.handle))
    producer.send("orders", b"3", dedupe_id="r1")
    assert bodies(client, 1) == [b"3"]


def test_a_topic_that_is_made_again_knows_the_ids_of_what_waited(client: Client) -> None:
    """A message that was delayed comes to the new topic; those that were stored in the old one are gone."""
    client.admin().create_topic("others", 1, dedupe_window_ms=3_600_000)  # without any window, all ids are forgotten
    make(client)
    producer = client.producer()
    producer.send("orders", b"1", dedupe_id="stored")
    delayed = producer.send("orders", b"2", delay=HOUR, dedupe_id="delayed")
    client.admin().delete_topic("orders")
    make(client)
    producer.send("orders", b"3", dedupe_id="stored")
    assert timer_of(producer.send("orders", b"4", delay=HOUR, dedupe_id="delayed")) == timer_of(delayed)
    assert bodies(client, 1) == [b"3"]
