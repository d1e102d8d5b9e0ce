"""Clients of a group that are promised more than that a message is kept: it comes later, to one of a group, or only once.

What must hold at the end, at every replica: each delayed message that was acknowledged is there exactly once, and none that was
cancelled; each leased message was given until it was acked; each id that was answered has one record, where all answers say.
"""

import random
import time
from collections.abc import Iterator
from typing import ClassVar, Final

from metaq.client import TextClient
from metaq.message import Message, TopicPartition
from metaq.protocol.ids import decode_offset_id
from metaq.protocol.properties import UNIQUE_KEY
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.headers import Int32, decode_header, encode_header, with_letters
from metaq.protocol.remoting.leases.pop import ALL_QUEUES, FROM_FIRST, AckMessage, PopAnswer, PopMessage, receipts_of
from metaq.protocol.remoting.leases.receipts import Receipt
from metaq.protocol.text.commands import Due, PutOptions
from metaq.protocol.text.replies import OK, UNAVAILABLE, Reply
from metaq.protocol.text.writing import write_line, write_put
from tests.cluster.history import NUMBER_SIZE, OFFSET_BITS
from tests.cluster.load import ANSWER_S, Load, RemotingWorker, TextWorker, in_doubt
from tests.crash.command import expect
from tests.crash.timerjournal import CANCELLED, DELIVERED, FORGOTTEN, Journal
from tests.support.admin import BROKER, ask, records
from tests.support.messages import send, send_header
from tests.support.remoting import RemotingClient

PARTITIONS: Final = 2
LATER: Final = "later"
LEASED: Final = "leased"
ONCE: Final = "once"
TOPICS: Final = (LATER, LEASED, ONCE)
LEASING: Final = "lg"
DELAYS_MS: Final = (50, 500, 2000, 6000)
INVISIBLE_MS: Final = 2000
AT_ONCE: Final = 8
SLACK_S: Final = 1.0
"""After the last due time, before what may have been cancelled is taken for that."""
ONCE_TABLE: Final = {
    "topic": ONCE,
    "defaultTopic": "TBW102",
    "readQueueNums": str(PARTITIONS),
    "writeQueueNums": str(PARTITIONS),
    "perm": "6",
    "order": "false",
    "topicFilterType": "SINGLE_TAG",
    "topicSysFlag": "0",
    "attributes": "+dedupe.window.ms=3600000",
}
"""The topic whose messages have ids, as it is made."""


def create(host: str, port: int) -> None:
    """Make the topics."""
    with TextClient(host, port) as text:
        for topic in (LATER, LEASED):
            text.create(topic, PARTITIONS)
    with RemotingClient(host, port) as client:
        ask(client, Request.UPDATE_AND_CREATE_TOPIC, **ONCE_TABLE)


def read(host: str, port: int, topic: str) -> Iterator[tuple[TopicPartition, int, int, Message]]:
    """Yield the messages that a replica has of a topic, with their partitions, ordinals and numbers."""
    with TextClient(host, port, timeout_s=30.0) as client:
        for partition in range(PARTITIONS):
            for ordinal, message in enumerate(client.iterate(topic, partition=partition)):
                yield TopicPartition(topic, partition), ordinal, number_of(message.body), message


def number_of(body: bytes | memoryview) -> int:
    return int.from_bytes(body[:NUMBER_SIZE])


def now_ms() -> int:
    return time.time_ns() // 1_000_000


class Delayer(TextWorker):
    """Delays messages, cancels some of them at any distance from their time, and reads what comes, from whichever replica."""

    def __init__(self, load: Load, rng: random.Random) -> None:
        super().__init__(load, rng)
        self.journal = Journal(rng)
        self._positions = [0] * PARTITIONS
        self._last_due_ms = 0
        self._reader: TextClient | None = None

    def connect(self) -> None:
        super().connect()
        self._reader = TextClient("127.0.0.1", self.port, timeout_s=ANSWER_S)

    def disconnect(self) -> None:
        super().disconnect()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def settled(self) -> bool:
        return not self.journal.owed and now_ms() > self._last_due_ms + 1000 * SLACK_S

    def step(self) -> bool:
        self._read()
        if self.load.closing.is_set():
            return False  # any replica has what is still to come, the next one perhaps sooner
        number = self.journal.some_open() if self.rng.random() < 0.3 else None
        return self._park() if number is None else self._cancel(number)

    def _park(self) -> bool:
        delay_ms = self.rng.choice(DELAYS_MS)
        number = self.journal.begin(now_ms() + delay_ms)
        body = number.to_bytes(NUMBER_SIZE) + bytes(self.rng.choice((0, 100, 1000)))
        partition, options = self.rng.randrange(PARTITIONS), PutOptions(Due(delay_ms, is_delay=True))
        self._last_due_ms = now_ms() + delay_ms
        reply = self._ask(write_put(LATER, partition, 0, body, number, options=options))
        text = reply.body.decode()
        if reply.code == OK:
            self.journal.parked(number, text.split(" ")[3])
        elif not in_doubt(text):
            expect(reply.code == UNAVAILABLE, "a delay is refused for no other reason than its replica", reply)
            self.journal.timers[number].is_refused = True
        return reply.code == OK

    def _cancel(self, number: int) -> bool:
        reply = self._ask(write_line("cancel", self.journal.timers[number].handle or "", number))
        if in_doubt(reply.body.decode()):
            return False
        expect(reply.code in (CANCELLED, DELIVERED, FORGOTTEN, UNAVAILABLE), "a cancel is answered", number, reply)
        self.journal.cancelled(number, reply)
        return reply.code != UNAVAILABLE

    def _ask(self, frame: bytes) -> Reply:
        assert self.link is not None
        reply = next(self.link.ask(frame))
        self.said = f"{reply.code} {reply.body.decode()}"
        return reply

    def _read(self) -> None:
        assert self._reader is not None
        for partition in range(PARTITIONS):
            batch = self._reader.get(LATER, self._positions[partition], partition=partition, max_bytes=64 * 1024)
            for message in batch.messages:
                self.journal.read(number_of(message.body), message.id, now_ms())
                self._positions[partition] = message.next_position

    def check(self, host: str, port: int) -> None:
        found: dict[int, int] = {}
        for _, _, number, message in read(host, port, LATER):
            expect(number not in found, "a delayed message is there once", number, found.get(number), message.id)
            found[number] = message.id
            if not self.journal.timers[number].copies:
                self.journal.read(number, message.id, now_ms())
        known = {number: timer.copies[0] for number, timer in enumerate(self.journal.timers) if timer.copies}
        expect(found == known, "each replica has the same", set(found.items()) ^ set(known.items()))
        self.journal.check()

    def counted(self) -> dict[str, int]:
        return self.journal.counts()


class Leaser(RemotingWorker):
    """Sends messages, takes them under leases, and acks most: the others come again."""

    def __init__(self, load: Load, rng: random.Random) -> None:
        super().__init__(load, rng)
        self._sent = 0
        self._stored: set[int] = set()
        self._refused: set[int] = set()
        self._asked: set[int] = set()
        """Numbers of which an ack was sent: they are finished, or are given again."""
        self._given: set[int] = set()
        self._is_over = False
        self._counts = dict.fromkeys(("leased", "leased again", "acked"), 0)

    def settled(self) -> bool:
        return self._is_over

    def step(self) -> bool:
        if not self.load.closing.is_set() and not self._send():
            return False
        answer = self._pop()
        if answer.code == Response.SUCCESS:
            return self._take(answer)
        if answer.code != Response.POLLING_TIMEOUT:
            return False
        self._is_over = self.load.closing.is_set() and self._stored <= self._asked and self._has_finished_all()
        return True

    def _call(self, code: int, fields: dict[str, str], body: bytes = b"") -> RemotingCommand:
        assert self.client is not None
        answer = self.client.call(code, fields, body)
        self.said = f"{code}: {answer.code} {answer.remark}"
        return answer

    def _send(self) -> bool:
        number, self._sent = self._sent, self._sent + 1
        header = send_header(LEASED, partition=self.rng.randrange(PARTITIONS))
        body = number.to_bytes(NUMBER_SIZE) + bytes(self.rng.choice((0, 100, 1000)))
        answer = self._call(Request.SEND_MESSAGE_V2, with_letters(encode_header(header)), body)
        if answer.code == Response.SUCCESS:
            self._stored.add(number)
        elif answer.code == Response.SERVICE_NOT_AVAILABLE and not in_doubt(answer.remark or ""):
            self._refused.add(number)
        return answer.code == Response.SUCCESS

    def _pop(self) -> RemotingCommand:
        header = PopMessage(LEASING, LEASED, Int32(ALL_QUEUES), Int32(AT_ONCE), INVISIBLE_MS, 0, Int32(FROM_FIRST))
        return self._call(Request.POP_MESSAGE, encode_header(header))

    def _take(self, answer: RemotingCommand) -> bool:
        found = records(answer)
        places = [(TopicPartition(record.topic, record.partition), record.queue_offset) for record in found]
        for record, receipt in zip(found, receipts_of(decode_header(PopAnswer, answer.fields), BROKER, places), strict=True):
            number = number_of(record.body)
            expect(number < self._sent and number not in self._refused, "nothing is given that was not taken", number)
            self._counts["leased again" if number in self._given else "leased"] += 1
            self._given.add(number)
            is_acked = self.load.closing.is_set() or self.rng.random() < 0.85
            if is_acked and not self._ack(number, receipt):
                return False
        return True

    def _ack(self, number: int, receipt: Receipt) -> bool:
        """Ack one; false when another replica should be asked."""
        self._asked.add(number)
        header = AckMessage(LEASING, LEASED, Int32(receipt.queue), str(receipt), receipt.offset)
        answer = self._call(Request.ACK_MESSAGE, encode_header(header))
        self._counts["acked"] += answer.code == Response.SUCCESS
        return answer.code in (Response.SUCCESS, Response.NO_MESSAGE)

    def _has_finished_all(self) -> bool:
        """Return whether the offsets of the group are at the ends of the partitions."""
        for partition in range(PARTITIONS):
            end = self._call(Request.GET_MAX_OFFSET, {"topic": LEASED, "queueId": str(partition)})
            place = {"consumerGroup": LEASING, "topic": LEASED, "queueId": str(partition)}
            if self._call(Request.QUERY_CONSUMER_OFFSET, place).fields.get("offset") != end.fields.get("offset"):
                return False
        return True

    def check(self, host: str, port: int) -> None:
        found = [number for _, _, number, _ in read(host, port, LEASED)]
        expect(len(found) == len(set(found)), "each is there once")
        expect(self._stored <= set(found), "what was acknowledged is there", self._stored - set(found))
        expect(not self._refused & set(found), "what was refused is not there", self._refused & set(found))
        expect(set(found) <= self._given, "all was given to the group", set(found) - self._given)

    def counted(self) -> dict[str, int]:
        return self._counts


class Repeater(RemotingWorker):
    """Sends messages with ids: those without an answer again until there is one, and some others, too."""

    most_unknown: ClassVar[int] = 20

    def __init__(self, load: Load, rng: random.Random) -> None:
        super().__init__(load, rng)
        self._next = 0
        self._unknown: list[int] = []
        self._places: dict[int, tuple[int, int, int]] = {}
        """Partition, ordinal and log offset of each that was answered."""
        self._again = 0

    def settled(self) -> bool:
        return not self._unknown or not self.load.closing.is_set()

    def step(self) -> bool:
        assert self.client is not None
        number = self._choose()
        header = send_header(ONCE, f"{UNIQUE_KEY}\x01id{number}\x02", partition=self.rng.randrange(PARTITIONS))
        answer = self.client.response(send(self.client, header, number.to_bytes(NUMBER_SIZE)))
        self.said = f"{answer.code} {answer.remark}"
        if answer.code != Response.SUCCESS:
            return False
        place = (int(answer.fields["queueId"]), int(answer.fields["queueOffset"]), self._log_offset(answer))
        before = self._places.setdefault(number, place)
        self._again += before is not place
        expect(before == place, "all answers to an id are equal", number, before, place)
        if number in self._unknown:
            self._unknown.remove(number)
        return True

    def _choose(self) -> int:
        """Return the number of the message that is sent next."""
        chance = self.rng.random()
        if self._unknown and (chance < 0.5 or len(self._unknown) > self.most_unknown or self.load.closing.is_set()):
            return self.rng.choice(self._unknown)
        if self._next and (chance < 0.7 or self.load.closing.is_set()):
            return self.rng.randrange(max(0, self._next - 100), self._next)
        self._unknown.append(self._next)
        self._next += 1
        return self._unknown[-1]

    @staticmethod
    def _log_offset(answer: RemotingCommand) -> int:
        return decode_offset_id(answer.fields["msgId"]).log_offset

    def check(self, host: str, port: int) -> None:
        found: dict[int, tuple[int, int, int]] = {}
        for partition, ordinal, number, message in read(host, port, ONCE):
            place = (partition.partition, ordinal, message.id & ((1 << OFFSET_BITS) - 1))
            expect(number not in found, "an id is stored once", number, found.get(number), place)
            found[number] = place
        wrong = {number: (place, found.get(number)) for number, place in self._places.items() if found.get(number) != place}
        expect(not wrong, "each id is where its answers say", wrong)

    def counted(self) -> dict[str, int]:
        return {"ids": len(self._places), "ids answered again": self._again}


PROMISED: Final = (Delayer, Leaser, Repeater)
"""One of each."""
