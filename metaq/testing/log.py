"""Topics in memory: records as a broker would store them, and delayed messages that wait until they are due."""

import heapq
import itertools
import struct
import time
import zlib
from typing import Final, NamedTuple

from metaq.client.consuming.records import decode_messages
from metaq.client.message import ReceivedMessage
from metaq.message import LogOffset
from metaq.protocol import properties as names
from metaq.protocol.ids import OffsetId, encode_offset_id
from metaq.protocol.record import FIXED_SIZE, HEADER, MAGIC

BROKER_NAME: Final = "memory"
HOST: Final = "127.0.0.1"
PORT: Final = 1
ADDRESS: Final = f"{HOST}:{PORT}"
_HOST: Final = struct.pack(">4Bi", 127, 0, 0, 1, PORT)
DELAYS_S: Final = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""The delays of levels 1 to 18."""


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


class Log:
    """All messages of an in-memory broker. Not thread-safe."""

    def __init__(self) -> None:
        self.topics: dict[str, list[list[bytes]]] = {}
        """Records by topic, partition and queue offset."""
        self._records: dict[int, bytes] = {}
        self._end = 0
        self._advanced_s = 0.0
        self._parked: list[tuple[float, int, Letter]] = []
        self._sequence = itertools.count()

    def now_ms(self) -> int:
        """Return the machine's time plus the time that ``advance`` has added, in milliseconds since 1970."""
        return time.time_ns() // 1_000_000 + round(self._advanced_s * 1000)

    def create(self, topic: str, partitions: int) -> None:
        """Make sure that a topic has at least ``partitions`` partitions; none are taken away."""
        rows = self.topics.setdefault(topic, [])
        rows += [[] for _ in range(partitions - len(rows))]

    def put(self, letter: Letter) -> LogPlace:
        """Store a message, or park it when it has a delay level."""
        level = letter.properties.get(names.DELAY, "")
        if level.isdecimal() and int(level) > 0:
            delay = DELAYS_S[min(int(level), len(DELAYS_S)) - 1]
            kept = {name: value for name, value in letter.properties.items() if name != names.DELAY}
            due = self._advanced_s + delay
            heapq.heappush(self._parked, (due, next(self._sequence), letter._replace(properties=kept)))
            return LogPlace(_offset_id(self._end), 0)
        return self._append(letter)

    def advance(self, seconds: float) -> None:
        """Move the clock forward, and store the parked messages that are due by then, in the order in which they are due."""
        self._advanced_s += seconds
        while self._parked and self._parked[0][0] <= self._advanced_s:
            self._append(heapq.heappop(self._parked)[2])

    @property
    def parked(self) -> int:
        """The number of messages that wait until they are due."""
        return len(self._parked)

    def _append(self, letter: Letter) -> LogPlace:
        self.create(letter.topic, letter.partition + 1)
        rows = self.topics[letter.topic][letter.partition]
        record = self.encode(letter, len(rows), self._end)
        rows.append(record)
        self._records[self._end] = record
        placed = LogPlace(_offset_id(self._end), len(rows) - 1)
        self._end += len(record)
        return placed

    def encode(self, letter: Letter, queue_offset: int, log_offset: int) -> bytes:
        """Return the record of a message that is stored now, at these offsets."""
        pairs = b"".join(f"{name}\x01{value}\x02".encode() for name, value in letter.properties.items())
        topic = letter.topic.encode()
        head = HEADER.pack(
            FIXED_SIZE + len(letter.body) + len(topic) + len(pairs),
            MAGIC,
            zlib.crc32(letter.body) & 0x7FFFFFFF,
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

    def messages(self, topic: str) -> list[ReceivedMessage]:
        """Return all messages of a topic in the order in which they were stored."""
        rows = itertools.chain.from_iterable(self.topics.get(topic, ()))
        found = [decode(row) for row in rows]
        return sorted(found, key=lambda message: message.log_offset)

    def first_since(self, topic: str, partition: int, time_ms: int) -> int:
        """Return the queue offset of the first message stored at ``time_ms`` or later; the end offset when there is none."""
        rows = self.topics[topic][partition]
        return next((place for place, row in enumerate(rows) if decode(row).store_ms >= time_ms), len(rows))


def decode(record: bytes) -> ReceivedMessage:
    """Decode a record to its message."""
    return decode_messages(record, BROKER_NAME, damaged_too=True)[0]


def _offset_id(log_offset: int) -> str:
    return encode_offset_id(OffsetId(HOST, PORT, LogOffset(log_offset)))
