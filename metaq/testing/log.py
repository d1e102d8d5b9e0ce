"""Topics in memory: records as a broker would store them, and delayed messages that wait until they are due."""

import itertools
import secrets
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from metaq.checksum import crc32
from metaq.client.connecting.transport import ClientAnswer
from metaq.client.consuming.records import decode_messages
from metaq.client.message import ReceivedMessage
from metaq.client.retries import LEVELS_S
from metaq.errors import BadRequest, TimerDelivered, UnknownTimer, UnknownTopic
from metaq.message import LogOffset
from metaq.protocol import properties as names
from metaq.protocol.delays import due_of
from metaq.protocol.ids import OffsetId, encode_offset_id
from metaq.protocol.priority import one_level
from metaq.protocol.record import FIXED_SIZE, HEADER, MAGIC
from metaq.protocol.remoting.attributes import MESSAGE_TYPE, PRIORITY_TYPE, TOPIC_ATTRIBUTES, changed, read_changes
from metaq.protocol.remoting.recall import RecallHandle, encode_recall
from metaq.protocol.remoting.routes import TopicConfig
from metaq.protocol.sql92 import compile_expression
from metaq.protocol.subscription import ExpressionKind, Subscription
from metaq.timers.handles import Handle, Handles
from metaq.timers.records import key_of

BROKER_NAME: Final = "memory"
HOST: Final = "127.0.0.1"
PORT: Final = 1
ADDRESS: Final = f"{HOST}:{PORT}"
_HOST: Final = struct.pack(">4Bi", 127, 0, 0, 1, PORT)


class Letter(NamedTuple):
    """A message on its way into a topic."""

    topic: str
    partition: int
    body: bytes
    properties: dict[str, str]
    flag: int = 0
    sys_flag: int = 0
    born_ms: int = 0
    reconsume_times: int = 0


class LogPlace(NamedTuple):
    """The place of a message that was stored."""

    offset_id: str
    queue_offset: int
    handle: Handle | None = None
    """The handle that cancels it, if it is delayed to a time of its own."""


class Answered(NamedTuple):
    """The answer to a message with an id."""

    answer: ClientAnswer
    waits: bool
    """True if it was delayed: then its id stays known when its topic is deleted, as a new topic of the name may get it."""


class Partition:
    """The records of a partition. Those of a topic that was deleted and made again go on after the queue offsets of before."""

    def __init__(self, first: int) -> None:
        self.first = first
        """The queue offset of the first record."""
        self.records: list[bytes] = []

    @property
    def end(self) -> int:
        """The queue offset of the record that comes next."""
        return self.first + len(self.records)

    def record(self, queue_offset: int) -> bytes:
        """Return the record at a queue offset, which must be there."""
        return self.records[queue_offset - self.first]

    def since(self, queue_offset: int) -> list[bytes]:
        """Return the records from a queue offset on, which is not before the first."""
        return self.records[queue_offset - self.first :]


class _Parked(NamedTuple):
    """A message that waits; they sort in the order in which they are delivered."""

    due_ms: int
    number: int
    moved_ms: int
    """How far ``advance`` has moved the clock, in milliseconds since the start, when it is due."""
    letter: Letter


class Log:
    """All messages of an in-memory broker. Not thread-safe."""

    def __init__(self) -> None:
        self.topics: dict[str, list[Partition]] = {}
        self._deleted: dict[str, list[int]] = {}
        """The ends of the partitions of deleted topics, where new topics of their names go on."""
        self._attributes: dict[str, dict[str, str]] = {}
        self._records: dict[int, bytes] = {}
        self.answers: dict[tuple[str, str], Answered] = {}
        """The answers to messages with ids, by topic and id: every topic has a window without end."""
        self._end = 0
        self._advanced_s = 0.0
        self._parked: list[_Parked] = []
        self._cancelled: set[int] = set()
        """The numbers of parked messages that were cancelled."""
        self._handles = Handles(secrets.token_bytes())
        self._sequence = itertools.count()

    def now_ms(self) -> int:
        """Return the machine's time plus the time that ``advance`` has added, in milliseconds since 1970."""
        return time.time_ns() // 1_000_000 + self.moved_ms

    @property
    def moved_ms(self) -> int:
        """How far ``advance`` has moved the clock, in milliseconds."""
        return round(self._advanced_s * 1000)

    def create(self, topic: str, partitions: int) -> None:
        """Make sure that a topic has at least ``partitions`` partitions; none are taken away."""
        known, ends = self.topics.setdefault(topic, []), self._deleted.get(topic, [])
        known += [Partition(ends[number] if number < len(ends) else 0) for number in range(len(known), partitions)]

    def change_attributes(self, topic: str, changes: str) -> None:
        """Change the attributes of a topic as the header of 17 asks for it; ``BadRequest`` when it may not."""
        self._attributes[topic] = changed(TOPIC_ATTRIBUTES, self._attributes.get(topic, {}), read_changes(changes))

    def config_of(self, topic: str) -> TopicConfig | None:
        """Return the configuration of a topic; ``None`` when there is none of this name."""
        known = self.topics.get(topic)
        return None if known is None else TopicConfig(topic, len(known), len(known), attributes=self._attributes.get(topic, {}))

    def delete(self, topic: str) -> None:
        """Forget a topic with its messages."""
        ends = [partition.end for partition in self.topics.pop(topic, [])]
        self._deleted[topic] = ends + self._deleted.get(topic, [])[len(ends) :]
        self._attributes.pop(topic, None)
        self.answers = {once: known for once, known in self.answers.items() if once[0] != topic or known.waits}

    def has_priorities(self, topic: str) -> bool:
        """Return whether the partitions of a topic are the levels of its messages."""
        return self._attributes.get(topic, {}).get(MESSAGE_TYPE) == PRIORITY_TYPE

    def prioritized(self, letters: list[Letter]) -> list[Letter]:
        """Return messages sent together with the partition of their priority, if their topic has priorities.

        ``MessageIllegal`` when it is no number, or when they have several.
        """
        topic, asked = letters[0].topic, letters[0].partition
        if not self.has_priorities(topic):
            return letters
        partition = one_level([letter.properties for letter in letters], len(self.topics[topic]), asked)
        return [letter._replace(partition=partition) for letter in letters]

    def put(self, letter: Letter) -> LogPlace:
        """Store a message, or park it when it is delayed. ``MessageIllegal`` for a time that is not a number."""
        now_ms, level = self.now_ms(), letter.properties.get(names.DELAY, "")
        if level.isdecimal() and int(level) > 0:
            due_ms = now_ms + LEVELS_S[min(int(level), len(LEVELS_S)) - 1] * 1000
            kept = {name: value for name, value in letter.properties.items() if name not in (names.DELAY, *names.TIMERS)}
            self._park(letter._replace(properties=kept), now_ms, due_ms)
            return LogPlace(_offset_id(self._end), 0)
        wanted_ms = due_of(letter.properties, now_ms)
        if wanted_ms is None:
            return self._append(letter)
        letter = letter._replace(properties=letter.properties | {names.TIMER_OUT: str(wanted_ms)})
        if wanted_ms <= now_ms:
            return self._append(letter)
        number = self._park(letter, now_ms, wanted_ms)
        return LogPlace(_offset_id(self._end), 0, self._handles.of(key_of(wanted_ms, number)))

    def _park(self, letter: Letter, now_ms: int, due_ms: int) -> int:
        number = next(self._sequence)
        self._parked.append(_Parked(due_ms, number, self.moved_ms + due_ms - now_ms, letter))
        return number

    def cancel(self, handle: Handle, topic: str) -> None:
        """Cancel a parked message, and forget its id. ``TimerDelivered``, ``UnknownTimer``."""
        if not self._handles.is_genuine(handle):
            raise UnknownTimer("the handle is not of this broker")
        if any(parked.number == handle.ident and parked.letter.topic != topic for parked in self._parked):
            raise UnknownTimer(f"the handle is not of a message of the topic {topic}")
        found = [parked for parked in self._parked if parked.number == handle.ident]
        if not found and handle.ident not in self._cancelled:
            raise TimerDelivered(f"the message {handle.ident} was delivered at its time")
        for parked in found:
            self._cancelled.add(parked.number)
            self._parked.remove(parked)
            self.answers.pop(once_of(parked.letter), None)

    def advance(self, seconds: float) -> None:
        """Move the clock forward, and store the parked messages that are due by then, in the order in which they are due.

        Those of deleted topics are dropped.
        """
        self._advanced_s += seconds
        due = sorted(parked for parked in self._parked if parked.moved_ms <= self.moved_ms)
        self._parked = [parked for parked in self._parked if parked.moved_ms > self.moved_ms]
        for letter in filter(None, [self.unparked(parked.letter) for parked in due]):
            self._append(letter)

    def unparked(self, letter: Letter) -> Letter | None:
        """Return a message that has waited, for a partition that its topic has now; ``None`` when the topic was deleted."""
        known = self.topics.get(letter.topic)
        if known is None:
            return None if letter.topic in self._deleted else letter
        return letter._replace(partition=letter.partition % len(known))

    @property
    def parked(self) -> int:
        """The number of messages that wait until they are due."""
        return len(self._parked)

    def _append(self, letter: Letter) -> LogPlace:
        self.create(letter.topic, letter.partition + 1)
        partition = self.topics[letter.topic][letter.partition]
        placed = LogPlace(_offset_id(self._end), partition.end)
        record = self.encode(letter, placed.queue_offset, self._end)
        partition.records.append(record)
        self._records[self._end] = record
        self._end += len(record)
        return placed

    def encode(self, letter: Letter, queue_offset: int, log_offset: int) -> bytes:
        """Return the record of a message that is stored now, at these offsets."""
        pairs = b"".join(f"{name}\x01{value}\x02".encode() for name, value in letter.properties.items())
        topic = letter.topic.encode()
        head = HEADER.pack(
            FIXED_SIZE + len(letter.body) + len(topic) + len(pairs),
            MAGIC,
            crc32(letter.body) & 0x7FFFFFFF,
            letter.partition,
            letter.flag,
            queue_offset,
            log_offset,
            letter.sys_flag,
            letter.born_ms,
            _HOST,
            self.now_ms(),
            _HOST,
            letter.reconsume_times,
            0,
            len(letter.body),
        )
        return b"%b%b%b%b%b%b" % (head, letter.body, bytes((len(topic),)), topic, struct.pack(">h", len(pairs)), pairs)

    def record_at(self, log_offset: int) -> bytes | None:
        """Return the record at a log offset; ``None`` when none begins there."""
        return self._records.get(log_offset)

    def partitions(self, topic: str) -> list[Partition]:
        """Return the partitions of a topic; ``UnknownTopic`` when there is none of this name."""
        if topic not in self.topics:
            raise UnknownTopic(f"the topic {topic} does not exist")
        return self.topics[topic]

    def partition(self, topic: str, number: int) -> Partition:
        """Return a partition. ``UnknownTopic``, ``BadRequest`` when there is none of this number."""
        known = self.partitions(topic)
        if not 0 <= number < len(known):
            raise BadRequest(f"topic {topic} has {len(known)} partitions, and {number} is not one of them")
        return known[number]

    def messages(self, topic: str) -> list[ReceivedMessage]:
        """Return all messages of a topic in the order in which they were stored."""
        found = [decode(record) for partition in self.topics.get(topic, ()) for record in partition.records]
        return sorted(found, key=lambda message: message.log_offset)

    def first_since(self, topic: str, number: int, time_ms: int) -> int:
        """Return the queue offset of the first message stored at ``time_ms`` or later; the end offset when there is none."""
        partition = self.partition(topic, number)
        stored = map(decode, partition.records)
        return next((message.queue_offset for message in stored if message.store_ms >= time_ms), partition.end)


def decode(record: bytes) -> ReceivedMessage:
    """Decode a record to its message."""
    return decode_messages(record, BROKER_NAME, damaged_too=True)[0]


def chooser(subscription: Subscription) -> Callable[[ReceivedMessage], bool]:
    """Return a function that says whether a subscription wants a message."""
    if subscription.kind is ExpressionKind.SQL92:
        matches = compile_expression(subscription.expression)
        return lambda message: matches(message.properties)
    return lambda message: subscription.matches_tag(message.tag)


def once_of(letter: Letter) -> tuple[str, str]:
    """Return the topic and the id of a message, of which one is stored; the id is empty if it has none."""
    return letter.topic, letter.properties.get(names.DEDUPE_ID, "")


def _offset_id(log_offset: int) -> str:
    return encode_offset_id(OffsetId(HOST, PORT, LogOffset(log_offset)))


def answer_of(letter: Letter, placed: Sequence[LogPlace]) -> ClientAnswer:
    """Return the answer to a message, or to a batch that begins with it, which is stored at these places."""
    fields = {
        "msgId": ",".join(place.offset_id for place in placed),
        "queueId": str(letter.partition),
        "queueOffset": str(placed[0].queue_offset),
    }
    if (handle := placed[0].handle) is not None:
        key = letter.properties.get(names.UNIQUE_KEY, "")
        fields["recallHandle"] = encode_recall(RecallHandle(letter.topic, BROKER_NAME, handle.due_ms, key, str(handle)))
    return ClientAnswer(fields=fields)
