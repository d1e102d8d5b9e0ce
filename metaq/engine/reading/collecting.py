"""Collecting the messages of a partition that a consumer wants."""

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from metaq.engine.reading.filters import Expression, Filter
from metaq.protocol import properties
from metaq.protocol.record import TAGS, decode_record, property_of
from metaq.protocol.text.messages import Stored
from metaq.store.files.filecache import Read
from metaq.store.log.segments import SMALLEST_RECORD
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import FILLER_SIZE, UNIT, ConsumeQueue

MOST_BYTES: Final = 256 * 1024
"""Bytes in one answer, unless the first message alone is larger."""
MOST_SCANNED: Final = 800
"""Units that one read of a partition compares with the filter when few match; more when more messages are requested. It passes
over as many messages that are damaged or lost."""
MOST_EXAMINED_BYTES: Final = 4 * 1024 * 1024
"""Bytes of records on which one read evaluates an SQL92 expression, or that have another tag of a hash that is wanted."""
MOST_S: Final = 0.008
"""Processor seconds of one read with an SQL92 expression or in order of keys, as the loop does nothing else; then it ends."""

_new: Final = tuple.__new__
"""Makes a named tuple at a third of the cost of its own constructor."""
_TAG: Final = b"\x02" + TAGS.encode() + b"\x01"


class Collected(NamedTuple):
    """The messages that were found in a partition."""

    body: list[bytes | memoryview]
    """The records; one slice may hold several that follow each other in the log."""
    ordinals: Sequence[int]
    """Those of the records."""
    following: int
    """The ordinal after the last message that was looked at."""


def collect_messages(
    store: MessageStore, queue: ConsumeQueue, ordinal: int, most: int, wanted: Filter, read: Read, most_bytes: int = MOST_BYTES
) -> Collected:
    """Return the records from ``ordinal`` on that match, at most ``most`` and ``most_bytes``, but the first of any size.

    There may be none although some follow: where many are damaged or lost, a read ends after ``MOST_SCANNED`` of them. Raise
    ``ColdRead`` as ``read`` does.
    """
    if wanted.matches is not None:
        return _evaluate(store, queue, ordinal, most, wanted.matches, read, most_bytes)
    if wanted.codes is not None:
        return _compare(store, queue, ordinal, most, wanted.codes, wanted.tags, read, most_bytes)
    body: list[bytes | memoryview] = []
    slices, following = store.reader.hot_slices(queue, ordinal, most, most_bytes, read)
    if slices:
        body += slices
        return _new(Collected, (body, range(ordinal, following), following))
    ordinals: list[int] = []
    size = lost = 0
    for stored in store.records(queue, ordinal, most_bytes, read):
        if lost == MOST_SCANNED or len(body) == most or (stored is not None and body and size + stored.size > most_bytes):
            break
        if stored is not None:
            ordinals.append(ordinal)
            body.append(stored.buffer[stored.at : stored.at + stored.size])
            size += stored.size
        else:
            lost += 1
        ordinal += 1
    return Collected(body, ordinals, ordinal)


def _compare(
    store: MessageStore,
    queue: ConsumeQueue,
    ordinal: int,
    most: int,
    codes: frozenset[int],
    tags: frozenset[str] | None,
    read: Read,
    most_bytes: int,
) -> Collected:
    """Collect records with one of these tag hashes and, unless ``None``, one of these tags."""
    body: list[bytes | memoryview] = []
    ordinals: list[int] = []
    size, passed, end = 0, 0, min(queue.readable, ordinal + max(MOST_SCANNED, most))
    while ordinal < end:
        for log_offset, record_size, code in UNIT.iter_unpack(queue.units(ordinal, end - ordinal, read)):
            if record_size < SMALLEST_RECORD:  # the disk cannot give the unit: the message may have such a tag
                store.reader.report(queue, ordinal, (log_offset, record_size, code))
                ordinal += 1
                continue
            stored = store.reader.record(queue, ordinal, read) if code in codes else None
            record = None if stored is None else stored.buffer[stored.at : stored.at + stored.size]
            if record is not None and tags is not None and property_of(record, _TAG) not in tags:
                passed += len(record)
                if passed > MOST_EXAMINED_BYTES:
                    return Collected(body, ordinals, ordinal + 1)
            elif record is not None:
                if body and (len(body) == most or size + len(record) > most_bytes):
                    return Collected(body, ordinals, ordinal)
                ordinals.append(ordinal)
                body.append(record)
                size += len(record)
            ordinal += 1
    return Collected(body, ordinals, ordinal)


def _evaluate(
    store: MessageStore, queue: ConsumeQueue, ordinal: int, most: int, matches: Expression, read: Read, most_bytes: int
) -> Collected:
    """Collect records whose properties match an expression: at least one record is looked at, and as many as time allows."""
    body: list[bytes | memoryview] = []
    ordinals: list[int] = []
    size = examined = 0
    began, end = time.thread_time(), min(queue.readable, ordinal + MOST_SCANNED)
    while ordinal < end:
        for _, record_size, _ in UNIT.iter_unpack(queue.units(ordinal, end - ordinal, read)):
            if record_size < FILLER_SIZE:
                examined += record_size
                if examined > MOST_EXAMINED_BYTES and examined > record_size:
                    return Collected(body, ordinals, ordinal)
            stored = store.reader.record(queue, ordinal, read)
            if stored is not None and _matches(matches, stored):
                if body and (len(body) == most or size + stored.size > most_bytes):
                    return Collected(body, ordinals, ordinal)
                ordinals.append(ordinal)
                body.append(stored.buffer[stored.at : stored.at + stored.size])
                size += stored.size
            ordinal += 1
            if time.thread_time() - began > MOST_S:
                return Collected(body, ordinals, ordinal)
    return Collected(body, ordinals, ordinal)


def _matches(expression: Expression, stored: Stored) -> bool:
    """Return whether the properties of a record match an SQL92 expression."""
    record = decode_record(stored.buffer[stored.at : stored.at + stored.size])
    return expression(properties.parse(record.properties.decode(errors="replace")))
