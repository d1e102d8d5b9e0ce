"""Open messages of one pop. A broker may hold a million of them, so three of their numbers are kept in one."""

from collections.abc import Iterator
from typing import Final

_TIMES_BITS: Final = 31
_AGE_AT: Final = 1 + _TIMES_BITS
_TIMES: Final = (1 << _TIMES_BITS) - 1


class Bunch:
    """Open messages of one delivery. They are ordered by when they become visible again."""

    __slots__ = ("_history", "due_ms", "first", "open", "pop_ms")

    def __init__(
        self, first: int, bits: int, pop_ms: int, due_ms: int, times: int, first_ms: int, *, given_back: bool = False
    ) -> None:
        self.first = first
        self.open = bits
        """Bit 0 is the message ``first``."""
        self.pop_ms = pop_ms
        """Names the delivery, in Unix milliseconds."""
        self.due_ms = due_ms
        # 16 bytes less than three attributes, as long as the first delivery was less than 12 days before this one
        self._history = (pop_ms - first_ms) << _AGE_AT | (times & _TIMES) << 1 | given_back

    def __lt__(self, other: "Bunch") -> bool:
        return self.due_ms < other.due_ms

    @property
    def times(self) -> int:
        """Deliveries so far, this one included."""
        return self._history >> 1 & _TIMES

    @property
    def first_ms(self) -> int:
        """The ``pop_ms`` of the first delivery."""
        return self.pop_ms - (self._history >> _AGE_AT)

    @property
    def given_back(self) -> bool:
        """True while its one message is delayed: nobody has it until ``due_ms``."""
        return bool(self._history & 1)

    def end_delay(self) -> None:
        """Take note that its one message is not delayed any more."""
        self._history = self._history >> 1 << 1

    def ordinals(self) -> Iterator[int]:
        """Iterate over the open messages, in order."""
        bits, ordinal = self.open, self.first
        while bits:
            skipped = (bits & -bits).bit_length() - 1
            ordinal += skipped
            yield ordinal
            bits >>= skipped + 1
            ordinal += 1
