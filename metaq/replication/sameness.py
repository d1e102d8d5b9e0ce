"""That two logs are the same: checksums of ranges, which a slave sends and its master compares with its own log.

Epochs tell up to where two logs were written by the same masters, not that both still have what was written. So a slave proves,
each time that it connects, what is behind the last log offset before which its log is known to be right::

    proved │ range │ range │ … │ range │ end          [[end of a range, its CRC-32], …]

The master answers with the begin of the first range that is another one in its log. Ranges are short, so that little is copied
again, and grow with what there is to prove: a hello has at most ``MOST_RANGES``. None is longer than ``MOST_RANGE_BYTES``:
that is what the master reads for somebody who knows nothing of the log.

Where damage of its own is known to it, the master compares nothing: what the slave has there may be right.
"""

import zlib
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from metaq.errors import CorruptRecord
from metaq.store.files.filecache import Read
from metaq.store.log.commitlog import CommitLog

RANGE_BYTES: Final = 1024 * 1024
MOST_RANGES: Final = 4096
MOST_RANGE_BYTES: Final = 64 * 1024 * 1024
AT_ONCE: Final = 512 * 1024
"""Read and summed up in one go: half a millisecond."""

Ranges = list[list[int]]
"""Of each its end and its CRC-32."""


def _nobody() -> None:
    """Who need not hear how far it is."""


def ranges(log: CommitLog, start: int, read: Read) -> Ranges:
    """What proves a log from a log offset to its end. ``CorruptRecord`` when that is more than a hello can prove."""
    size = max(RANGE_BYTES, -(-(log.end - start) // MOST_RANGES))
    if size > MOST_RANGE_BYTES:
        raise CorruptRecord(
            f"the log is known to be right before {start} only, of {log.end}; empty the data folder to copy all"
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
    """Where the first of these ranges begins that is another one in this log; ``tell`` is called again and again meanwhile.

    Those that end behind ``end`` are not compared, nor what has aged out here, nor what is ``damaged``.
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
    """Whether what was sent is ranges from a log offset to another one."""
    if not isinstance(theirs, list) or len(theirs) > MOST_RANGES:
        return False
    if not all(isinstance(row, list) and [type(part) for part in row] == [int, int] for row in theirs):
        return False
    borders = [start, *(row[0] for row in theirs)]
    return borders[-1] == end and all(0 < stop - begin <= MOST_RANGE_BYTES for begin, stop in pairwise(borders))


def _checksum(log: CommitLog, start: int, end: int, read: Read, tell: Callable[[], None]) -> int:
    """Of all bytes, also of those behind the last record of a segment."""
    checksum, at = 0, start
    while at < end:
        segment = log.find(at)
        if segment is None:
            raise CorruptRecord(f"log offset {at} has aged out while it was compared")
        data = read(log.file(segment), min(AT_ONCE, end - at, segment.end - at), at - segment.base)
        if not data:
            raise CorruptRecord(f"the log's file ends before log offset {at}: run metaq verify")
        checksum, at = zlib.crc32(data, checksum), at + len(data)
        tell()
    return checksum
