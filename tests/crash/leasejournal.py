"""What consumers were answered about leased messages, and what must follow from it (``tests.crash.leases``)."""

import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from metaq.message import TopicPartition
from metaq.protocol.properties import DEAD
from metaq.protocol.record import Record
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, decode_header, encode_header
from metaq.protocol.remoting.leases.acks import BatchAck, acks_of, encode_batch_ack
from metaq.protocol.remoting.leases.pop import (
    ALL_QUEUES,
    FROM_FIRST,
    AckMessage,
    ChangeAnswer,
    ChangeInvisibleTime,
    PopAnswer,
    PopMessage,
    receipts_of,
)
from metaq.protocol.remoting.leases.receipts import Receipt
from tests.crash.command import expect
from tests.support.admin import BROKER, pull, records
from tests.support.messages import pairs_of
from tests.support.remoting import RemotingClient

TOPIC: Final = "orders"
GROUPS: Final = ("billing", "audit")
PARTITIONS: Final = 2
MOST_TIMES: Final = 5
INVISIBLE_MS: Final = (1000, 1000, 3000)
REJECT: Final = -1
POLL_MS: Final = 100
SLACK_MS: Final = 20
"""By so much a lease may end early: the broker's clocks are read one after the other, and rounded."""
ANSWER_MS: Final = 500
"""What is asked for so long before a lease ends arrives in time, unless an answer says so that came later."""


class Place(NamedTuple):
    """Where a message is."""

    partition: int
    offset: int


class Delivery(NamedTuple):
    """A message in the hands of a consumer."""

    number: int
    receipt: Receipt


class Kept(NamedTuple):
    """A delivery that is finished later, after a kill perhaps."""

    group: str
    delivery: Delivery
    from_ms: int
    """Not before this time, which may be after the end of the lease."""


@dataclass
class Known:
    """What one group knows of a message."""

    times: int = -1
    """As its last delivery said."""
    pop_ms: int = 0
    due_ms: int = 0
    """The lease goes on at least until then, by the wall clock."""
    asked: set[int] = field(default_factory=set)
    """The deliveries of which an ack was sent, without an answer: the message is done or not."""
    is_acked: bool = False
    is_rejected: bool = False
    is_dead: bool = False


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def number_of(body: bytes | memoryview) -> int:
    return int(bytes(body[:20]).split()[0])


class Journal:
    """All answers; any thread may report one. Messages are numbered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies: list[bytes] = []
        self._places: dict[int, Place] = {}
        self._known: dict[tuple[str, int], Known] = {}
        self._acked: dict[str, set[int]] = {group: set() for group in GROUPS}
        self._letters = dict.fromkeys(GROUPS, 0)
        self.kept: list[Kept] = []
        self.counts: Counter[str] = Counter()

    # -- what is sent -------------------------------------------------------------------------------------------------

    def new_body(self, size: int) -> bytes:
        with self._lock:
            body = b"%d " % len(self._bodies) + bytes(size)
            self._bodies.append(body)
            return body

    def sent(self, body: bytes, place: Place) -> None:
        with self._lock:
            self.counts["sent"] += 1
            self._places[number_of(body)] = place

    # -- what is given ------------------------------------------------------------------------------------------------

    def acked(self, group: str) -> frozenset[int]:
        """Return what is acked by now: none of it may be in the answer to a pop that is asked for afterwards."""
        with self._lock:
            return frozenset(self._acked[group])

    def given(self, group: str, record: Record, receipt: Receipt, acked: frozenset[int]) -> Delivery:
        number = number_of(record.body)
        with self._lock:
            known = self._known.setdefault((group, number), Known())
            expect(self._bodies[number] == bytes(record.body), "it is what was sent", group, number)
            place = self._places.setdefault(number, Place(record.partition, record.queue_offset))
            expect(place == (record.partition, record.queue_offset), "it is where it was", group, number, place, record)
            expect(number not in acked, "an ack that was answered is not undone", group, number, known)
            expect(record.reconsume_times < MOST_TIMES, "no more deliveries than allowed", group, number, record)
            if receipt.pop_ms > known.pop_ms:  # else another has read the answer to a later pop before
                expect(not known.is_rejected and not known.is_dead, "what is dead stays dead", group, number, known)
                expect(record.reconsume_times > known.times, "each delivery counts", group, number, known, record)
                expect(receipt.pop_ms >= known.due_ms - SLACK_MS, "one lease at a time", group, number, known, receipt)
                known.times, known.pop_ms = record.reconsume_times, receipt.pop_ms
                known.due_ms = receipt.pop_ms + receipt.invisible_ms
            self.counts["given"] += 1
            self.counts["given again"] += record.reconsume_times > 0
        return Delivery(number, receipt)

    def ends(self, group: str, delivery: Delivery, due_ms: int) -> None:
        """Take note that a lease may end at a time, because its consumer asks for that."""
        with self._lock:
            known = self._known[group, delivery.number]
            if known.pop_ms == delivery.receipt.pop_ms:
                known.due_ms = min(known.due_ms, due_ms)

    def asked(self, group: str, deliveries: Sequence[Delivery]) -> None:
        """Take note that acks are sent."""
        with self._lock:
            for delivery in deliveries:
                self._known[group, delivery.number].asked.add(delivery.receipt.pop_ms)

    def changed(self, group: str, delivery: Delivery, due_ms: int) -> None:
        with self._lock:
            known = self._known[group, delivery.number]
            if known.pop_ms == delivery.receipt.pop_ms:
                known.due_ms = due_ms
            self.counts["changed"] += 1

    def finished(self, group: str, delivery: Delivery, *, rejected: bool = False) -> None:
        with self._lock:
            known = self._known[group, delivery.number]
            if rejected:
                known.is_rejected = True
            else:
                known.is_acked = True
                self._acked[group].add(delivery.number)
            self.counts["rejected" if rejected else "acked"] += 1

    def refused(self, group: str, delivery: Delivery, answer: RemotingCommand) -> None:
        """Take note that a receipt means nothing any more: its lease has ended, then."""
        with self._lock:
            known, receipt = self._known[group, delivery.number], delivery.receipt
            is_last = known.pop_ms == receipt.pop_ms
            is_over = now_ms() > known.due_ms - ANSWER_MS or known.is_acked or known.is_rejected or known.is_dead
            expect(answer.code == Response.NO_MESSAGE, "the code for what is over", answer)
            expect(is_over or not is_last, "a lease goes on", group, delivery, known, answer)
            known.asked.discard(receipt.pop_ms)
            self.counts["too late"] += 1

    # -- dead letters, and the end ------------------------------------------------------------------------------------

    def read_dead_letters(self, client: RemotingClient) -> None:
        """Read what is new among the dead letters; each message is there once."""
        for group in GROUPS:
            while (answer := pull(client, f"%DLQ%{group}", self._letters[group])).code == Response.SUCCESS:
                for record in records(answer):
                    expect(record.queue_offset == self._letters[group], "all dead letters are read", group, record)
                    self._letters[group] += 1
                    self._died(group, number_of(record.body), pairs_of(record)[DEAD])

    def _died(self, group: str, number: int, reason: str) -> None:
        with self._lock:
            known = self._known.setdefault((group, number), Known())
            expect(not known.is_dead, "a message is dead once", group, number, known)
            known.is_dead = True
            self.counts[f"dead: {reason}"] += 1

    def missing(self, firsts: Sequence[int]) -> list[tuple[str, int]]:
        """Return the messages that are neither acked nor dead.

        Those that nobody was given are not missing if retention has deleted them: before ``firsts``, by partition.
        """
        with self._lock:
            found = []
            for number, place in self._places.items():
                for group in GROUPS:
                    known = self._known.get((group, number), Known())
                    aged_out = known.times < 0 and place.offset < firsts[place.partition]
                    is_done = known.is_dead or ((known.is_acked or known.asked) and not known.is_rejected)
                    if not is_done and not aged_out:
                        found.append((group, number))
            return found


class Consumer:
    """One connection that consumes, more or less carefully."""

    def __init__(self, client: RemotingClient, journal: Journal, group: str, rng: random.Random) -> None:
        self._client = client
        self._journal = journal
        self._group = group
        self._rng = rng

    def work(self, *, careful: bool) -> None:
        """Pop once, and do something with what comes; all is acked when ``careful``."""
        self._finish_kept()
        deliveries = self._pop()
        if not careful and len(deliveries) > 3 and self._rng.random() < 0.3:
            self._ack_together(deliveries[1:])
            del deliveries[1:]
        for delivery in deliveries:
            choice = 0.0 if careful else self._rng.random()
            if choice < 0.6:
                self._ack(delivery)
            elif choice < 0.7:
                self._change(delivery, 0)
            elif choice < 0.75:
                self._change(delivery, self._rng.choice((200, 2000)))
            elif choice < 0.77:
                self._change(delivery, REJECT)
            elif choice < 0.9:
                self._journal.kept.append(Kept(self._group, delivery, 0 if choice < 0.84 else self._end_of(delivery)))

    def _finish_kept(self) -> None:
        kept, now = self._journal.kept, now_ms()
        for each in [each for each in list(kept) if each.group == self._group and each.from_ms <= now][:3]:
            try:
                kept.remove(each)
            except ValueError:
                continue  # another consumer has it
            self._ack(each.delivery)

    def _end_of(self, delivery: Delivery) -> int:
        """Return a time when the lease has ended, unless it was made longer."""
        return delivery.receipt.pop_ms + delivery.receipt.invisible_ms + SLACK_MS

    def _pop(self) -> list[Delivery]:
        most, invisible_ms = self._rng.choice((1, 8, 32)), self._rng.choice(INVISIBLE_MS)
        queue = self._rng.choice((ALL_QUEUES, ALL_QUEUES, *range(PARTITIONS)))
        acked = self._journal.acked(self._group)
        header = PopMessage(self._group, TOPIC, Int32(queue), Int32(most), invisible_ms, POLL_MS, Int32(FROM_FIRST))
        answer = self._client.call(Request.POP_MESSAGE, encode_header(header))
        if answer.code != Response.SUCCESS:
            expect(answer.code == Response.POLLING_TIMEOUT, "a pop gives messages or nothing", answer)
            return []
        found = records(answer)
        places = [(TopicPartition(record.topic, record.partition), record.queue_offset) for record in found]
        receipts = receipts_of(decode_header(PopAnswer, answer.fields), BROKER, places)
        return [
            self._journal.given(self._group, record, receipt, acked) for record, receipt in zip(found, receipts, strict=True)
        ]

    def _ack(self, delivery: Delivery) -> None:
        receipt = delivery.receipt
        self._journal.asked(self._group, [delivery])
        header = AckMessage(self._group, TOPIC, Int32(receipt.queue), str(receipt), receipt.offset)
        answer = self._client.call(Request.ACK_MESSAGE, encode_header(header))
        if answer.code == Response.SUCCESS:
            self._journal.finished(self._group, delivery)
        else:
            self._journal.refused(self._group, delivery, answer)

    def _ack_together(self, deliveries: list[Delivery]) -> None:
        """Ack in one request. Its answer does not tell of receipts that were too late: single acks do."""
        self._journal.asked(self._group, deliveries)
        rows = acks_of(self._group, TOPIC, [delivery.receipt for delivery in deliveries])
        answer = self._client.call(Request.BATCH_ACK_MESSAGE, {}, encode_batch_ack(BatchAck(BROKER, tuple(rows))))
        expect(answer.code == Response.SUCCESS, "acks together", answer)
        for delivery in deliveries:
            self._ack(delivery)

    def _change(self, delivery: Delivery, invisible_ms: int) -> None:
        receipt = delivery.receipt
        self._journal.ends(self._group, delivery, now_ms() + max(0, invisible_ms))
        header = ChangeInvisibleTime(self._group, TOPIC, Int32(receipt.queue), str(receipt), receipt.offset, invisible_ms)
        answer = self._client.call(Request.CHANGE_MESSAGE_INVISIBLETIME, encode_header(header))
        if answer.code != Response.SUCCESS:
            expect(answer.code == Response.NO_MESSAGE, "the code for what is over", answer)
        elif invisible_ms == REJECT:
            self._journal.finished(self._group, delivery, rejected=True)
        else:
            changed = decode_header(ChangeAnswer, answer.fields)
            self._journal.changed(self._group, delivery, changed.pop_time + changed.invisible_time)
