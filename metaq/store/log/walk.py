"""The search for intact records in segments whose content is not known: damaged ones, or those that a crash left."""

from collections.abc import Iterator
from typing import NamedTuple

from metaq.protocol.record import BLANK, BLANK_MAGIC, BLANK_SIZE, HEADER_SIZE, MAGIC, MAGIC_BYTES, is_intact
from metaq.protocol.text.messages import Stored
from metaq.store.files.disk import File
from metaq.store.log.segments import CHUNK, SMALLEST_RECORD, Segment, chunk_end


class Gap(NamedTuple):
    """A range of the log that holds no record to keep, usually no intact one, although such a record follows it."""

    start: int
    end: int


def walk(segments: list[tuple[Segment, File]], start: int) -> Iterator[Stored | Gap]:
    """Yield all intact records from log offset ``start`` on, and the gaps between them.

    The bytes after the last record are not reported: the caller knows where that one ended.
    """
    bad: int | None = None
    for segment, file in segments:
        steps = _SegmentWalk(segment, file)
        for stored in steps.records(max(start, segment.base)):
            if bad is None and stored.log_offset > steps.expected:
                bad = steps.expected
            if bad is not None:
                yield Gap(bad, stored.log_offset)
                bad = None
            steps.expected = stored.log_offset + stored.size
            yield stored
        if bad is None and steps.expected < segment.end:
            bad = steps.expected


class _SegmentWalk:
    """A search for the intact records of one segment, through a moving window of the file."""

    def __init__(self, segment: Segment, file: File) -> None:
        self._segment = segment
        self._file = file
        self._window = memoryview(b"")
        self._window_at = 0
        self.expected = segment.base
        """The log offset at which the next record should begin."""

    def records(self, start: int) -> Iterator[Stored]:
        """Yield the intact records in order. When a blank record closes the segment, ``expected`` becomes the segment's end."""
        segment = self._segment
        at = self.expected = start
        while at + BLANK_SIZE <= segment.end:
            window = self._bytes(at, SMALLEST_RECORD)
            size, magic = BLANK.unpack_from(window)
            if magic == MAGIC and SMALLEST_RECORD <= size <= segment.end - at:
                window = self._bytes(at, size)
                if is_intact(window[:size], at):
                    yield Stored(window, 0, size, at)
                    at += size
                    continue
            if magic == BLANK_MAGIC and size == segment.end - at:
                self.expected = segment.end
                return
            at = self._next_candidate(at)

    def _bytes(self, at: int, size: int) -> memoryview:
        """Return at least ``size`` bytes from log offset ``at`` on, with zeros after the file's end."""
        low = at - self._window_at
        if low < 0 or low + size > len(self._window):
            data = self._file.read(max(size, min(CHUNK, self._segment.end - at)), at - self._segment.base)
            self._window = memoryview(data.ljust(size, b"\0"))
            self._window_at = at
            low = 0
        return self._window[low:]

    def _next_candidate(self, at: int) -> int:
        """Return the next log offset after ``at`` where a record may begin: there is the magic, then that very log offset."""
        segment = self._segment
        frontier = at + 1
        while frontier < segment.end:
            data_at = segment.base + self._file.next_data(frontier - segment.base)
            if data_at < frontier:  # the file was cut short, and ends there
                break
            # a header across the border of two chunks is seen whole in the second
            place = max(at + 1, data_at - HEADER_SIZE)
            frontier = chunk_end(data_at, segment)
            data = self._file.read(frontier - place, place - segment.base)
            found = data.find(MAGIC_BYTES, 4)
            while found >= 0:
                begin = place + found - 4
                if data[found + 24 : found + 32] == begin.to_bytes(8):
                    return begin
                found = data.find(MAGIC_BYTES, found + 1)
        return segment.end
