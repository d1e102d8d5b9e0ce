"""Clocks that are passed as parameters: the broker and the store never read the system clock themselves."""

import time
from typing import Protocol


class Clock(Protocol):
    """A wall clock, which may jump, and a monotonic clock, which only measures."""

    def now_ms(self) -> int:
        """Return the milliseconds since 1970-01-01 UTC; they may jump in both directions."""
        ...

    def monotonic(self) -> float:
        """Return the seconds since some fixed moment; they never go back."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()
