"""A window of the log, and the intact records in it."""

from collections.abc import Iterator

from metaq.protocol.record import BLANK, BLANK_MAGIC, BLANK_SIZE, HEADER_SIZE, MAGIC, MAGIC_BYTES, is_intact
from metaq.store.log.segments import SMALLEST_RECORD


class Window:
    """A window of the log: bytes from ``at`` on, at most up to ``end``, where a record or the segment ends."""

    def __init__(self, data: memoryview, at: int, end: int, segment_end: int) -> None:
        self.at = at
        """The log offset at which the next window begins, once ``records`` is exhausted."""
        self.wanted = 0
        """The size of a record that does not fit into the window."""
        self._data = data
        self._base = at
        self._end = end
        self._segment_end = segment_end

    def records(self) -> Iterator[tuple[memoryview, int]]:
        """Yield the intact records, and their log offsets."""
        limit = self._base + len(self._data)
        least = BLANK_SIZE if limit == self._end else HEADER_SIZE
        while self.at + least <= limit:
            rest = self._data[self.at - self._base :]
            size, magic = BLANK.unpack_from(rest)
            if magic == MAGIC and SMALLEST_RECORD <= size <= self._end - self.at:
                if size > len(rest):
                    self.wanted = size
                    return
                if is_intact(rest[:size], self.at):
                    yield rest[:size], self.at
                    self.at += size
                    continue
            if magic == BLANK_MAGIC and size == self._segment_end - self.at:
                self.at = self._end
                return
            self._skip(bytes(rest))
        if limit == self._end:
            self.at = self._end

    def _skip(self, rest: bytes) -> None:
        """Go to the next log offset where a record may begin: there is the magic, then that very log offset."""
        found = rest.find(MAGIC_BYTES, 5)
        while found >= 0:
            place = self.at + found - 4
            if rest[found + 24 : found + 32] == place.to_bytes(8):
                self.at = place
                return
            found = rest.find(MAGIC_BYTES, found + 1)
        # a header may begin in this window and end in the next
        self.at += max(1, len(rest) - HEADER_SIZE + 1)
