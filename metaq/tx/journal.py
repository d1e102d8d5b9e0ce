"""The records of transactions in the log: marks, and messages parked until their branch is decided.

Both are ordinary records of the internal topic ``METAQ_SYS_TRANSACTIONS``. Partition 0 holds the marks, whose bodies are JSON::

    {"do":"prepare","key":"XID:1:0a:0b:app","messages":2,"bytes":310,     after it, in its group: the messages, parked
     "topics":["orders"]}
    {"do":"prepare", …, "since_ms":1700000000000}                         again, when its segment is to be deleted
    {"do":"commit","key":"XID:1:0a:0b:app","messages":2}                  after it, in its group: the messages
    {"do":"rollback","key":"XID:1:0a:0b:app"}
    {"do":"heuristic","key":"XID:1:0a:0b:app","outcome":"commit",         after it, when it commits: the messages
     "topics":["orders"]}
    {"do":"forget","key":"XID:1:0a:0b:app"}

Each mark also has "ids": how far the text ids of messages without a place have been given out.

Partition 1 holds the parked messages in their final form, with their topic and partition in the properties REAL_TOPIC and
REAL_QID. Recovery keeps all or none of a mark and the records of its group (``metaq.store.recordgroups``). So the marks alone,
in their order, say which branches are undecided.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

import orjson

from metaq.checksum import crc32
from metaq.errors import CorruptRecord
from metaq.message import TRANSACTIONS_TOPIC
from metaq.protocol.properties import MESSAGE_ID, REAL_QUEUE, REAL_TOPIC
from metaq.protocol.record import (
    BLANK,
    BLANK_MAGIC,
    BLANK_SIZE,
    TAGS,
    Record,
    constant_middle,
    decode_properties,
    decode_record,
    encode_properties,
    is_intact,
    java_hash,
    longer_tail,
    store_ms,
)
from metaq.protocol.text.messages import HEADER_SIZE_TEXT, Stored
from metaq.store.files.filecache import Read, read_around
from metaq.store.log.commitlog import CommitLog
from metaq.store.log.segments import SMALLEST_RECORD
from metaq.store.messagestore import MessageStore
from metaq.store.newrecord import Fields, NewRecord
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.store.recordgroups import group_end

MARKS, PARKED = 0, 1
"""Partitions of the topic."""
_ID: Final = MESSAGE_ID.encode() + b"\x01"
"""Stands before the id, the last property except for the checksum."""
PARKED_GROWTH: Final = 600
"""The most bytes that a parked message takes in addition to its body and its tag."""


class Held(NamedTuple):
    """A message of a branch, as it was put."""

    queue: ConsumeQueue
    flag: int
    payload: bytes
    crc: int
    """The CRC of the payload."""
    attribute: str | None
    message_id: int
    born_ms: int
    born_host: bytes

    @property
    def size(self) -> int:
        """The size in bytes that the limits of branches count."""
        return len(self.payload) + PARKED_GROWTH + (len(self.attribute.encode()) if self.attribute else 0)


class Prepared(NamedTuple):
    """A prepared branch."""

    since_ms: int
    """When it was prepared."""
    messages: int
    size: int
    """The size of the messages in bytes, as the limits of branches count it."""


class Journal:
    """The records of transactions in one store: it makes and reads them."""

    def __init__(self, store: MessageStore, store_host: bytes) -> None:
        """Use ``store``; ``store_host`` is the broker's address in the form of records."""
        self._store = store
        self._host = store_host

    # -- making -------------------------------------------------------------------------------------------------------

    def mark(self, content: dict[str, Any], ids: int) -> NewRecord:
        """Return a mark, to be staged, with the next id: whatever the clock says, ids in the log are not given out again."""
        now_ms = self._store.clock.now_ms()
        body = orjson.dumps({**content, "ids": ids})
        middle = constant_middle(0, now_ms, self._host, now_ms, self._host)
        return NewRecord(
            queue=self._queues[MARKS],
            flag=0,
            body=body,
            crc=crc32(body) & 0x7FFFFFFF,
            middle=middle,
            text_size=HEADER_SIZE_TEXT + len(body),
        )

    def parked(self, messages: Sequence[Held]) -> list[Fields]:
        """Return records of messages, to be parked until the branch is decided."""
        return self._records(messages, self._queues[PARKED])

    def real(self, messages: Sequence[Held]) -> list[Fields]:
        """Return records of messages, to be stored in their own partitions."""
        return self._records(messages, None)

    @cached_property
    def _queues(self) -> tuple[ConsumeQueue, ConsumeQueue]:
        """The two partitions, made with the first transaction: a broker without transactions does not show the topic."""
        return self._store.queue(TRANSACTIONS_TOPIC, MARKS), self._store.queue(TRANSACTIONS_TOPIC, PARKED)

    def _records(self, messages: Sequence[Held], park: ConsumeQueue | None) -> list[Fields]:
        now_ms, host = self._store.clock.now_ms(), self._host
        made: list[Fields] = []
        # from the previous message, since the next one usually shares them
        born, host_before, middle, real, width, tail = 0, b"", b"", None, 0, b""
        for queue, flag, payload, crc, attribute, message_id, born_ms, born_host in messages:
            if born_ms != born or born_host != host_before:
                born, host_before = born_ms, born_host
                middle = constant_middle(0, born_ms, born_host, now_ms, host)
            last = b"%d\x02" % message_id
            # a tail holds the length of the properties, so it fits all ids of the same width
            if queue is not real or len(last) != width:
                real, width, target = queue, len(last), park or queue
                properties = _properties(queue, park is not None)
                tail = longer_tail(target.tail, properties + last)[:-width]
            # in the order of NewRecord
            if attribute is None:
                made.append((target, flag, payload, crc, middle, HEADER_SIZE_TEXT + len(payload), tail + last, 0, ()))
            else:
                own = encode_properties(((TAGS, attribute),)) + _properties(queue, park is not None) + last
                size = HEADER_SIZE_TEXT + len(payload) + 4 + len(attribute.encode())
                made.append((target, flag, payload, crc, middle, size, longer_tail(target.tail, own), java_hash(attribute), ()))
        return made

    # -- reading ------------------------------------------------------------------------------------------------------

    def messages(self, place: int, read: Read) -> list[Held]:
        """Return the messages of the branch whose prepare mark is at the log offset ``place``.

        ``CorruptRecord`` when the mark or a message is damaged; ``read`` may raise ``ColdRead``.
        """
        stored = self._prepare_mark(place, read)
        count = content_of(stored)["messages"]
        end = group_end(stored)
        at = place + stored.size
        found = [] if end is None else [self._held(record) for record in _records(self._store.log, at, end, read)]
        if len(found) != count:
            raise CorruptRecord(
                f"only {len(found)} of {count} messages prepared at log offset {place} are left; run metaq verify"
            )
        return found

    def _held(self, record: Record) -> Held:
        pairs = decode_properties(record.properties)
        queue = self._store.queue(pairs[REAL_TOPIC], int(pairs[REAL_QUEUE]))
        return Held(
            queue=queue,
            flag=record.flag,
            payload=bytes(record.body),
            crc=record.body_crc,
            attribute=pairs.get(TAGS),
            message_id=int(pairs[MESSAGE_ID]),
            born_ms=record.born_ms,
            born_host=record.born_host,
        )

    def prepared(self, place: int, read: Read) -> Prepared:
        """Return what the prepare mark at the log offset ``place`` says; ``CorruptRecord`` when it is damaged."""
        stored = self._prepare_mark(place, read)
        content = content_of(stored)
        since_ms = content.get("since_ms") or store_ms(stored.buffer[stored.at : stored.at + stored.size])
        return Prepared(since_ms, content["messages"], content["bytes"])

    def _prepare_mark(self, place: int, read: Read) -> Stored:
        stored = self._store.log.record_at(place, read)
        if stored is None:
            raise CorruptRecord(f"the prepare mark at log offset {place} is damaged; run metaq verify")
        return stored


def _properties(queue: ConsumeQueue, parked: bool) -> bytes:
    """Return the properties of a message that goes to ``queue`` and has no attribute, up to the id, which the caller adds."""
    places = ((REAL_TOPIC, queue.topic), (REAL_QUEUE, str(queue.partition))) if parked else ()
    return encode_properties(places) + _ID


def content_of(stored: Stored) -> dict[str, Any]:
    """Return the content of a mark."""
    content: dict[str, Any] = orjson.loads(decode_record(stored.buffer[stored.at : stored.at + stored.size]).body)
    return content


def _records(log: CommitLog, at: int, end: int, read: Read) -> Iterator[Record]:
    """Yield the intact records between two log offsets, up to the first damaged one. They lie in at most two segments."""
    while at < end:
        segment = log.find(at)
        if segment is None:
            return
        size = min(end, segment.end) - at
        data = memoryview(read_around(read, log.file(segment), size, at - segment.base))
        base, at = at, segment.end
        while len(data) >= BLANK_SIZE:
            length, magic = BLANK.unpack_from(data)
            if magic == BLANK_MAGIC:
                break
            if not SMALLEST_RECORD <= length <= len(data) or not is_intact(data[:length], base):
                return
            yield decode_record(data[:length])
            data, base = data[length:], base + length
