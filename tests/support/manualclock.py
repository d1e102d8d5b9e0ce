"""A clock that stands still until it is moved."""


class ManualClock:
    """A clock that a test moves by hand: a wall clock and a monotonic one."""

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
