"""Ordered pops that are made once more under the same name, because their answer was lost: the handlers alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, decode_header
from metaq.protocol.remoting.leases.pop import (
    ALL_QUEUES,
    AckMessage,
    Notification,
    NotificationAnswer,
    PopAnswer,
    PopMessage,
)
from metaq.protocol.remoting.leases.receipts import Receipt
from tests.server.remoting.test_pops import GROUP, INVISIBLE_MS, TOPIC, Consumer, bodies, split

LEASE_S: Final = INVISIBLE_MS / 1000
MOST_NAME_CHARS: Final = 255


class Attempting(Consumer):
    """A broker, and a client that names its pops."""

    def answer(self, name: str | None, most: int = 32, queue: int = ALL_QUEUES, *, order: bool = True) -> RemotingCommand:
        """Pop without waiting."""
        wishes = Int32(queue), Int32(most), INVISIBLE_MS, 0, Int32(0)
        answer = self.ask(Request.POP_MESSAGE, PopMessage(GROUP, TOPIC, *wishes, order=order, attempt_id=name))
        assert answer is not None
        return answer

    def attempt(self, name: str | None, most: int = 32, queue: int = ALL_QUEUES) -> list[tuple[str, Receipt]]:
        """Pop in order; return bodies and receipts."""
        return self.messages(self.answer(name, most, queue))


@pytest.fixture
def consumer(tmp_path: Path) -> Iterator[Attempting]:
    consumer = Attempting(tmp_path / "data")
    yield consumer
    consumer.parts.close()


def test_the_same_attempt_gets_the_same_messages(consumer: Attempting) -> None:
    """A-07: with new receipts, while others get nothing."""
    consumer.put("a", "b", "c")
    lost = consumer.attempt("one", 2)
    for other in ("two", None):
        assert consumer.attempt(other, 2) == []
    again = consumer.attempt("one", 2)
    assert bodies(again) == bodies(lost) == ["a", "b"]
    assert again[0][1].pop_ms > lost[0][1].pop_ms
    assert consumer.ack(lost[0][1]) == Response.NO_MESSAGE
    assert bodies(consumer.attempt("one", 2)) == ["a", "b"]
    assert consumer.attempt("one", 1) == []
    assert consumer.attempt("two") == []


def test_a_notice_knows_what_an_attempt_would_get(consumer: Attempting) -> None:
    """E-21: of a partition that is given in order, its holder's attempt gets the messages once more, others nothing."""
    consumer.put("a", "b")

    def has_message(name: str | None, queue: int = ALL_QUEUES, *, order: bool = True) -> bool:
        notice = Notification(GROUP, TOPIC, Int32(queue), 0, 0, order=order, attempt_id=name)
        answer = consumer.ask(Request.NOTIFICATION, notice)
        assert answer is not None
        return decode_header(NotificationAnswer, answer.fields).has_msg

    assert has_message("one") and has_message(None)
    ((_, receipt),) = consumer.attempt("one", 1)
    assert has_message("one") and not has_message("two") and not has_message(None)
    assert not has_message("one", 1)
    assert has_message("two", order=False)
    assert consumer.change(receipt, 5000).code == Response.SUCCESS
    assert not has_message("one")  # given back: it is delayed
    consumer.parts.advance(5)
    assert has_message("one") and has_message("two")
    ((_, receipt),) = consumer.attempt("two", 1)
    assert consumer.ack(receipt) == Response.SUCCESS
    assert has_message("one")
    consumer.attempt("one")
    assert has_message("one") and not has_message("two")


def test_a_notice_that_waits_wakes_when_the_partition_is_free(consumer: Attempting) -> None:
    consumer.put("a", "b")
    ((_, receipt),) = consumer.attempt("one", 1)
    waiting = Notification(GROUP, TOPIC, Int32(0), 60_000, 0, order=True, attempt_id="two")
    assert consumer.ask(Request.NOTIFICATION, waiting) is None
    consumer.put("c")
    assert consumer.client.answers() == []
    consumer.client.send(Request.ACK_MESSAGE, AckMessage(GROUP, TOPIC, Int32(0), str(receipt), receipt.offset))
    consumer.parts.end_turn()
    consumer.parts.end_turn()
    told = [answer for answer in consumer.client.answers() if "hasMsg" in answer.fields]
    assert [decode_header(NotificationAnswer, answer.fields).has_msg for answer in told] == [True]


def test_what_is_done_is_not_given_again(consumer: Attempting) -> None:
    consumer.put("a", "b", "c", "d")
    first = consumer.attempt("one", 3)
    assert consumer.ack(first[1][1]) == Response.SUCCESS
    again = consumer.attempt("one", 3)
    assert bodies(again) == ["a", "c"]
    assert {consumer.ack(receipt) for _, receipt in again} == {Response.SUCCESS}
    assert bodies(consumer.attempt("one", 3)) == ["d"]


def test_a_repeated_delivery_does_not_count(consumer: Attempting) -> None:
    """The records and their counts are those of the answer that was lost, also of a message that was given before."""
    consumer.put("a")
    for times in range(3):
        answers = [consumer.answer("one") for _ in range(3)]
        (record,) = split(answers[0].body)
        assert record.reconsume_times == times
        assert {bytes(answer.body) for answer in answers} == {bytes(answers[0].body)}
        assert {decode_header(PopAnswer, answer.fields).order_count_info for answer in answers} == {f"0 0 {times}"}
        consumer.parts.advance(LEASE_S)


def test_the_lease_begins_anew(consumer: Attempting) -> None:
    consumer.put("a")
    consumer.attempt("one")
    consumer.parts.advance(LEASE_S - 1)
    consumer.attempt("one")
    consumer.parts.advance(LEASE_S - 1)
    assert consumer.attempt("two") == []
    consumer.parts.advance(1)
    assert bodies(consumer.attempt("two")) == ["a"]


def test_what_an_attempt_had_belongs_to_the_next_one_after_its_lease(consumer: Attempting) -> None:
    consumer.put("a")
    consumer.attempt("one")
    consumer.parts.advance(LEASE_S)
    assert bodies(consumer.attempt(None)) == ["a"]
    assert consumer.attempt("one") == []


def test_a_delayed_message_blocks_its_own_attempt_too(consumer: Attempting) -> None:
    consumer.put("a", "b")
    first = consumer.attempt("one")
    assert consumer.change(first[1][1], 5000).code == Response.SUCCESS
    assert consumer.attempt("one") == []
    consumer.parts.advance(5)
    assert bodies(consumer.attempt("one")) == ["a"]
    assert consumer.attempt("two") == []


def test_the_partitions_of_an_attempt_come_first(consumer: Attempting) -> None:
    consumer.put("a", partition=0)
    consumer.put("b", "c", partition=1)
    assert bodies(consumer.attempt("one", 1)) == ["a"]
    assert bodies(consumer.attempt("one", 1)) == ["a"]
    assert bodies(consumer.attempt("one", 2)) == ["a", "b"]
    assert bodies(consumer.attempt("one", 2, queue=1)) == ["b"]


def test_without_order_a_name_means_nothing(consumer: Attempting) -> None:
    consumer.put("a", "b")
    for body in ("a", "b"):
        assert bodies(consumer.messages(consumer.answer("one", 1, order=False))) == [body]
    assert consumer.attempt("one") == []


def test_the_log_has_the_repeated_delivery(consumer: Attempting) -> None:
    """After a restart the last receipts are good, the count is as before, and nobody's attempt is known."""
    consumer.put("a")
    consumer.attempt("one")
    ((_, receipt),) = consumer.attempt("one")
    other = consumer.reopened()
    consumer.parts = other.parts
    bunch = other.leasing.leases.of(GROUP, TOPIC)[0].find(0)
    assert bunch is not None
    assert (bunch.pop_ms, bunch.times) == (receipt.pop_ms, 1)
    assert other.popped(order=True) == []
    assert other.ack(receipt) == Response.SUCCESS


def test_the_name_of_an_attempt_is_bounded(consumer: Attempting) -> None:
    consumer.put("a")
    assert consumer.answer("x" * (MOST_NAME_CHARS + 1)).code == Response.INVALID_PARAMETER
    assert bodies(consumer.attempt("x" * MOST_NAME_CHARS)) == ["a"]
