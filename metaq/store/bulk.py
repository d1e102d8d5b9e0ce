"""Reading many messages of a partition at once, in pieces of units and records; other work may run between pieces.

A Python loop over the messages, as in ``metaq.store.reading``, would cost 4 µs a message. Here the loops run in C, or are
compiled (``metaq.store.runs``); a message costs 1 µs where each record is verified here, and much less where the reader does
that or the log is trusted.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from operator import add, sub
from typing import Final, NamedTuple

from metaq.protocol.remoting.bulk import MISSING, UNIT_SIZE, are_intact, unit_columns
from metaq.protocol.text.messages import Stored
from metaq.store.files.filecache import Read, read_around
from metaq.store.log.commitlog import CommitLog
from metaq.store.log.segments import SMALLEST_RECORD
from metaq.store.queues.consumequeue import FILLER_SIZE, UNIT, ConsumeQueue
from metaq.store.reading import GAP_WORTH_READING, Reader
from metaq.store.runs import Run, leading_runs

UNVERIFIED_UNITS: Final = 4096
COLD_UNITS: Final = 1024
"""Verifying that many takes about a millisecond."""
MOST_READS: Final = 128
"""Reads for one piece that is not verified."""
MOST_READ_BYTES: Final = 1024 * 1024
"""Bytes of the log in one read, unless its first record alone is larger."""
SMALL_BYTES: Final = 2048
"""Records with a smaller average size are cheaper to copy into one buffer than to send as separate buffers."""


class BulkPiece(NamedTuple):
    """The units and records of consecutive messages, at least one."""

    units: bytes
    """One unit a message, as in the queue; 16 zero bytes for a message that is damaged or lost."""
    records: list[bytes | memoryview]
    size: int
    """Total bytes of the records."""
    verified: bool = True
    """Each record was verified, or comes from memory, which is trusted."""


class BulkReader:
    """A reader of many messages at once; it trusts, verifies and reports damage as ``Reader`` does.

    Callers ask for at most ``most`` messages, all of them readable. A piece ends before the records exceed ``most_bytes``; only
    its first record may be larger than that.
    """

    def __init__(self, log: CommitLog, reader: Reader) -> None:
        self._log = log
        self._reader = reader

    def hot(self, queue: ConsumeQueue, ordinal: int, most: int, most_bytes: int, read: Read) -> BulkPiece | None:
        """Return messages that are read through the map and trusted, without verification.

        Return ``None`` when the one at ``ordinal`` is not trusted, or its unit is a filler or damaged.
        """
        if ordinal < queue.live_from:
            return None
        units = queue.units(ordinal, min(most, UNVERIFIED_UNITS), read)
        offset: int = UNIT.unpack_from(units)[0]
        log = self._log
        segment = log.find(offset) if offset >= log.hot_from() else None
        if segment is None:  # not trusted, or the unit is damaged
            return None
        runs, number, size = leading_runs(units, segment.base, segment.end, most_bytes)
        if not runs:
            return None
        view, base = log.view(segment), segment.base
        records: list[bytes | memoryview] = [view[begin - base : end - base] for begin, end, _ in runs]
        return BulkPiece(units[: number * UNIT_SIZE], _joined_when_small(records, size), size)

    def raw(self, queue: ConsumeQueue, ordinal: int, most: int, most_bytes: int, read: Read) -> BulkPiece | None:
        """Return messages as they are in the file, for a reader that verifies them itself.

        Return ``None`` where only ``cold`` makes progress: at units that do not point at records, and where the first record is
        larger than ``most_bytes`` or than one read.
        """
        units = queue.units(ordinal, min(most, UNVERIFIED_UNITS), read)
        segment = self._log.find(UNIT.unpack_from(units)[0])
        if segment is None:
            return None
        limit = min(most_bytes, MOST_READ_BYTES)
        runs, _, size = leading_runs(units, segment.base, segment.end, limit)
        if not runs or size > limit:
            return None
        file, number, size = self._log.file(segment), 0, 0
        records: list[bytes | memoryview] = []
        for group in islice(_near(runs), MOST_READS):
            begin, end = group[0][0], group[-1][1]
            window = read_around(read, file, end - begin, begin - segment.base)
            if len(window) != end - begin:  # the file was cut from outside
                return None
            records += [window[first - begin : last - begin] for first, last, _ in group]
            number += sum(messages for _, _, messages in group)
            size += sum(last - first for first, last, _ in group)
        return BulkPiece(units[: number * UNIT_SIZE], _joined_when_small(records, size), size, verified=False)

    def cold(self, queue: ConsumeQueue, ordinal: int, most: int, most_bytes: int, read: Read) -> BulkPiece:
        """Return messages from the file, each verified; damaged ones are reported. Waits for the disk as ``read`` does."""
        units = queue.units(ordinal, min(most, COLD_UNITS), read)
        offsets, sizes = unit_columns(units)
        pieces: list[BulkPiece] = []
        at = size = 0
        while at < len(sizes):
            count = _leading(sizes[at:], FILLER_SIZE, FILLER_SIZE)
            if count:
                piece = BulkPiece(MISSING * count, [], 0)
            else:
                count = self._one_read(offsets[at:], sizes[at:], most_bytes - size)
                if pieces and size + sum(sizes[at : at + count]) > most_bytes:
                    break
                piece = self._run(queue, ordinal + at, units[at * UNIT_SIZE : (at + count) * UNIT_SIZE], read)
            pieces.append(piece)
            size += piece.size
            at += count
        records = [buffer for piece in pieces for buffer in piece.records]
        return BulkPiece(b"".join([piece.units for piece in pieces]), records, size)

    def _run(self, queue: ConsumeQueue, ordinal: int, units: bytes, read: Read) -> BulkPiece:
        """Return messages that one read covers, verified; only the first one, as missing, when its unit is damaged."""
        offsets, sizes = unit_columns(units)
        start, end, size = offsets[0], offsets[-1] + sizes[-1], sum(sizes)
        segment = self._log.find(start)
        if segment is None or sizes[0] < SMALLEST_RECORD or end > segment.end:
            self._reader.report(queue, ordinal, UNIT.unpack(units))
            return BulkPiece(MISSING, [], 0)
        window = read_around(read, self._log.file(segment), end - start, start - segment.base)
        starts = [offset - start for offset in offsets]
        if not are_intact(window, starts, offsets, sizes, queue.topic, queue.partition, ordinal):
            return self._sorted_out(queue, ordinal, units, window)
        if end - start == size:
            return BulkPiece(units, [window], size)
        # copied, because the window may hold up to 16 KiB of other partitions between any two of them
        return BulkPiece(units, [b"".join([window[at : at + size] for at, size in zip(starts, sizes, strict=True)])], size)

    def _one_read(self, offsets: Sequence[int], sizes: Sequence[int], most_bytes: int) -> int:
        """Return how many of the first messages one read of the file can cover; at least 1, even when it can cover none."""
        segment = self._log.find(offsets[0])
        count = _leading(sizes, SMALLEST_RECORD, FILLER_SIZE - 1)
        if segment is None or not count:
            return 1
        ends = list(map(add, offsets[:count], sizes))
        count = 1 + _leading(list(map(sub, offsets[1:count], ends)), 0, GAP_WORTH_READING)
        fitting = bisect_right(ends, min(segment.end, offsets[0] + MOST_READ_BYTES), 0, count)
        return max(1, min(fitting, bisect_right(list(accumulate(sizes[:count])), most_bytes)))

    def _sorted_out(self, queue: ConsumeQueue, ordinal: int, units: bytes, window: bytes) -> BulkPiece:
        """Return the intact messages of a window in which one or more are damaged; report those and mark them as missing."""
        kept, records = [], []
        start: int = UNIT.unpack_from(units)[0]
        for index, unit in enumerate(UNIT.iter_unpack(units)):
            offset, size, _ = unit
            stored = Stored(memoryview(window), offset - start, size, offset)
            if self._reader.belongs(queue, ordinal + index, stored):
                kept.append(UNIT.pack(*unit))
                records.append(window[stored.at : stored.at + size])
            else:
                self._reader.report(queue, ordinal + index, unit)
                kept.append(MISSING)
        return BulkPiece(b"".join(kept), [b"".join(records)], sum(map(len, records)))


def _near(runs: Sequence[Run]) -> Iterator[Sequence[Run]]:
    """Yield the runs in groups, each of which is worth one read."""
    first, start, before = 0, runs[0][0], runs[0][1]
    for at, (begin, end, _) in enumerate(runs):
        if at and (not 0 <= begin - before <= GAP_WORTH_READING or end - start > MOST_READ_BYTES):
            yield runs[first:at]
            first, start = at, begin
        before = end
    yield runs[first:]


def _joined_when_small(records: list[bytes | memoryview], size: int) -> list[bytes | memoryview]:
    return [b"".join(records)] if size < len(records) * SMALL_BYTES else records


def _leading(numbers: Sequence[int], least: int, most: int) -> int:
    """Return how many numbers come before the first that is not in ``least`` … ``most``."""
    if not numbers or (least <= min(numbers) and max(numbers) <= most):
        return len(numbers)
    return next((index for index, number in enumerate(numbers) if not least <= number <= most), len(numbers))
