"""Reads of messages that a new master hides until its replicas have them: nobody is moved back, and nothing is lost."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.role import NoReplicas
from metaq.errors import Overloaded
from metaq.message import TopicPartition
from metaq.protocol.remoting.bulk import BulkFetch
from metaq.protocol.remoting.codes import PULL_HAS_SUBSCRIPTION, PULL_SUSPENDS, Request, Response
from metaq.protocol.remoting.headers import Int32, PullMessage
from metaq.protocol.text.commands import Get, Offset
from metaq.server.remoting.consuming.bulk import BulkHandler
from metaq.server.remoting.consuming.pull import PullHandler
from metaq.server.text.get import GetHandler
from metaq.server.text.put import PutHandler
from metaq.store.copies.applying import hide_from
from metaq.store.files.filecache import read_here
from metaq.store.log.segments import segment_name
from metaq.store.queues.consumequeue import UNIT_SIZE
from tests.server.remoting.test_pops import GROUP, INVISIBLE_MS, TOPIC, Consumer, dead_letters, ordered_by_key
from tests.support.inprocess import Text

MESSAGES: Final = 3
HOLD_MS: Final = 5000


@pytest.fixture
def consumer(tmp_path: Path) -> Iterator[Consumer]:
    """A broker with some messages in one partition."""
    consumer = Consumer(tmp_path / "data")
    parts = consumer.parts
    gets = GetHandler(parts.context, parts.holds, parts.reads, parts.loop)
    puts = PutHandler(parts.context, parts.turns).puts
    parts.endpoint.answer_text({Get: gets.get, Offset: gets.offset}, puts, puts)
    parts.endpoint.answer(PullHandler(parts.context, parts.holds, parts.reads, parts.loop).requests())
    parts.endpoint.answer(BulkHandler(parts.context, parts.reads).requests())
    consumer.put(*[str(number) for number in range(MESSAGES)])
    yield consumer
    parts.close()


def hide(consumer: Consumer, readable: int) -> None:
    """Hide the messages from an ordinal on."""
    store = consumer.parts.store
    queue = store.queues[TopicPartition(TOPIC, 0)]
    hide_from(store, queue.unit(readable, read_here)[0])
    assert queue.readable == readable


def publish(consumer: Consumer) -> None:
    parts = consumer.parts
    seen = parts.store.publish(parts.store.log.end)
    parts.holds.wake(seen)
    consumer.leasing.lines.wake(seen)
    parts.end_turn()


def pull(offset: int, hold_ms: int = 0) -> PullMessage:
    flags = PULL_HAS_SUBSCRIPTION | (PULL_SUSPENDS if hold_ms else 0)
    return PullMessage(GROUP, TOPIC, Int32(0), offset, Int32(32), Int32(flags), 0, hold_ms, 0, "*")


@pytest.mark.parametrize("readable", [0, 1])
def test_a_pull_of_what_is_hidden_is_not_moved_back(consumer: Consumer, readable: int) -> None:
    """ES-009: its group has read that from the master before; it waits until the messages are shown."""
    hide(consumer, readable)
    for offset in (MESSAGES - 1, MESSAGES):
        answer = consumer.ask(Request.PULL_MESSAGE, pull(offset))
        assert answer is not None and answer.code == Response.PULL_NOT_FOUND
        assert answer.fields["nextBeginOffset"] == str(offset)
    beyond = consumer.ask(Request.PULL_MESSAGE, pull(MESSAGES + 1))
    assert beyond is not None and beyond.code == Response.PULL_OFFSET_MOVED
    assert consumer.ask(Request.PULL_MESSAGE, pull(MESSAGES - 1, HOLD_MS)) is None
    publish(consumer)
    (answer,) = consumer.client.answers()
    assert (answer.code, answer.fields["nextBeginOffset"]) == (Response.SUCCESS, str(MESSAGES))


class Asked(NoReplicas):
    """Replicas that keep what they are asked."""

    behind_bytes = -1

    def reader_goes_to(self, standby: int, preferred: int, behind_bytes: int) -> int:
        self.behind_bytes = behind_bytes
        return super().reader_goes_to(standby, preferred, behind_bytes)


def test_a_pull_of_a_message_whose_unit_cannot_be_read(consumer: Consumer) -> None:
    """ES-009, SG-018: nobody knows how far its reader is from the end, so it is not sent to a slave."""
    parts, asked = consumer.parts, Asked()
    parts.context.replicas = asked
    queue = parts.store.queues[TopicPartition(TOPIC, 0)]
    queue.write()
    with (queue.directory / segment_name(0)).open("r+b") as file:
        file.seek(UNIT_SIZE)
        file.write(bytes(UNIT_SIZE))
    for offset, behind in ((0, parts.store.log.end), (1, 0)):
        assert consumer.ask(Request.PULL_MESSAGE, pull(offset)) is not None
        assert asked.behind_bytes == behind


@pytest.mark.parametrize("readable", [0, 1])
def test_a_bulk_fetch_of_what_is_hidden_is_not_moved_back(consumer: Consumer, readable: int) -> None:
    hide(consumer, readable)
    for offset, code in ((MESSAGES, Response.PULL_NOT_FOUND), (MESSAGES + 1, Response.PULL_OFFSET_MOVED)):
        answer = consumer.ask(Request.BULK_FETCH, BulkFetch(TOPIC, Int32(0), offset, Int32(32), Int32(1000)))
        assert answer is not None and answer.code == code


def test_a_get_of_what_is_hidden_finds_no_message(consumer: Consumer) -> None:
    """ES-009: the topic exists, and the reader stays where it is."""
    end = consumer.parts.store.queues[TopicPartition(TOPIC, 0)].text_end
    hide(consumer, 0)
    answer = Text(consumer.parts).send(b"get %b %b 0 %d 1000 7\r\n" % (TOPIC.encode(), GROUP.encode(), end))
    assert answer.startswith(b"result 404 ") and b"Could not find message at position %d" % end in answer


def test_leased_messages_that_are_hidden_are_given_again_later(consumer: Consumer) -> None:
    """ES-009, E-08: a lease that ends meanwhile does not lose its message."""
    assert len(consumer.popped(queue=0)) == MESSAGES
    hide(consumer, 1)
    consumer.parts.advance(INVISIBLE_MS / 1000 + 1)
    assert [body for body, _ in consumer.popped(queue=0)] == ["0"]
    publish(consumer)
    assert [body for body, _ in consumer.popped(queue=0)] == ["1", "2"]


def test_leased_messages_that_are_hidden_are_not_given_up(consumer: Consumer) -> None:
    """ES-009, E-08: a rejection is refused until the message can be read, and retention keeps its segment."""
    receipts = [receipt for _, receipt in consumer.popped(queue=0)]
    for receipt in receipts[:-1]:
        assert consumer.ack(receipt) == Response.SUCCESS
    consumer.parts.advance(0)
    before = consumer.keeper.oldest
    hide(consumer, 1)
    assert consumer.keeper.oldest == before is not None
    refused = consumer.change(receipts[-1], -1)
    assert refused.code == Overloaded.code and "not known to be on enough replicas" in (refused.remark or "")
    assert dead_letters(consumer) == []
    publish(consumer)
    assert consumer.change(receipts[-1], -1).code == Response.SUCCESS
    assert dead_letters(consumer) == [(str(MESSAGES - 1), "rejected", 1)]


def test_order_by_key_is_kept_over_messages_that_are_hidden(consumer: Consumer) -> None:
    """ES-009, E-22: their keys cannot be read yet, so nothing is given meanwhile."""
    ordered_by_key(consumer)
    for _, receipt in consumer.popped(queue=0):
        assert consumer.ack(receipt) == Response.SUCCESS
    consumer.put_keyed("a1", "a2", "a3")
    ((_, receipt),) = consumer.popped(queue=0)
    other = consumer.reopened()
    consumer.parts = other.parts
    ordered_by_key(other)
    hide(other, MESSAGES + 1)
    assert other.popped(queue=0) == []
    publish(other)
    assert other.ack(receipt) == Response.SUCCESS
    assert [body for body, _ in other.popped(queue=0)] == ["a2"]
