"""Finding and reading records: ordinal → record, text position → ordinal.

Records that this process appended lately are read through the map and trusted. All others are read from the file and trusted
only after their checksum, topic, partition and ordinal were verified: a flipped bit costs one message and is reported.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from librt.strings import read_i64_be

from metaq.message import TextPosition, TopicPartition
from metaq.protocol.record import HEADER, HEADER_SIZE, MAGIC, MAX_TOPIC_LENGTH, View, identity, is_intact, store_ms
from metaq.protocol.text.messages import Stored, text_size
from metaq.store.files.filecache import Read, read_around
from metaq.store.log.commitlog import CommitLog
from metaq.store.log.segments import SMALLEST_RECORD
from metaq.store.queues.consumequeue import FILLER_SIZE, UNIT, UNIT_SIZE, ConsumeQueue, has_record
from metaq.store.runs import all_units, are_fillers, kept_back, kept_from, leading_intact, leading_near

logger = logging.getLogger(__name__)

UNITS_AT_FIRST: Final = 64
UNITS_AT_ONCE: Final = 512
GAP_WORTH_READING: Final = 16 * 1024
"""Bytes of other partitions between two records. Up to that many, one read over all is cheaper than two reads."""
CURSORS_KEPT: Final = 64
NOWHERE: Final = 1 << 63
"""A log offset after all those that a unit can hold."""

Unit = tuple[int, int, int]
"""Log offset, size and tag hash of a record."""


class RecordRun(NamedTuple):
    """Readable records that follow each other in their partition, all in one part of the log, intact or trusted."""

    view: View
    base: int
    """The log offset at which the view begins."""
    units: bytes
    """One for each record, as in the queue."""

    @property
    def first(self) -> int:
        """The log offset of the first record."""
        offset: int = read_i64_be(self.units, 0)
        return offset

    def before(self, end: int) -> "RecordRun":
        """Return the records that begin before a log offset."""
        units = self.units
        stop = len(units)
        while stop and read_i64_be(units, stop - UNIT_SIZE) >= end:
            stop -= UNIT_SIZE
        return self if stop == len(units) else RecordRun(self.view, self.base, units[:stop])


class Reader:
    """A reader of one log, through the queues of its partitions."""

    def __init__(self, log: CommitLog, queues: Mapping[TopicPartition, ConsumeQueue]) -> None:
        self._log = log
        self._queues = queues
        self.damaged = 0
        """Messages found damaged when they were read; each read counts."""

    # -- records ------------------------------------------------------------------------------------------------------

    def records(self, queue: ConsumeQueue, ordinal: int, hint_bytes: int, read: Read) -> Iterator[Stored | None]:
        """Yield the readable records from ``ordinal`` on; ``None`` for one that is damaged or lost.

        ``hint_bytes`` is about how many bytes the caller will take.
        """
        log = self._log
        new = tuple.__new__  # a third of the cost of the named tuple's own constructor
        at_once = min(UNITS_AT_FIRST, max(1, hint_bytes // SMALLEST_RECORD))
        while ordinal < queue.readable:
            count = min(at_once, queue.readable - ordinal)
            at_once = UNITS_AT_ONCE
            units: list[Unit] = list(UNIT.iter_unpack(queue.units(ordinal, count, read)))
            hot = log.hot_from() if ordinal >= queue.live_from else NOWHERE
            index = 0
            while index < len(units):
                offset = units[index][0]
                segment = log.find(offset) if offset >= hot else None
                if segment is not None:
                    view, base, end = log.view(segment), segment.base, segment.end
                    while index < len(units) and (offset := units[index][0]) >= hot and offset < end:
                        yield new(Stored, (view, offset - base, units[index][1], offset))
                        index += 1
                else:
                    run = list(self._cold_run(queue, ordinal + index, units[index:], hint_bytes, hot, read))
                    yield from run
                    index += len(run)
            ordinal += len(units)

    def hot_run(self, queue: ConsumeQueue, ordinal: int, most: int, since: int, read: Read) -> RecordRun | None:
        """Return records from ``ordinal`` on, at most ``most``; ``None`` where ``records`` would have to verify what it reads.

        They were written at or after the log offset ``since``. They are in the map of one segment.
        """
        if not queue.live_from <= ordinal < queue.readable:
            return None
        log = self._log
        units = queue.units(ordinal, min(most, queue.readable - ordinal), read)
        hot = max(log.hot_from(), since)  # only now that nothing waits any more
        first: int = read_i64_be(units, 0) if units else -1
        segment = log.find(first) if first >= hot else None
        if segment is None:
            return None
        at, end = 0, segment.end
        while at < len(units):
            offset: int = read_i64_be(units, at)
            if not hot <= offset < end:  # the run ends here, or the unit is damaged
                break
            at += UNIT_SIZE
        return RecordRun(log.view(segment), segment.base, units[:at])

    def checked_run(self, queue: ConsumeQueue, ordinal: int, most: int, most_bytes: int, read: Read) -> RecordRun | None:
        """Return records from ``ordinal`` on that one read of the file brings, each verified, up to one that is damaged.

        There are at most ``most``, and about ``most_bytes``. ``None`` when the first is damaged or lost, which is reported.
        """
        if ordinal >= queue.readable:
            return None
        units = queue.units(ordinal, min(most, queue.readable - ordinal), read)
        if not units:  # the queue was cut while this waited
            return None
        first = UNIT.unpack_from(units)
        segment = self._log.find(first[0])
        count = 0 if segment is None else leading_near(units, segment.end, GAP_WORTH_READING, most_bytes)
        if segment is None or not count:
            self.report(queue, ordinal, first)
            return None
        units = units[: count * UNIT_SIZE]
        start: int = first[0]
        offset, size, _ = UNIT.unpack_from(units, len(units) - UNIT_SIZE)
        window = read_around(read, self._log.file(segment), offset + size - start, start - segment.base)
        intact = leading_intact(window, units, queue.topic, queue.partition, ordinal)
        if not intact:
            self.report(queue, ordinal, first)
            return None
        return RecordRun(memoryview(window), start, units[: intact * UNIT_SIZE])

    def hot_slices(
        self, queue: ConsumeQueue, ordinal: int, most: int, most_bytes: int, read: Read
    ) -> tuple[list[memoryview], int]:
        """Return readable records from ``ordinal`` on as slices of the map, and the ordinal after the last one.

        Adjacent records share one slice. Ends early where ``records`` would have to verify what it reads. The first record is
        taken whatever its size.
        """
        slices: list[memoryview] = []
        if not queue.live_from <= ordinal < queue.readable:
            return slices, ordinal
        log = self._log
        begin = end = -1
        base = limit = size = 0
        view = memoryview(b"")
        units = all_units(queue, ordinal, min(most, queue.readable - ordinal), read)
        hot = log.hot_from()  # only now that nothing waits any more: segments may be deleted while the units are read
        for offset, length, _ in UNIT.iter_unpack(units):
            size += length
            if offset < hot or (size > most_bytes and end >= 0):
                break
            if offset != end:
                inside = base <= offset < limit
                segment = None if inside else log.find(offset)
                if segment is None and not inside:  # the unit is damaged
                    break
                if end >= 0:
                    slices.append(view[begin - base : end - base])
                if segment is not None:
                    view, base, limit = log.view(segment), segment.base, segment.end
                begin = offset
            end = offset + length
            ordinal += 1
        if end >= 0:
            slices.append(view[begin - base : end - base])
        return slices, ordinal

    def _cold_run(
        self, queue: ConsumeQueue, ordinal: int, units: list[Unit], hint_bytes: int, hot: int, read: Read
    ) -> Iterator[Stored | None]:
        """Yield the record of the first unit, and those of the units after it that are worth reading with it."""
        start, size, _ = units[0]
        segment = self._log.find(start)
        if segment is None or not SMALLEST_RECORD <= size <= segment.end - start:
            self.report(queue, ordinal, units[0])
            yield None
            return
        end, taken, wanted = start + size, 1, size
        for offset, size, _ in units[1:]:
            worth = 0 <= offset - end <= GAP_WORTH_READING and wanted < hint_bytes
            if not worth or offset >= hot or not SMALLEST_RECORD <= size <= segment.end - offset:
                break
            end, taken, wanted = offset + size, taken + 1, wanted + size
        window = memoryview(read_around(read, self._log.file(segment), end - start, start - segment.base))
        for index in range(taken):
            offset, size, _ = units[index]
            stored = Stored(window, offset - start, size, offset)
            if self.belongs(queue, ordinal + index, stored):
                yield stored
            else:
                self.report(queue, ordinal + index, units[index])
                yield None

    def belongs(self, queue: ConsumeQueue, ordinal: int, stored: Stored) -> bool:
        """Return whether the bytes that were read are the message of that ordinal, intact."""
        data = stored.buffer[stored.at : stored.at + stored.size]
        if not is_intact(data, stored.log_offset):
            return False
        return identity(data)[:3] == (queue.topic, queue.partition, ordinal)

    def report(self, queue: ConsumeQueue, ordinal: int, unit: Unit) -> None:
        """Count a message that was read and found damaged, and log an error; not for fillers and records that have aged out."""
        aged = unit[1] >= SMALLEST_RECORD and 0 <= unit[0] < self._log.begin  # its segment was deleted while this one waited
        if unit[1] != FILLER_SIZE and not aged:  # a filler was reported when it was written
            self.damaged += 1
            logger.error(
                "message damaged topic=%s partition=%d ordinal=%d log_offset=%d size=%d hint=run metaq verify",
                queue.topic,
                queue.partition,
                ordinal,
                unit[0],
                unit[1],
            )

    def record(self, queue: ConsumeQueue, ordinal: int, read: Read) -> Stored | None:
        """Return one readable record; ``None`` when it is damaged or lost."""
        return next(self.records(queue, ordinal, 1, read))

    def at_offset(self, log_offset: int, read: Read) -> Stored | None:
        """Return the readable record that begins at a log offset, or ``None``; any integer may be given.

        A record counts only if the unit that its header names points back at it: a body may hold bytes that look like a record.
        """
        log = self._log
        segment = log.find(log_offset)
        end = 0 if segment is None else min(segment.end, log.end)
        if segment is None or log_offset + SMALLEST_RECORD > end:
            return None
        file, at = log.file(segment), log_offset - segment.base
        header = HEADER.unpack(read_around(read, file, HEADER_SIZE, at).ljust(HEADER_SIZE, b"\0"))
        size, magic, partition, ordinal, place, length = *header[:2], header[3], header[5], header[6], header[14]
        if magic != MAGIC or place != log_offset or not SMALLEST_RECORD <= size <= end - log_offset:
            return None
        if not 0 <= length <= size - SMALLEST_RECORD:
            return None
        name = read_around(read, file, min(1 + MAX_TOPIC_LENGTH, size - HEADER_SIZE - length), at + HEADER_SIZE + length)
        topic = name[1 : 1 + name[0]].decode("ascii", "replace") if name else ""
        queue = self._queues.get(TopicPartition(topic, partition))
        if queue is None or not queue.base <= ordinal < queue.readable:
            return None
        if queue.unit(ordinal, read)[:2] != (log_offset, size):
            return None
        return self.record(queue, ordinal, read)

    # -- times --------------------------------------------------------------------------------------------------------

    def store_time(self, queue: ConsumeQueue, ordinal: int, read: Read) -> int | None:
        """Return the store time of a readable message, in milliseconds; ``None`` when it is damaged or lost."""
        stored = self.record(queue, ordinal, read)
        return None if stored is None else store_ms(stored.buffer[stored.at :])

    def at_time(self, queue: ConsumeQueue, time_ms: int, read: Read, *, upper: bool = False) -> int:
        """Return the ordinal of the first message stored at or after a time; of the next one to come when there is none.

        With ``upper``, return that of the last message stored at or before the time; of the oldest one when there is none. Both
        are as in RocketMQ 5.x (specs: remoting protocol, section 3.2.4). Damaged messages are skipped.
        """
        oldest, _ = self.first(queue, read)
        if upper:
            time_ms += 1
        low, high = oldest, queue.readable
        while low < high:
            middle = (low + high) // 2
            found, stored_ms = self._next_stored(queue, middle, high, read)
            if found < high and stored_ms < time_ms:
                low = found + 1
            else:
                high = middle
        if not upper:
            return self._next_stored(queue, low, queue.readable, read)[0]
        for ordinal in kept_back(queue, low - 1, oldest, read):
            if self.record(queue, ordinal, read) is not None:
                return ordinal
        return oldest

    def _next_stored(self, queue: ConsumeQueue, ordinal: int, high: int, read: Read) -> tuple[int, int]:
        """Return ordinal and store time of the first intact message at or after ``ordinal``; ``high`` and 0 without one."""
        for found in kept_from(queue, ordinal, high, read):
            stored_ms = self.store_time(queue, found, read)
            if stored_ms is not None:
                return found, stored_ms
        return high, 0

    # -- positions ----------------------------------------------------------------------------------------------------

    def first(self, queue: ConsumeQueue, read: Read) -> tuple[int, TextPosition]:
        """Return ordinal and text position of the oldest readable message whose record is kept, or of the next one to come."""
        while True:
            begin, low = self._log.begin, queue.first
            if queue.first_for == begin and low < queue.readable:
                return low, TextPosition(queue.first_position)
            ordinal, position = self.next_intact(queue, self.oldest(queue, max(queue.base, low), read), read)
            if queue.first == low:  # else the topic was deleted while this waited for the disk
                break
        if ordinal < queue.readable:  # otherwise not cached: the messages that become readable next may have aged out too
            queue.first, queue.first_position, queue.first_for = ordinal, position, begin
        return ordinal, TextPosition(position)

    def oldest(self, queue: ConsumeQueue, low: int, read: Read) -> int:
        """Return the first ordinal from ``low`` on whose record may still be in the log."""
        high = queue.readable
        while low < high:
            middle = (low + high) // 2
            if self._is_kept(queue, middle, low, read):
                high = middle
            else:
                low = middle + 1
        return low

    def _is_kept(self, queue: ConsumeQueue, ordinal: int, low: int, read: Read) -> bool:
        """Return whether the log still reaches back to an ordinal; ``low`` is the first one that may be kept.

        A filler has no log offset, so the unit before it decides. A single unit may be damaged, so two must show that their
        records have aged out: a wrong answer would hide every message before this one. Where some cannot be read, and no other
        one shows that its record has aged out, their records may be kept: the disk may give them the next time.
        """
        low, aged = max(low, queue.base), 0  # those before the base were dropped while this waited for the disk
        for before in kept_back(queue, ordinal, low, read):
            offset, size, _ = queue.unit(before, read)
            if not has_record(size):
                continue
            if offset >= self._log.begin:
                return True
            aged += 1
            if aged == 2:
                break
        return not aged and not are_fillers(queue, low, ordinal + 1, read)

    def locate(self, queue: ConsumeQueue, position: int, read: Read) -> tuple[int, TextPosition]:
        """Return ordinal and text position of the message that contains ``position``, of the first after it, or of the next."""
        ordinal = queue.cursors.pop(position, None)
        if ordinal is not None:
            queue.cursors[position] = ordinal  # at the end of the dict: dropped last
            return ordinal, TextPosition(position)
        if position >= queue.readable_text_end:
            return queue.readable, TextPosition(queue.readable_text_end)
        low, start = self.first(queue, read)
        if position <= start:
            return low, start
        high = queue.readable
        while high - low > 1:  # the message at low begins at or before position, the one at high after it
            middle = (low + high) // 2
            found, begins = self.next_intact(queue, middle, read, high)
            if begins <= position and found < high:
                low, start = found, TextPosition(begins)
            else:
                high = middle
        stored = self.record(queue, low, read)
        if stored is not None and position < start + text_size(stored, queue.overhead):
            return low, start
        found, begins = self.next_intact(queue, low + 1, read)
        return found, TextPosition(begins)

    def remember(self, queue: ConsumeQueue, position: int, ordinal: int) -> None:
        """Cache the ordinal of a text position that a sequential reader will ask for next."""
        if ordinal < queue.first:  # the topic was deleted while the reader waited for the disk
            return
        queue.cursors.pop(position, None)
        if len(queue.cursors) >= CURSORS_KEPT:
            del queue.cursors[next(iter(queue.cursors))]
        queue.cursors[position] = ordinal

    def next_intact(self, queue: ConsumeQueue, ordinal: int, read: Read, high: int = -1) -> tuple[int, int]:
        """Return ordinal and text position of the first intact message at or after ``ordinal``.

        The search ends before ``high``, by default before the first message that is not readable yet. Without an intact
        message, return that ordinal and the end of the readable text.
        """
        end = queue.readable if high < 0 else high
        for found in kept_from(queue, ordinal, end, read):
            stored = self.record(queue, found, read)
            if stored is not None:
                return found, identity(stored.buffer[stored.at :]).text_position
        return end, queue.readable_text_end
