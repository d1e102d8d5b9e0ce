"""The ids of messages in the log: what a record says of an id, and the keys and values of the index.

The id of a message is its property ``DEDUPE_ID``, else ``UNIQ_KEY``. A message that waits for its time or for a decision has
its id in the record that waits (REAL_TOPIC names its topic). The copies that the broker makes of it later do not count, so
neither does a message that a client got as such a copy and sends again. The record of its cancel or rollback *releases* the id,
as if it had never come: it has both properties, too, and STORED_MS.

A key names a *generation*: its length is the window of the topic, and it is over one window after its end. So an id is known
for one window at least and two at most, whatever the windows of other topics, and all ids that are over are one range::

    G over (8) name    → kind (1), partition (4), ordinal (8), log offset (8), detail (8)

    over      when the generation is over, in Unix milliseconds
    name      topic 00 id; if that is longer than 128 bytes, 00 and its SHA-256
    detail    of a plain message its text position; of one that is delayed to a time that time; otherwise 0
"""

import enum
import struct
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from librt.strings import BytesWriter, write_i32_be, write_i64_be

from metaq.message import HALF_OP_TOPIC, HALF_TOPIC, SCHEDULE_TOPIC, TIMERS_TOPIC
from metaq.protocol import properties
from metaq.protocol.properties import COPIED, DEDUPE_ID, UNIQUE_KEY
from metaq.protocol.record import decode_record, identity

GENERATION: Final = b"G"
INTERNAL: Final = frozenset((HALF_TOPIC, HALF_OP_TOPIC, SCHEDULE_TOPIC, TIMERS_TOPIC))
"""Topics whose records are messages of other topics, or say what became of them."""
STORED: Final = "STORED_MS"
"""The property of a cancel or rollback that says when the message was first stored: its id is known by that time."""
LONGEST_NAME: Final = 128
_OVER: Final = struct.Struct(">cQ")
_VALUE: Final = struct.Struct(">Biqqq")
_NAMED, _UNIQUE = f"\x02{DEDUPE_ID}\x01", f"\x02{UNIQUE_KEY}\x01"
_COPIED: Final = tuple(f"\x02{name}\x01" for name in COPIED)


class StoredAs(enum.IntEnum):
    """The form in which a message was stored."""

    PLAIN = 0
    HALF = 1
    """It waits for a decision."""
    TIMER = 2
    """It waits for a time."""
    LEVEL = 3
    """It waits for a delay level."""
    RELEASED = 4
    """It was cancelled or rolled back: the next message with its id is stored."""


class First(NamedTuple):
    """The message that was stored first under an id, as its sender was answered."""

    kind: int
    partition: int
    """The partition that it was sent to."""
    ordinal: int
    log_offset: int
    detail: int


RELEASED: Final = First(StoredAs.RELEASED, 0, 0, 0, 0)


class SeenId(NamedTuple):
    """An id in the log."""

    topic: str
    ident: str
    store_ms: int
    first: First
    end: int
    """The log offset after the record."""


def id_of(pairs: Mapping[str, str]) -> str | None:
    """Return the id in the properties of a message; ``None`` when it has none, or does not count."""
    if any(name in pairs for name in COPIED):
        return None
    return pairs.get(DEDUPE_ID) or pairs.get(UNIQUE_KEY)


def id_in(text: str) -> str | None:
    """Return the id in properties as they are sent, ``name 01 value 02``."""
    marked = f"\x02{text}\x02"
    if _COPIED[0] in marked or _COPIED[1] in marked:
        return None
    return _last(marked, _NAMED) or _last(marked, _UNIQUE)


def _last(marked: str, name: str) -> str | None:
    at = marked.rfind(name)
    if at < 0:
        return None
    at += len(name)
    return marked[at : marked.index("\x02", at)] or None


def over_ms(now_ms: int, window_ms: int) -> int:
    """Return when the generation of a time is over."""
    return (now_ms // window_ms + 2) * window_ms


def name_of(topic: str, ident: str) -> bytes:
    """Return what a key has of an id. To hash each would cost more than to keep it: most have 32 or 36 characters."""
    name = f"{topic}\0{ident}".encode()
    return name if len(name) <= LONGEST_NAME else b"\0" + sha256(name).digest()


def generation_of(over: int) -> bytes:
    """Return the beginning of the keys of a generation, which the name follows."""
    return _OVER.pack(GENERATION, over)


def end_of_range(now_ms: int) -> bytes:
    """Return the key before which all generations are over."""
    return _OVER.pack(GENERATION, now_ms + 1)


def latest_of(found: Sequence[First]) -> First | None:
    """Return what an id is known as that was found under these keys, the newest first.

    It is not released if there is a message: that may have come later all the same, with a clock that was set back.
    """
    return next((first for first in found if first.kind != StoredAs.RELEASED), found[0] if found else None)


def properties_of_release(topic: str, ident: str, stored_ms: int) -> dict[str, str]:
    """Return the properties by which a record releases the id of a message that was first stored at a time."""
    return {properties.REAL_TOPIC: topic, DEDUPE_ID: ident, STORED: str(stored_ms)}


def value_of(first: First) -> bytes:
    """Return a message as the index keeps it."""
    kind, partition, ordinal, log_offset, detail = first
    return pack_first(kind, partition, ordinal, log_offset, detail)


def pack_first(kind: int, partition: int, ordinal: int, log_offset: int, detail: int) -> bytes:
    """Return what ``value_of`` does for a ``First`` with these fields."""
    value = BytesWriter()
    value.append(kind)
    write_i32_be(value, partition)
    write_i64_be(value, ordinal)
    write_i64_be(value, log_offset)
    write_i64_be(value, detail)
    return value.getvalue()


def read_value(value: bytes) -> First:
    """Return the message in a value of the index."""
    return First(*_VALUE.unpack(value))


def topic_in(data: memoryview) -> str:
    """Return the topic of a record."""
    return identity(data).topic


def seen_in(data: memoryview, log_offset: int) -> SeenId | None:
    """Return the id in an intact record; ``None`` when it has none that counts."""
    record = decode_record(data)
    pairs = properties.parse(record.properties.decode(errors="replace"))
    ident = None if any(name in pairs for name in properties.OWN) else id_of(pairs)
    if ident is None:
        return None
    topic, partition, end = record.topic, record.partition, log_offset + record.size
    if topic not in INTERNAL:
        first = First(StoredAs.PLAIN, partition, record.queue_offset, log_offset, record.text_position)
        return SeenId(topic, ident, record.store_ms, first, end)
    name, number = pairs.get(properties.REAL_TOPIC), int(pairs.get(properties.REAL_QUEUE, "0"))
    if name is None:
        return None
    if topic == TIMERS_TOPIC and properties.TIMER_OUT in pairs:
        first = First(StoredAs.TIMER, number, 0, log_offset, int(pairs[properties.TIMER_OUT]))
    elif topic in (HALF_OP_TOPIC, TIMERS_TOPIC):
        return SeenId(name, ident, int(pairs[STORED]), RELEASED, end)
    else:
        first = First(StoredAs.HALF if topic == HALF_TOPIC else StoredAs.LEVEL, number, record.queue_offset, log_offset, 0)
    return SeenId(name, ident, record.store_ms, first, end)
