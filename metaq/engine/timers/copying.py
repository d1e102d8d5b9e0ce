"""The copies that consumers get of parked messages.

::

    park    … TIMER_OUT_MS 01 due 02  REAL_TOPIC 01 topic 02 REAL_QID 01 partition 02
    copy    … TIMER_OUT_MS 01 due 02  TIMER_ENQUEUE_MS 01 stored 02 TIMER_DEQUEUE_MS 01 now 02

Of most parks the copy is made from their bytes, and the end of the properties says by itself where it goes. The others are
taken apart: those of recurring messages, those that were stored again, and those of topics with priorities.
"""

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from librt.strings import read_i32_be

from metaq.engine.context import Context
from metaq.engine.priorities.levels import partition_of_copy
from metaq.engine.writing import again, new_record
from metaq.errors import MetaqError
from metaq.protocol import properties
from metaq.protocol.keys import keys_of
from metaq.protocol.record import (
    CHECKSUM_SIZE,
    HEADER_SIZE,
    MIDDLE_SIZE,
    TAGS,
    Record,
    constant_middle,
    decode_properties,
    decode_record,
    java_hash,
    longer_tail,
)
from metaq.protocol.text.messages import HEADER_SIZE_TEXT, Stored
from metaq.store.newrecord import Fields
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.timers.records import LENGTH_AT, PROPERTIES_AT

OnDrop = Callable[[int, str], None]
"""Report that the message parked at a log offset is dropped, and why."""

_CRC_AT: Final = 8
_FLAG_AT: Final = 16
_MIDDLE_AT: Final = 36
"""Places in a record's header."""
_MIDDLE: Final = struct.Struct(">iq8sq8si")
"""The part from the system flag to the retries (``constant_middle``)."""
_PLACE: Final = f"{properties.REAL_TOPIC}\x01".encode()
_NO_PLACE: Final = b"\xff"
"""The end of no park."""
_PLACE_VALUES: Final = f"{properties.REAL_TOPIC}\x01%s\x02{properties.REAL_QUEUE}\x01%d\x02"
_TIMES: Final = f"{properties.TIMER_ENQUEUE}\x01%d\x02{properties.TIMER_DEQUEUE}\x01%d\x02".encode()
_UNUSUAL: Final = (b"METAQ_", b"QUEUE_MS\x01", _PLACE)
"""What the properties of a park have before its place when it has to be taken apart."""
_LOOKED_UP: Final = (b"TAGS\x01", b"KEYS\x01", b"UNIQ_KEY\x01")

assert _MIDDLE.size == MIDDLE_SIZE


class CopiesTo(NamedTuple):
    """Where the copies of parks go that end alike."""

    topic: str
    queue: ConsumeQueue


class Copying:
    """The copies of one round: what is known of topics holds until something else may run."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._targets: dict[bytes, CopiesTo | None] = {}
        self._now_ms = context.store.clock.now_ms()
        # of the park before: many that follow each other go to the same place, and were stored in the same millisecond
        self._place = _NO_PLACE
        self._target: CopiesTo | None = None
        self._head = self._middle = self._times = b""

    def copy(self, park: Stored, on_drop: OnDrop) -> list[Fields]:
        """Return the copy that consumers get; nothing when its topic was deleted or it cannot be stored, which is reported."""
        buffer, at, size, _ = park  # cheaper than by name
        data = bytes(buffer[at : at + size])
        copied = self._quick_copy(data)
        return self.copy_apart(decode_record(data), on_drop) if copied is None else [copied]

    def _quick_copy(self, data: bytes) -> Fields | None:
        """Return the copy of a park whose place is known from its last bytes; ``None`` when it has to be taken apart."""
        crc: int = read_i32_be(data, _CRC_AT)
        flag: int = read_i32_be(data, _FLAG_AT)
        length: int = read_i32_be(data, LENGTH_AT)
        body_end = HEADER_SIZE + length
        text_at, text_end = body_end + PROPERTIES_AT, len(data) - CHECKSUM_SIZE
        at = text_end - len(self._place)
        if at < text_at or data[at:text_end] != self._place:
            at = data.rfind(_PLACE, text_at, text_end)
            if at < 0:
                return None
            self._go_to(data[at:text_end])
        target, text = self._target, data[text_at:at]
        if target is None or _has_any(text, _UNUSUAL):
            return None
        tag, tag_size, keys = 0, 0, tuple[str, ...]()
        if _has_any(text, _LOOKED_UP):
            name = decode_properties(text).get(TAGS)
            if name is not None:
                tag, tag_size = java_hash(name), 4 + len(name.encode())
            keys = keys_of(target.topic, read_i32_be(data, _MIDDLE_AT), text)
        head = data[_MIDDLE_AT : _MIDDLE_AT + MIDDLE_SIZE]
        if head != self._head:
            self._go_on_with(head)
        text += self._times
        if len(text) > properties.MOST_BYTES:
            return None
        tail = longer_tail(target.queue.tail, text)
        body = data[HEADER_SIZE:body_end]
        return (target.queue, flag, body, crc, self._middle, HEADER_SIZE_TEXT + tag_size + length, tail, tag, keys)

    def _go_to(self, place: bytes) -> None:
        """Know where parks with this end go."""
        if place not in self._targets:
            self._targets[place] = self._find_target(place)
        self._place, self._target = place, self._targets[place]

    def _go_on_with(self, head: bytes) -> None:
        """Know what becomes of a part of the header that many parks share."""
        sys_flag, born_ms, born_host, store_ms, _, retries = _MIDDLE.unpack(head)
        self._head, self._times = head, _TIMES % (store_ms, self._now_ms)
        self._middle = constant_middle(sys_flag, born_ms, born_host, self._now_ms, self._context.store_host, retries)

    def _find_target(self, place: bytes) -> CopiesTo | None:
        """Return where parks with this end go; ``None`` when the whole message decides, or nobody may have it."""
        pairs = decode_properties(place)
        name, number = pairs.get(properties.REAL_TOPIC, ""), pairs.get(properties.REAL_QUEUE, "")
        if not number.isdecimal() or place != (_PLACE_VALUES % (name, int(number))).encode():
            return None
        topic = self._context.topics.of_parked(name, int(number))
        if topic is None or topic.has_priorities:
            return None
        return CopiesTo(name, self._context.store.queue(name, int(number) % topic.all_partitions))

    def copy_apart(self, record: Record, on_drop: OnDrop, out_ms: int | None = None) -> list[Fields]:
        """Do the same for any park, with another due time if one is given."""
        pairs = properties.parse(record.properties.decode(errors="replace"))
        name, number = pairs.pop(properties.REAL_TOPIC, ""), int(pairs.pop(properties.REAL_QUEUE, "0"))
        topic = self._context.topics.of_parked(name, number) if name else None
        if topic is None:
            on_drop(record.log_offset, f"the topic {name} was deleted")
            return []
        if out_ms is not None:
            pairs[properties.TIMER_OUT] = str(out_ms)
        own = {properties.CRON: pairs[properties.CRON]} if properties.CRON in pairs else properties.NONE
        pairs[properties.TIMER_ENQUEUE] = str(record.store_ms)
        pairs[properties.TIMER_DEQUEUE] = str(self._context.store.clock.now_ms())
        draft = again(record, name, partition_of_copy(topic, pairs, number), pairs)
        try:
            return [new_record(self._context, draft, own)]
        except MetaqError as error:
            on_drop(record.log_offset, str(error))
            return []


def _has_any(text: bytes, names: tuple[bytes, ...]) -> bool:
    """Return whether one of some names is in a text. Asking by ``in`` takes twice as long: it first tries a number."""
    for name in names:  # noqa: SIM110 - compiled, a generator costs more than all else
        if text.find(name) >= 0:
            return True
    return False


def size_of(copy: Fields) -> int:
    """Return the bytes that a copy takes in the log."""
    queue, _, body, _, _, _, tail, _, _ = copy
    return HEADER_SIZE + len(body) + len(queue.tail if tail is None else tail) + CHECKSUM_SIZE
