"""The segments of the commit log: files named by their 20-digit base offset."""

from pathlib import Path
from typing import Final

from metaq.protocol.record import CHECKSUM_SIZE, FIXED_SIZE

NAME_DIGITS: Final = 20
CHUNK: Final = 4 * 1024 * 1024
SMALLEST_RECORD: Final = FIXED_SIZE + CHECKSUM_SIZE


class Segment:
    """One file of the log: log offsets ``base`` … ``base + capacity``."""

    __slots__ = ("base", "begun_ms", "capacity", "path", "view")

    def __init__(self, base: int, capacity: int, path: Path) -> None:
        self.base = base
        self.capacity = capacity
        self.path = path
        self.view: memoryview | None = None
        self.begun_ms: int | None = None
        """Store time of the first record; ``None`` while it is not known (``CommitLog.begun_ms``)."""

    @property
    def end(self) -> int:
        """The log offset after the segment."""
        return self.base + self.capacity


def segment_name(base: int) -> str:
    """Return the name of the segment at ``base``: 20 decimal digits, so that names sort like numbers."""
    return f"{base:0{NAME_DIGITS}d}"


def is_segment_name(name: str) -> bool:
    """Return whether a file name has the form of ``segment_name``."""
    return len(name) == NAME_DIGITS and name.isascii() and name.isdecimal()


def chunk_end(log_offset: int, segment: Segment) -> int:
    """Return where a read from ``log_offset`` on should end: at a multiple of ``CHUNK`` in the file.

    A page of a hole counts as data once it was read. So a search for data must not continue in the middle of a page (or of a
    larger folio) that it has just read.
    """
    at = log_offset - segment.base
    return segment.base + min(segment.capacity, (at // CHUNK + 1) * CHUNK)
