"""Clocks of consumers that are too far ahead of the broker's.

RocketMQ's clients compare the time of a pop, which is the broker's, with their own clock. One that is ahead by the whole length
of its leases takes every message for late, and drops it. A pop says when it was made by the client's clock.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from metaq.address import Address
from metaq.clock import Clock

MOST: Final = 1000
"""Clients that are remembered."""
SHOWN: Final = 20
KEPT_S: Final = 120.0
"""How long a pop counts: a consumer makes one after the other."""


class ClockAhead(NamedTuple):
    """A client whose last pop was made by such a clock."""

    group: str
    client: str
    """Its address."""
    ahead_ms: int
    """At least: the way of the request took a while."""
    invisible_ms: int
    """The length of the leases that it asked for."""


class ConsumerClocks:
    """The clients whose clocks are too far ahead."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ahead: dict[tuple[str, str], tuple[float, ClockAhead]] = {}  # the latest last

    def note(self, group: str, address: Sequence[Any], born_ms: int, invisible_ms: int) -> None:
        """Take a pop into account that was made at ``born_ms``, by the client's clock; 0: it does not say.

        The host and port of the client come first in ``address``.
        """
        ahead_ms = born_ms - self._clock.now_ms()
        if ahead_ms < invisible_ms and not self._ahead:
            return
        client = str(Address(*address[:2]))
        before = self._ahead.pop((group, client), None)
        if ahead_ms < invisible_ms:
            return
        if before is None and len(self._ahead) >= MOST:
            del self._ahead[next(iter(self._ahead))]
        self._ahead[group, client] = self._clock.monotonic(), ClockAhead(group, client, ahead_ms, invisible_ms)

    def ahead(self) -> Sequence[ClockAhead]:
        """Return the clients that popped lately by such a clock, the latest first, at most ``SHOWN``."""
        since_s = self._clock.monotonic() - KEPT_S
        return [found for at_s, found in reversed(self._ahead.values()) if at_s >= since_s][:SHOWN]
