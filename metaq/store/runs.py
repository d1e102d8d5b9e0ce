"""Stretches of a queue: which records lie next to one another in the log, and are intact, and where lost messages end."""

from collections.abc import Iterable, Iterator
from typing import Final

from librt.strings import read_i32_be, read_i64_be

from metaq.protocol.record import CHECKSUM_SIZE, HEADER_SIZE, MAGIC, checksum_properties
from metaq.store.files.filecache import Read
from metaq.store.log.segments import SMALLEST_RECORD
from metaq.store.queues.consumequeue import FILLER, FILLER_SIZE, UNIT_SIZE, ConsumeQueue, has_record

Run = tuple[int, int, int]
"""Begin and end of adjacent records in the log, and their number."""
Found = tuple[list[Run], int, int]
"""Runs, and how many messages and bytes they are together."""

_SIZE_AT: Final = 8
_PASSED_AT_ONCE: Final = 4096
"""Units that one read looks at where there may be a million that lead to no record: fillers, and those that cannot be read."""
_FILLERS: Final = FILLER * _PASSED_AT_ONCE


def leading_runs(units: bytes, base: int, end: int, most_bytes: int) -> Found:
    """Return the records of the first units in runs; a larger one than ``most_bytes`` is found if it is the first.

    They end before a unit that is no record's, and before a record that is not between the log offsets ``base`` and ``end``.
    """
    runs: list[Run] = []
    begin = following = -1
    at = messages = first = total = 0
    while at < len(units):
        offset: int = read_i64_be(units, at)
        size: int = read_i32_be(units, at + _SIZE_AT)
        stop = offset + size
        if not (SMALLEST_RECORD <= size < FILLER_SIZE and base <= offset and stop <= end):
            break
        if messages and total + size > most_bytes:
            break
        if offset != following:
            if messages:
                runs.append((begin, following, messages - first))
            begin, first = offset, messages
        following = stop
        total += size
        messages += 1
        at += UNIT_SIZE
    if messages:
        runs.append((begin, following, messages - first))
    return runs, messages, total


def leading_near(units: bytes, end: int, gap: int, most_bytes: int) -> int:
    """Return how many of the first units are of records worth one read, which ends at the log offset ``end`` at the latest.

    Those end before a unit that is no record's, and before one that is more than ``gap`` bytes after its predecessor. They are
    about ``most_bytes``.
    """
    at = wanted = 0
    following = -1
    while at < len(units):
        offset: int = read_i64_be(units, at)
        size: int = read_i32_be(units, at + _SIZE_AT)
        if not SMALLEST_RECORD <= size <= end - offset:
            break
        if at and not (0 <= offset - following <= gap and wanted < most_bytes):
            break
        following = offset + size
        wanted += size
        at += UNIT_SIZE
    return at // UNIT_SIZE


def leading_intact(window: bytes, units: bytes, topic: str, partition: int, ordinal: int) -> int:
    """Return how many of the first records are those of consecutive messages from ``ordinal`` on, with every bit as written.

    ``window`` is the part of the log that begins with the first one. The units are those that ``leading_near`` finds.
    """
    name = bytes((len(topic),)) + topic.encode()
    view = memoryview(window)
    start: int = read_i64_be(units, 0)
    ends: list[int] = []
    records: list[bytes | memoryview] = []
    for unit_at in range(0, len(units), UNIT_SIZE):
        offset: int = read_i64_be(units, unit_at)
        size: int = read_i32_be(units, unit_at + _SIZE_AT)
        at = offset - start
        end = at + size - CHECKSUM_SIZE
        if end + CHECKSUM_SIZE > len(window):  # the file was cut from outside
            break
        if not (
            read_i32_be(window, at) == size
            and read_i32_be(window, at + 4) == MAGIC
            and read_i32_be(window, at + 12) == partition
            and read_i64_be(window, at + 20) == ordinal + len(ends)
            and read_i64_be(window, at + 28) == offset
        ):
            break
        topic_at = at + HEADER_SIZE + read_i32_be(window, at + 84)
        if not at + HEADER_SIZE <= topic_at <= end - len(name) or window[topic_at : topic_at + len(name)] != name:
            break
        ends.append(end)
        records.append(view[at:end])
    checksums = checksum_properties(records)
    for index, end in enumerate(ends):
        if window[end : end + CHECKSUM_SIZE] != checksums[index * CHECKSUM_SIZE : (index + 1) * CHECKSUM_SIZE]:
            return index
    return len(ends)


def all_units(queue: ConsumeQueue, ordinal: int, count: int, read: Read) -> bytes:
    """Return ``count`` units, of which the newest may still be in memory; fewer when the queue is cut while this waits."""
    units = queue.units(ordinal, count, read)
    while (found := len(units) // UNIT_SIZE) < count:
        more = queue.units(ordinal + found, count - found, read)
        if not more:
            break
        units += more
    return units


def kept_from(queue: ConsumeQueue, ordinal: int, end: int, read: Read) -> Iterator[int]:
    """Yield ``ordinal``, and each one after it and before ``end`` whose unit leads to a record."""
    if ordinal < end:
        yield ordinal
    ordinal += 1
    while ordinal < end:
        units = all_units(queue, ordinal, min(_PASSED_AT_ONCE, end - ordinal), read)
        if not units:  # the queue was cut while this waited
            break
        if units != _FILLERS[: len(units)]:
            for at in range(0, len(units), UNIT_SIZE):
                if has_record(read_i32_be(units, at + _SIZE_AT)):
                    yield ordinal + at // UNIT_SIZE
        ordinal += len(units) // UNIT_SIZE


def kept_back(queue: ConsumeQueue, ordinal: int, low: int, read: Read) -> Iterator[int]:
    """Yield ``ordinal``, and each one before it down to ``low`` whose unit leads to a record, the last one first."""
    if ordinal >= low:
        yield ordinal
    while ordinal > low:
        begin = max(low, ordinal - _PASSED_AT_ONCE)
        units = all_units(queue, begin, ordinal - begin, read)
        if units != _FILLERS[: len(units)]:
            for at in range(len(units) - UNIT_SIZE, -1, -UNIT_SIZE):
                if has_record(read_i32_be(units, at + _SIZE_AT)):
                    yield begin + at // UNIT_SIZE
        ordinal = begin


def offsets_of(queue: ConsumeQueue, ordinals: Iterable[int], read: Read) -> Iterator[tuple[int, int]]:
    """Yield ordinal and log offset of those messages whose units lead to a record."""
    for ordinal in ordinals:
        offset, size, _ = queue.unit(ordinal, read)
        if has_record(size):
            yield ordinal, offset


def are_fillers(queue: ConsumeQueue, ordinal: int, end: int, read: Read) -> bool:
    """Return whether all units from ``ordinal`` on and before ``end`` are those of lost messages."""
    while ordinal < end:
        units = all_units(queue, ordinal, min(_PASSED_AT_ONCE, end - ordinal), read)
        if not units:  # the queue was cut while this waited
            break
        if units != _FILLERS[: len(units)]:
            return False
        ordinal += len(units) // UNIT_SIZE
    return True
