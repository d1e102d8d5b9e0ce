"""Pops, acks and changes: the handlers alone, in the process of the test (``tests.support.inprocess``)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import gevent
import pytest

from metaq.engine.leases.draining import Drain
from metaq.engine.leases.keeping import LeaseKeeper
from metaq.engine.leases.leasing import Leasing
from metaq.engine.writing import Draft, note, stage
from metaq.message import RETRY_PREFIX, TopicPartition
from metaq.protocol import properties
from metaq.protocol.record import Record, decode_record, is_intact
from metaq.protocol.remoting.attributes import LATEST_MS
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, decode_header
from metaq.protocol.remoting.leases.acks import BatchAck, BatchAckAnswer, acks_of, encode_batch_ack
from metaq.protocol.remoting.leases.pop import (
    ALL_QUEUES,
    AckMessage,
    ChangeAnswer,
    ChangeInvisibleTime,
    Notification,
    NotificationAnswer,
    PeekMessage,
    PollingAnswer,
    PollingInfo,
    PopAnswer,
    PopMessage,
    receipts_of,
)
from metaq.protocol.remoting.leases.receipts import Receipt
from metaq.protocol.text.messages import Stored
from metaq.server.remoting.consuming.acks import AckHandler
from metaq.server.remoting.consuming.heartbeat import HeartbeatHandler
from metaq.server.remoting.consuming.pop import PopHandler
from metaq.server.text.put import PutHandler
from metaq.store.files.disk import Disk
from metaq.store.files.filecache import read_here, run_here
from metaq.store.queues.consumequeue import ConsumeQueue
from tests.support.inprocess import Parts, Remoting, Text

TOPIC: Final = "orders"
GROUP: Final = "billing"
INVISIBLE_MS: Final = 10_000
PLAIN: Final[Mapping[str, object]] = {"partitions": 2}


class Consumer:
    """A broker in which messages are leased, and a client of it."""

    def __init__(self, data: Path, topic: Mapping[str, object] = PLAIN, disk: Disk | None = None) -> None:
        self.parts = Parts(data, disk, topics={TOPIC: topic})
        context = self.parts.context
        self.leasing = Leasing.open(context, self.parts.turns, self.parts.loop.timer)
        self.keeper = LeaseKeeper(self.leasing.leases, self.leasing.poison, self.parts.end_turn, run_here)
        self.broker_name = context.settings.broker_name
        pops = PopHandler(context, self.leasing, self.parts.reads, self.parts.later)
        acks = AckHandler(context, self.leasing, self.parts.reads)
        beats = HeartbeatHandler(context, self.leasing.lines)
        self.parts.endpoint.answer({**pops.requests(), **acks.requests(), **beats.requests()})
        self.parts.endpoint.answer_runs({Request.ACK_MESSAGE: acks.acks})
        puts = PutHandler(context, self.parts.turns).puts
        self.parts.endpoint.answer_text({}, puts, puts)
        self._producer, self.client = Text(self.parts), Remoting(self.parts)

    def put(self, *bodies: str, partition: int = 0) -> None:
        for number, body in enumerate(bodies):
            self._producer.send(b"put %b %d %d 0 %d\r\n%b" % (TOPIC.encode(), partition, len(body), number, body.encode()))
        self.parts.end_turn()
        self.leasing.lines.wake(self.parts.store.queues.values())
        self.parts.end_turn()

    def put_keyed(self, *bodies: str) -> None:
        """Store messages whose first letter is their key; a point is none."""
        for body in bodies:
            pairs = {} if body[0] == "." else {properties.SHARDING_KEY: body[0]}
            draft = Draft(TOPIC, 0, body.encode(), pairs, 0, 0, self.parts.clock.now_ms(), bytes(8))
            stage(self.parts.context, draft)
        note(self.parts.turns, lambda error: None)
        self.parts.end_turn()

    def ask(self, code: int, header: tuple[object, ...] = (), body: bytes = b"") -> RemotingCommand | None:
        """Send a request and end the turn; return the answer, or ``None`` while there is none."""
        self.client.send(code, header, body)
        self.parts.end_turn()
        answers = self.client.answers()
        return answers[0] if answers else None

    def pop(self, most: int = 32, queue: int = ALL_QUEUES, *, poll_ms: int = 0, order: bool = False) -> RemotingCommand | None:
        header = PopMessage(GROUP, TOPIC, Int32(queue), Int32(most), INVISIBLE_MS, poll_ms, Int32(0), order=order)
        return self.ask(Request.POP_MESSAGE, header)

    def popped(self, most: int = 32, queue: int = ALL_QUEUES, *, order: bool = False) -> list[tuple[str, Receipt]]:
        """Pop; return bodies and receipts."""
        answer = self.pop(most, queue, order=order)
        assert answer is not None
        return self.messages(answer)

    def messages(self, answer: RemotingCommand) -> list[tuple[str, Receipt]]:
        if answer.code != Response.SUCCESS:
            assert answer.code == Response.POLLING_TIMEOUT, answer
            return []
        records = split(answer.body)
        places = [(TopicPartition(record.topic, record.partition), record.queue_offset) for record in records]
        receipts = receipts_of(decode_header(PopAnswer, answer.fields), self.broker_name, places)
        return [(bytes(record.body).decode(), receipt) for record, receipt in zip(records, receipts, strict=True)]

    def ack(self, receipt: Receipt) -> int:
        answer = self.ask(Request.ACK_MESSAGE, AckMessage(GROUP, TOPIC, Int32(receipt.queue), str(receipt), receipt.offset))
        assert answer is not None
        return answer.code

    def change(self, receipt: Receipt, invisible_ms: int) -> RemotingCommand:
        header = ChangeInvisibleTime(GROUP, TOPIC, Int32(receipt.queue), str(receipt), receipt.offset, invisible_ms)
        answer = self.ask(Request.CHANGE_MESSAGE_INVISIBLETIME, header)
        assert answer is not None
        return answer

    def offset(self, partition: int = 0) -> int | None:
        return self.parts.context.offsets.get(GROUP, TOPIC, partition)

    def reopened(self) -> "Consumer":
        """End this broker and start another one with its folder, at the same time."""
        now_ms, data = self.parts.clock.now_ms(), self.parts.settings.data
        self.parts.close()
        other = Consumer(data)
        other.parts.clock.jump(now_ms - other.parts.clock.now_ms())
        return other


def split(body: bytes) -> list[Record]:
    records = []
    view = memoryview(body)
    while view:
        size = int.from_bytes(view[:4])
        log_offset = int.from_bytes(view[28:36])
        assert is_intact(view[:size], log_offset)
        records.append(decode_record(view[:size]))
        view = view[size:]
    return records


def bodies(messages: Sequence[tuple[str, Receipt]]) -> list[str]:
    return [body for body, _ in messages]


@pytest.fixture
def consumer(tmp_path: Path) -> Iterator[Consumer]:
    consumer = Consumer(tmp_path / "data")
    yield consumer
    consumer.parts.close()


def test_messages_are_leased_until_they_are_acked(consumer: Consumer) -> None:
    """ES-102: nobody else gets a message while its lease goes on, and after its ack it never comes again."""
    consumer.put("a", "b", "c")
    first = consumer.popped(2)
    assert bodies(first) == ["a", "b"]
    assert bodies(consumer.popped()) == ["c"]
    assert consumer.popped() == []
    assert consumer.ack(first[0][1]) == Response.SUCCESS
    assert consumer.offset() == 1
    consumer.parts.advance(INVISIBLE_MS / 1000)
    again = consumer.popped()
    assert bodies(again) == ["b", "c"]
    assert consumer.ack(first[1][1]) == Response.NO_MESSAGE  # it was given again
    assert [consumer.ack(receipt) for _, receipt in again] == [Response.SUCCESS] * 2
    assert consumer.offset() == 3
    consumer.parts.advance(INVISIBLE_MS / 1000)
    assert consumer.popped() == []
    assert consumer.ack(again[0][1]) == Response.SUCCESS  # done before


def test_a_message_given_again_says_how_often(consumer: Consumer) -> None:
    """The record has the deliveries before this one, and the time of the first one; its checksum is right."""
    consumer.put("a")
    ((_, first),) = consumer.popped()
    consumer.parts.advance(INVISIBLE_MS / 1000)
    answer = consumer.pop()
    assert answer is not None
    (record,) = split(answer.body)
    assert record.reconsume_times == 1
    assert properties.parse(record.properties.decode())[properties.FIRST_POP_TIME] == str(first.pop_ms)


def test_a_late_ack_counts_unless_the_message_was_given_again(consumer: Consumer) -> None:
    consumer.put("a")
    ((_, receipt),) = consumer.popped()
    consumer.parts.advance(INVISIBLE_MS / 1000 + 1)
    assert consumer.ack(receipt) == Response.SUCCESS
    assert consumer.popped() == []


def test_a_change_moves_the_end_of_the_lease(consumer: Consumer) -> None:
    consumer.put("a")
    ((_, receipt),) = consumer.popped()
    answer = consumer.change(receipt, 30_000)
    header = decode_header(ChangeAnswer, answer.fields)
    assert (header.pop_time, header.invisible_time) == (receipt.pop_ms, 30_000)
    consumer.parts.advance(INVISIBLE_MS / 1000)
    assert consumer.popped() == []
    assert consumer.change(receipt, 0).code == Response.SUCCESS
    assert bodies(consumer.popped()) == ["a"]
    assert consumer.change(receipt, 0).code == Response.NO_MESSAGE


def test_a_change_ends_the_lease_when_the_group_allows_it_at_the_latest(consumer: Consumer) -> None:
    """Java's client gives back with pauses of up to 2 h, and takes no notice of a refusal."""
    groups = consumer.parts.context.groups
    groups.put(replace(groups.ensure(GROUP), attributes={"max_invisible_ms": str(2 * INVISIBLE_MS)}))
    consumer.put("a")
    ((_, receipt),) = consumer.popped()
    consumer.parts.advance(1.0)
    answer = consumer.change(receipt, 7_200_000)
    assert answer.code == Response.SUCCESS
    assert decode_header(ChangeAnswer, answer.fields).invisible_time == 2 * INVISIBLE_MS
    consumer.parts.advance(2 * INVISIBLE_MS / 1000 - 1.5)
    assert consumer.popped() == []
    consumer.parts.advance(0.5)
    ((body, again),) = consumer.popped()
    assert body == "a"
    for absurd_ms in (-2, LATEST_MS + 1):
        answer = consumer.change(again, absurd_ms)
        assert (answer.code, f"invisibleTime is {absurd_ms}" in (answer.remark or "")) == (Response.INVALID_PARAMETER, True)


def test_a_rejected_message_is_a_dead_letter(consumer: Consumer) -> None:
    consumer.put("a")
    ((_, receipt),) = consumer.popped()
    assert consumer.change(receipt, -1).code == Response.SUCCESS
    consumer.parts.advance(INVISIBLE_MS / 1000)
    assert consumer.popped() == []
    assert consumer.offset() == 1
    assert dead_letters(consumer) == [("a", "rejected", 1)]


def test_the_last_delivery_is_followed_by_the_dead_letters(consumer: Consumer) -> None:
    """A message is delivered ``retry_max_times`` times in all, and then it is among the dead letters, once."""
    consumer.put("a")
    most = consumer.parts.context.groups.ensure(GROUP).retry_max_times
    for _ in range(most):
        assert bodies(consumer.popped()) == ["a"]
        consumer.parts.advance(INVISIBLE_MS / 1000)
    assert consumer.popped() == []
    assert dead_letters(consumer) == [("a", "times", most)]
    other = consumer.reopened()
    other.parts.advance(INVISIBLE_MS / 1000)
    assert other.popped() == []
    assert dead_letters(other) == [("a", "times", most)]
    consumer.parts = other.parts


def dead_letters(consumer: Consumer) -> list[tuple[str, str, int]]:
    """Return body, reason and deliveries of the dead letters of the group."""
    store, found = consumer.parts.store, []
    queue = store.queues.get(TopicPartition(f"%DLQ%{GROUP}", 0))
    if queue is not None:
        for stored in store.records(queue, 0, 1 << 20, read_here):
            assert stored is not None
            record = decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
            pairs = properties.parse(record.properties.decode())
            found.append((bytes(record.body).decode(), pairs[properties.DEAD], record.reconsume_times))
    return found


def test_leases_are_the_same_after_a_restart(consumer: Consumer) -> None:
    """What was answered stands: leases go on, receipts stay good, and what is done stays done."""
    consumer.put("a", "b", "c")
    messages = consumer.popped()
    assert consumer.ack(messages[1][1]) == Response.SUCCESS
    other = consumer.reopened()
    assert other.popped() == []
    assert other.ack(messages[0][1]) == Response.SUCCESS
    other.parts.advance(INVISIBLE_MS / 1000)
    assert bodies(other.popped()) == ["c"]
    assert other.offset() == 2
    consumer.parts = other.parts


def test_a_snapshot_is_all_that_an_opening_reads(consumer: Consumer) -> None:
    consumer.put("a", "b", "c")
    messages = consumer.popped()
    consumer.ack(messages[1][1])
    log = consumer.leasing.leases.log
    assert log.since == 0
    consumer.keeper._take_snapshot()
    consumer.parts.end_turn()
    assert log.since == 2
    consumer.ack(messages[0][1])
    other = consumer.reopened()
    assert other.leasing.leases.log.since == 2
    assert other.ack(messages[2][1]) == Response.SUCCESS
    other.parts.advance(INVISIBLE_MS / 1000)
    assert other.popped() == []
    consumer.parts = other.parts


def test_a_pop_waits_for_a_message(consumer: Consumer) -> None:
    """ES-012, ES-013: for a new one, the end of a lease, or the end of its time, whatever comes first."""
    assert consumer.pop(poll_ms=5000) is None
    consumer.put("a")
    (answer,) = consumer.client.answers()
    assert bodies(consumer.messages(answer)) == ["a"]
    assert consumer.pop(poll_ms=INVISIBLE_MS + 5000) is None
    consumer.parts.advance(INVISIBLE_MS / 1000 + 0.01)
    (answer,) = consumer.client.answers()
    assert bodies(consumer.messages(answer)) == ["a"]  # its lease ended
    assert consumer.pop(poll_ms=1000) is None
    consumer.parts.advance(1.0)
    (answer,) = consumer.client.answers()
    assert answer.code == Response.POLLING_TIMEOUT


def test_one_message_wakes_one_pop_that_has_waited_longest(consumer: Consumer) -> None:
    other = Remoting(consumer.parts)
    assert consumer.pop(1, poll_ms=5000) is None
    header = PopMessage(GROUP, TOPIC, Int32(-1), Int32(1), INVISIBLE_MS, 5000, Int32(0))
    other.send(Request.POP_MESSAGE, header)
    consumer.put("a")
    assert len(consumer.client.answers()) == 1
    assert other.answers() == []
    polling = consumer.ask(Request.POLLING_INFO, PollingInfo(GROUP, TOPIC, Int32(-1)))
    assert polling is not None
    assert decode_header(PollingAnswer, polling.fields).polling_num == 1
    consumer.put("b")
    assert len(other.answers()) == 1


def test_pops_take_turns_among_partitions(consumer: Consumer) -> None:
    consumer.put("a", "b", partition=0)
    consumer.put("c", "d", partition=1)
    assert [bodies(consumer.popped(1)) for _ in range(4)] == [["a"], ["c"], ["b"], ["d"]]


def test_in_order_nothing_follows_what_is_leased(consumer: Consumer) -> None:
    consumer.put("a", "b", "c")
    first = consumer.popped(2, order=True)
    assert bodies(first) == ["a", "b"]
    assert consumer.popped(order=True) == []
    consumer.ack(first[0][1])
    assert consumer.popped(order=True) == []
    consumer.parts.advance(INVISIBLE_MS / 1000)
    assert bodies(consumer.popped(1, order=True)) == ["b"]


def test_in_order_all_that_is_open_is_given_again_before_what_follows(consumer: Consumer) -> None:
    consumer.put(*"abcdefgh")
    assert len(consumer.popped(4, order=True)) == 4
    consumer.parts.advance(INVISIBLE_MS / 1000)
    again = consumer.popped(6, order=True)
    assert bodies(again) == ["a", "b", "c", "d"]
    assert {consumer.ack(receipt) for _, receipt in again} == {Response.SUCCESS}
    assert bodies(consumer.popped(6, order=True)) == ["e", "f", "g", "h"]


def test_acks_of_many_messages_in_one_request(consumer: Consumer) -> None:
    consumer.put(*map(str, range(20)))
    receipts = [receipt for _, receipt in consumer.popped()]
    body = encode_batch_ack(BatchAck(consumer.broker_name, tuple(acks_of(GROUP, TOPIC, receipts[3:17]))))
    for done in (14, 0):
        answer = consumer.ask(Request.BATCH_ACK_MESSAGE, body=body)
        assert answer is not None
        assert (answer.code, decode_header(BatchAckAnswer, answer.fields).done) == (Response.SUCCESS, done)
    consumer.parts.advance(INVISIBLE_MS / 1000)
    assert bodies(consumer.popped()) == ["0", "1", "2", "17", "18", "19"]


def test_other_receipts_mean_nothing(consumer: Consumer) -> None:
    consumer.put("a")
    ((_, receipt),) = consumer.popped()
    for other in (receipt._replace(token=4711), receipt._replace(pop_ms=1), receipt._replace(mark=1)):
        assert consumer.ack(other) == Response.NO_MESSAGE
        assert consumer.change(other, 0).code == Response.NO_MESSAGE
    assert consumer.ack(receipt) == Response.SUCCESS


def test_retry_topics_are_not_popped(consumer: Consumer) -> None:
    """A-09: no receipt can name their messages, which would become dead letters without a consumer that had them."""
    retry = f"{RETRY_PREFIX}{GROUP}"
    consumer.parts.context.topics.ensure(retry, 1)
    header = PopMessage(GROUP, retry, Int32(ALL_QUEUES), Int32(8), INVISIBLE_MS, 0, Int32(0))
    answer = consumer.ask(Request.POP_MESSAGE, header)
    assert answer is not None and answer.remark is not None
    assert (answer.code, answer.remark) == (Response.NO_PERMISSION, f"{retry} is a retry topic: those are always pulled")


def test_a_reset_ends_all_leases(consumer: Consumer) -> None:
    consumer.put("a", "b", "c")
    messages = consumer.popped()
    consumer.parts.context.offsets.reset(GROUP, TOPIC, 0, 1, consumer.parts.clock.monotonic())
    consumer.parts.end_turn()
    assert consumer.ack(messages[2][1]) == Response.NO_MESSAGE
    again = consumer.popped()
    assert bodies(again) == ["b", "c"]
    assert consumer.ack(again[0][1]) == Response.SUCCESS
    assert consumer.offset() == 2


def test_questions(consumer: Consumer) -> None:
    """A peek leases nothing; a notification waits until there is something."""
    notice = Notification(GROUP, TOPIC, Int32(-1), 5000, 0)
    assert consumer.ask(Request.NOTIFICATION, notice) is None
    consumer.put("a")
    (answer,) = consumer.client.answers()
    assert decode_header(NotificationAnswer, answer.fields).has_msg
    for _ in range(2):
        peeked = consumer.ask(Request.PEEK_MESSAGE, PeekMessage(TOPIC, Int32(-1), Int32(8), GROUP))
        assert peeked is not None
        assert [bytes(record.body) for record in split(peeked.body)] == [b"a"]
    assert bodies(consumer.popped()) == ["a"]


def test_open_messages_become_retries_when_the_group_pulls_from_now_on(consumer: Consumer) -> None:
    """What is done stays done, what is open comes as a retry when its lease ends, and the offset is after all of it."""
    consumer.put("a", "b", "c", "d")
    messages = consumer.popped(3)
    assert consumer.ack(messages[1][1]) == Response.SUCCESS
    context = consumer.parts.context
    drain = Drain(context, consumer.leasing.leases, consumer.leasing.moves, run_here)
    draining = gevent.spawn(drain.drain, context.groups.ensure(GROUP), TOPIC)
    for _ in range(5):
        consumer.parts.end_turn()
    draining.get(block=False)
    assert consumer.offset() == 3
    assert consumer.leasing.leases.open == 0
    assert consumer.ack(messages[0][1]) == Response.SUCCESS  # done: it means nothing any more, and does no harm
    queue = consumer.parts.store.queues[TopicPartition("SCHEDULE_TOPIC_XXXX", 2)]  # 10 seconds
    parked = [decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size])) for stored in retries(consumer, queue)]
    assert [(bytes(record.body), record.reconsume_times) for record in parked] == [(b"a", 1), (b"c", 1)]
    pairs = properties.parse(parked[0].properties.decode())
    assert (pairs[properties.REAL_TOPIC], pairs[properties.RETRY_TOPIC]) == (f"%RETRY%{GROUP}", TOPIC)
    other = consumer.reopened()
    assert bodies(other.popped()) == ["d"]
    consumer.parts = other.parts


def retries(consumer: Consumer, queue: ConsumeQueue) -> list[Stored]:
    return [stored for stored in consumer.parts.store.records(queue, 0, 1 << 20, read_here) if stored is not None]


def ordered_by_key(consumer: Consumer) -> None:
    group = consumer.parts.context.groups.ensure(GROUP)
    consumer.parts.context.groups.put(replace(group, attributes={"order": "key"}))


def test_of_each_key_one_message_at_a_time(consumer: Consumer) -> None:
    """E-22: others go on, and the next of a key is given when the one before it is done."""
    ordered_by_key(consumer)
    consumer.put_keyed("a1", "a2", "b1", ".1", "a3", "b2", ".2")
    first = consumer.popped()
    assert bodies(first) == ["a1", "b1", ".1", ".2"]
    assert consumer.popped() == []
    receipts = dict(first)
    assert consumer.ack(receipts["a1"]) == Response.SUCCESS
    assert consumer.offset() == 1
    second = consumer.popped()
    assert bodies(second) == ["a2"]
    assert consumer.change(second[0][1], 5000).code == Response.SUCCESS
    assert consumer.ack(receipts["b1"]) == Response.SUCCESS
    assert bodies(consumer.popped()) == ["b2"]
    consumer.parts.advance(5)
    again = consumer.popped()
    assert bodies(again) == ["a2"]  # not a3, which comes after it
    assert consumer.ack(again[0][1]) == Response.SUCCESS
    assert bodies(consumer.popped()) == ["a3"]


def test_order_by_key_is_kept_over_a_restart(consumer: Consumer) -> None:
    ordered_by_key(consumer)
    consumer.put_keyed("a1", "a2", "b1", "a3")
    receipts = dict(consumer.popped())
    assert list(receipts) == ["a1", "b1"]
    other = consumer.reopened()
    ordered_by_key(other)
    assert other.popped() == []
    assert other.ack(receipts["a1"]) == Response.SUCCESS
    assert bodies(other.popped()) == ["a2"]
    consumer.parts = other.parts


def test_without_order_what_was_in_line_is_given(consumer: Consumer) -> None:
    ordered_by_key(consumer)
    consumer.put_keyed("a1", "a2", "a3")
    assert bodies(consumer.popped()) == ["a1"]
    consumer.parts.context.groups.put(replace(consumer.parts.context.groups.ensure(GROUP), attributes={}))
    assert bodies(consumer.popped()) == ["a2", "a3"]


def test_a_rejected_message_makes_room_for_the_next_of_its_key(consumer: Consumer) -> None:
    ordered_by_key(consumer)
    consumer.put_keyed("a1", "a2")
    ((_, receipt),) = consumer.popped()
    assert consumer.change(receipt, -1).code == Response.SUCCESS
    assert bodies(consumer.popped()) == ["a2"]
