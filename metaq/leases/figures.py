"""Figures of leases: how many messages of a partition, or of several, are in which state."""

from collections.abc import Iterable
from typing import NamedTuple, Self


class PlaceFigures(NamedTuple):
    """The leases of one group in one partition, in messages and queue offsets."""

    base: int
    """The lowest message that is not finished: the group's offset."""
    next: int
    """The first message that was never given."""
    end: int
    """The offset that the next message will have."""
    fresh: int
    """Messages that were never given."""
    in_flight: int
    """Those that consumers have."""
    waiting: int
    """Those that are to be given next: their leases or delays have ended, or those before them with their keys are done."""
    delayed: int
    """Those that were given back with a delay that goes on."""
    lined: int
    """Those that were never given because others with their keys are before them."""
    oldest_ms: int | None
    """When the message at ``base`` was given for the first time (Unix time); ``None`` when it was not, or nothing is open."""
    first_ready: int | None
    """The lowest message that can be given now; ``None`` when there is none."""

    @property
    def ready(self) -> int:
        """Messages that can be given now."""
        return self.fresh + self.waiting

    @property
    def lag(self) -> int:
        """Messages that the group has not finished."""
        return self.ready + self.in_flight + self.delayed + self.lined


class LeaseSums(NamedTuple):
    """The leases of one group in several partitions."""

    ready: int
    in_flight: int
    delayed: int
    lined: int
    oldest_ms: int | None

    @classmethod
    def of(cls, figures: Iterable[PlaceFigures]) -> Self:
        """Add up the figures of partitions."""
        ready = in_flight = delayed = lined = 0
        oldest_ms = None
        for each in figures:
            ready += each.ready
            in_flight += each.in_flight
            delayed += each.delayed
            lined += each.lined
            if each.oldest_ms is not None:
                oldest_ms = each.oldest_ms if oldest_ms is None else min(oldest_ms, each.oldest_ms)
        return cls(ready, in_flight, delayed, lined, oldest_ms)
