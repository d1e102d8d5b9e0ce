"""Finding and reading records: ordinal → record, text position → ordinal.

What this process appended lately is read through the map and trusted. Everything else is read from the file and trusted
only after its checksum, topic, partition and ordinal were compared: a flipped bit costs one message and is reported.
"""

import logging
from collections.abc import Iterator
from typing import Final

from metaq.message import TextPosition
from metaq.protocol.record import identity, is_intact
from metaq.protocol.textmessage import Stored, text_size
from metaq.store.commitlog import SMALLEST_RECORD, CommitLog
from metaq.store.consumequeue import FILLER_SIZE, UNIT, ConsumeQueue
from metaq.store.files import Read

logger = logging.getLogger(__name__)

UNITS_AT_FIRST: Final = 64
UNITS_AT_ONCE: Final = 512
GAP_WORTH_READING: Final = 16 * 1024
"""Bytes of other partitions between two records that are read along rather than asked for apart."""
CURSORS_KEPT: Final = 64
NOWHERE: Final = 1 << 63
"""A log offset behind all that a unit can hold."""

Unit = tuple[int, int, int]


class Reader:
    """Reads one log through the queues of its partitions."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self.damaged = 0
        """Messages that were asked for and found damaged; counted at each reading."""

    # -- records ------------------------------------------------------------------------------------------------------

    def records(self, queue: ConsumeQueue, ordinal: int, hint_bytes: int, read: Read) -> Iterator[Stored | None]:
        """The readable records from ``ordinal`` on; ``None`` for one that is damaged or lost."""
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
                if offset >= hot:
                    segment = log.find(offset)
                    assert segment is not None
                    view, base, end = log.view(segment), segment.base, segment.end
                    while index < len(units) and (offset := units[index][0]) >= hot and offset < end:
                        yield new(Stored, (view, offset - base, units[index][1], offset))
                        index += 1
                else:
                    run = list(self._cold_run(queue, ordinal + index, units[index:], hint_bytes, hot, read))
                    yield from run
                    index += len(run)
            ordinal += len(units)

    def _cold_run(
        self, queue: ConsumeQueue, ordinal: int, units: list[Unit], hint_bytes: int, hot: int, read: Read
    ) -> Iterator[Stored | None]:
        """The first of ``units`` and those behind it that are worth reading with it."""
        start, size, _ = units[0]
        segment = self._log.find(start)
        if segment is None or not SMALLEST_RECORD <= size <= segment.end - start:
            self._report(queue, ordinal, units[0])
            yield None
            return
        end, taken, wanted = start + size, 1, size
        for offset, size, _ in units[1:]:
            worth = 0 <= offset - end <= GAP_WORTH_READING and wanted < hint_bytes
            if not worth or offset >= hot or not SMALLEST_RECORD <= size <= segment.end - offset:
                break
            end, taken, wanted = offset + size, taken + 1, wanted + size
        window = memoryview(read(self._log.file(segment), end - start, start - segment.base))
        for index in range(taken):
            offset, size, _ = units[index]
            stored = Stored(window, offset - start, size, offset)
            if self._belongs(queue, ordinal + index, stored):
                yield stored
            else:
                self._report(queue, ordinal + index, units[index])
                yield None

    def _belongs(self, queue: ConsumeQueue, ordinal: int, stored: Stored) -> bool:
        data = stored.buffer[stored.at : stored.at + stored.size]
        if not is_intact(data, stored.log_offset):
            return False
        return identity(data)[:3] == (queue.topic, queue.partition, ordinal)

    def _report(self, queue: ConsumeQueue, ordinal: int, unit: Unit) -> None:
        if unit[1] != FILLER_SIZE:  # a filler was reported when it was written
            self.damaged += 1
            logger.error(
                "message damaged topic=%s partition=%d ordinal=%d log_offset=%d size=%d: run metaq verify",
                *(queue.topic, queue.partition, ordinal, unit[0], unit[1]),
            )

    def record(self, queue: ConsumeQueue, ordinal: int, read: Read) -> Stored | None:
        """One readable record."""
        return next(self.records(queue, ordinal, 1, read))

    # -- positions ----------------------------------------------------------------------------------------------------

    def first(self, queue: ConsumeQueue, read: Read) -> tuple[int, TextPosition]:
        """Ordinal and text position of the oldest readable message whose record is kept, or of the next one."""
        begin = self._log.begin
        if queue.first_for == begin and queue.first < queue.readable:
            return queue.first, TextPosition(queue.first_position)
        low, high = max(queue.base, queue.first), queue.readable
        while low < high:
            middle = (low + high) // 2
            if self._is_kept(queue, middle, low, read):
                high = middle
            else:
                low = middle + 1
        ordinal, position = self.next_intact(queue, low, read)
        if ordinal < queue.readable:  # else those that become readable next may have aged out too
            queue.first, queue.first_position, queue.first_for = ordinal, position, begin
        return ordinal, TextPosition(position)

    def _is_kept(self, queue: ConsumeQueue, ordinal: int, low: int, read: Read) -> bool:
        """Whether the log still reaches back to an ordinal; ``low`` is the first one that may be kept.

        Fillers say nothing about that, so the unit before them is asked. A unit alone may be damaged: two must agree that
        they have aged out, because a wrong answer would hide every message before this one.
        """
        aged = 0
        for place in range(ordinal, low - 1, -1):
            offset, size, _ = queue.unit(place, read)
            if SMALLEST_RECORD <= size < FILLER_SIZE:
                if offset >= self._log.begin:
                    return True
                aged += 1
                if aged == 2:
                    break
        return False

    def locate(self, queue: ConsumeQueue, position: int, read: Read) -> tuple[int, TextPosition]:
        """The message that contains ``position``, else the first behind it, else the next one to come."""
        ordinal = queue.cursors.pop(position, None)
        if ordinal is not None:
            queue.cursors[position] = ordinal  # the last to be dropped now
            return ordinal, TextPosition(position)
        if position >= queue.readable_text_end:
            return queue.readable, TextPosition(queue.readable_text_end)
        low, start = self.first(queue, read)
        if position <= start:
            return low, start
        high = queue.readable
        while high - low > 1:  # the message at low begins at or before position, the one at high behind it
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
        """A sequential reader will ask for ``position`` next."""
        queue.cursors.pop(position, None)
        if len(queue.cursors) >= CURSORS_KEPT:
            del queue.cursors[next(iter(queue.cursors))]
        queue.cursors[position] = ordinal

    def next_intact(self, queue: ConsumeQueue, ordinal: int, read: Read, high: int = -1) -> tuple[int, int]:
        """Ordinal and position of the first intact message at or behind ``ordinal``; at ``high`` the search ends."""
        end = queue.readable if high < 0 else high
        for found in range(ordinal, end):
            stored = self.record(queue, found, read)
            if stored is not None:
                return found, identity(stored.buffer[stored.at :]).text_position
        return end, queue.readable_text_end
