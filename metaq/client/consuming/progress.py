"""PURE: the offset up to which a queue is consumed when its messages are finished in any order."""

from collections import deque
from collections.abc import Iterable

from metaq.message import QueueOffset


class Progress:
    """The messages of one queue that are being consumed. Offsets are added in ascending order.

    Messages may be added twice, after a step that failed in the middle; those that are known already are ignored.
    """

    def __init__(self, begin: QueueOffset) -> None:
        self._open: deque[QueueOffset] = deque()
        self._finished: set[QueueOffset] = set()
        self._next = begin

    def add(self, offsets: Iterable[QueueOffset], next_offset: QueueOffset) -> None:
        """Add messages that are to be consumed; ``next_offset`` is the offset after them."""
        known = max(self._next, self._open[-1] + 1) if self._open else self._next
        self._open.extend(offset for offset in offsets if offset >= known)
        self._next = next_offset

    def finish(self, offset: QueueOffset) -> None:
        """Mark a message as consumed."""
        if not self._open or offset < self._open[0]:
            return
        self._finished.add(offset)
        while self._open and self._open[0] in self._finished:
            self._finished.discard(self._open.popleft())

    @property
    def position(self) -> QueueOffset:
        """The offset to commit: that of the oldest message that is not finished, so that none is skipped."""
        return self._open[0] if self._open else self._next

    @property
    def unfinished(self) -> int:
        """The number of messages that are not finished."""
        return len(self._open) - len(self._finished)

    @property
    def held(self) -> int:
        """The number of messages that are remembered: those from the oldest that is not finished on, also if finished."""
        return len(self._open)
