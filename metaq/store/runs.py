"""PURE: which records of a queue lie next to one another in the log, as the units of the queue say."""

from typing import Final

from librt.strings import read_i32_be, read_i64_be

from metaq.store.log.segments import SMALLEST_RECORD
from metaq.store.queues.consumequeue import FILLER_SIZE, UNIT_SIZE

Run = tuple[int, int, int]
"""Begin and end of adjacent records in the log, and their number."""
Found = tuple[list[Run], int, int]
"""Runs, and how many messages and bytes they are together."""

_SIZE_AT: Final = 8


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
