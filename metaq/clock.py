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


class ManualClock:
    """A clock that a test moves by hand; both clocks advance together."""

    def __init__(self, now_ms: int = 1_400_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 0.0

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self._now_ms += round(seconds * 1000)
        self._monotonic += seconds

    def jump(self, milliseconds: int) -> None:
        """Change the wall clock alone, as an administrator or NTP would."""
        self._now_ms += milliseconds
