"""What pops, peeks and pulls read in one go, and what wakes who waits: the handlers alone, in the process of the test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from metaq.engine.leases.leases import KEPT_S
from metaq.engine.reading.collecting import MOST_BYTES, MOST_SCANNED, collect_messages
from metaq.engine.reading.filters import EVERY_MESSAGE
from metaq.message import GroupPartition, TopicPartition
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.headers import Int32, decode_header
from metaq.protocol.remoting.leases.pop import ALL_QUEUES, PeekMessage, PopAnswer
from metaq.store.files.filecache import read_here
from tests.server.remoting.test_pops import GROUP, INVISIBLE_MS, TOPIC, Consumer, split


@pytest.fixture
def consumer(tmp_path: Path) -> Iterator[Consumer]:
    consumer = Consumer(tmp_path / "data")
    yield consumer
    consumer.parts.close()


def test_one_read_passes_over_some_lost_messages_only(consumer: Consumer) -> None:
    """SG-018: a long stretch of them would stop the loop; the next read goes on where this one ended."""
    lost = 3 * MOST_SCANNED
    consumer.parts.store.queue(TOPIC, 0).fill(lost)
    consumer.put("b")
    after = consumer.reopened()
    queue = after.parts.store.queues[TopicPartition(TOPIC, 0)]
    at, found, reads = 0, list[int](), 0
    while not found:
        collected = collect_messages(after.parts.store, queue, at, 32, EVERY_MESSAGE, read_here)
        assert at < collected.following <= at + MOST_SCANNED + 1
        at, found, reads = collected.following, list(collected.ordinals), reads + 1
    assert (found, reads) == ([lost], 4)
    assert [body for body, _ in after.popped(1)] == ["b"]
    after.parts.close()


def test_a_peek_of_all_partitions_has_the_bytes_of_one_answer(consumer: Consumer) -> None:
    """MY-031: as a pop; a client closes the connection at a larger frame."""
    for partition in range(2):
        consumer.put("x" * MOST_BYTES, partition=partition)
    answer = consumer.ask(Request.PEEK_MESSAGE, PeekMessage(TOPIC, Int32(ALL_QUEUES), Int32(32), GROUP))
    assert answer is not None and len(split(answer.body)) == 1
    assert decode_header(PopAnswer, answer.fields).rest_num == 1


def test_a_reset_without_leases_wakes_who_waits(consumer: Consumer) -> None:
    """MY-013: the group's state was left when nothing was open for a while; its messages come again nevertheless."""
    consumer.put("a")
    ((_, receipt),) = consumer.popped(1)
    assert consumer.ack(receipt) == Response.SUCCESS
    leases = consumer.leasing.leases
    consumer.parts.advance(2 * KEPT_S)
    leases.leave_unused()
    consumer.parts.end_turn()
    place = GroupPartition(GROUP, TOPIC, 0)
    assert leases.get(place) is None
    assert consumer.pop(1, poll_ms=INVISIBLE_MS) is None
    consumer.parts.context.offsets.reset(*place, 0)
    consumer.parts.end_turn()
    (answer,) = consumer.client.answers()
    assert [body for body, _ in consumer.messages(answer)] == ["a"]
