"""Comparison of a slave's log with its master's, by checksums of ranges that the slave sends.

Epochs show up to where two logs were written by the same masters, not that both still hold what was written. So a slave proves,
each time that it connects, the part of its log after the last log offset before which the log is known to be right::

    proved │ range │ range │ … │ range │ end          [[end of a range, its CRC-32], …]

The master answers with the begin of the first range that differs in its own log. Ranges are short, so that little is copied
again. They grow with the length to prove, since a hello has at most ``MOST_RANGES``. None is longer than ``MOST_RANGE_BYTES``:
that much the master reads even for a client that knows nothing of the log.

Where the master knows of damage in its own log it compares nothing: the slave's bytes there may be right.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from metaq.checksum import crc32
from metaq.errors import CorruptRecord
from metaq.store.files.filecache import Read
from metaq.store.log.commitlog import CommitLog

RANGE_BYTES: Final = 1024 * 1024
MOST_RANGES: Final = 4096
MOST_RANGE_BYTES: Final = 64 * 1024 * 1024
AT_ONCE: Final = 512 * 1024
"""Bytes that are read and summed in one go, in half a millisecond."""

Ranges = list[list[int]]
"""A list of ranges, each with its end and its CRC-32."""


def _nobody() -> None:
    """Do nothing: no one needs the progress."""


def ranges(log: CommitLog, start: int, read: Read) -> Ranges:
    """Return the checksums of the log from ``start`` to its end.

    Raises ``CorruptRecord`` when that part is longer than a hello can prove.
    """
    size = max(RANGE_BYTES, -(-(log.end - start) // MOST_RANGES))
    if size > MOST_RANGE_BYTES:
        raise CorruptRecord(
            f"of the log up to {log.end}, only the part before {start} is known to be right; empty the data folder to copy all"
        )
    ends = [*range(start + size, log.end, size), log.end] if start < log.end else []
    return [[end, _checksum(log, begin, end, read, _nobody)] for begin, end in pairwise([start, *ends])]


def first_difference(
    log: CommitLog,
    start: int,
    theirs: Ranges,
    end: int,
    damaged: Sequence[tuple[int, int]],
    read: Read,
    tell: Callable[[], None],
) -> int | None:
    """Return the begin of the first range that differs in this log, or ``None``; ``tell`` is called from time to time.

    Ranges that end after ``end``, begin before this log does, or touch a ``damaged`` range are not compared.
    """
    for stop, checksum in theirs:
        begin, start = start, stop
        if stop > end:
            return None
        known = begin >= log.begin and not any(bad < stop and begin < good for bad, good in damaged)
        if known and _checksum(log, begin, stop, read, tell) != checksum:
            return begin
    return None


def are_ranges(theirs: object, start: int, end: int) -> bool:
    """Return whether a received value is a list of adjacent ranges from ``start`` to ``end``."""
    if not isinstance(theirs, list) or len(theirs) > MOST_RANGES:
        return False
    if not all(isinstance(row, list) and [type(part) for part in row] == [int, int] for row in theirs):
        return False
    borders = [start, *(row[0] for row in theirs)]
    return borders[-1] == end and all(0 < stop - begin <= MOST_RANGE_BYTES for begin, stop in pairwise(borders))


def _checksum(log: CommitLog, start: int, end: int, read: Read, tell: Callable[[], None]) -> int:
    """Return the CRC-32 of all bytes of a range, those after the last record of a segment included."""
    checksum, at = 0, start
    while at < end:
        segment = log.find(at)
        if segment is None:
            raise CorruptRecord(f"log offset {at} has aged out while it was compared")
        data = read(log.file(segment), min(AT_ONCE, end - at, segment.end - at), at - segment.base)
        if not data:
            raise CorruptRecord(f"the log's file ends before log offset {at}: run metaq verify")
        checksum, at = crc32(data, checksum), at + len(data)
        tell()
    return checksum
