"""PURE: which brokers to leave alone for a while, because they were slow or failed."""

from typing import Final

_ISOLATION: Final = ((3.0, 180.0), (2.0, 120.0), (1.0, 60.0), (0.55, 30.0))
"""Seconds that a send took, and how long its broker is then passed over."""
_FAILURE_ISOLATION_S: Final = 60.0


class BrokerHealth:
    """Remembers until when each broker is passed over. Times are readings of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def took(self, broker_name: str, seconds: float, now: float) -> None:
        """A send was answered after so long; a quick answer makes the broker available again."""
        isolation = next((isolation for limit, isolation in _ISOLATION if seconds >= limit), 0.0)
        if isolation:
            self._until[broker_name] = now + isolation
        else:
            self._until.pop(broker_name, None)

    def failed(self, broker_name: str, now: float) -> None:
        """A send was not answered, or refused for a reason that another broker may not have."""
        self._until[broker_name] = now + _FAILURE_ISOLATION_S

    def is_available(self, broker_name: str, now: float) -> bool:
        """Whether nothing is known against it."""
        return self._until.get(broker_name, now) <= now

    def available_at(self, broker_name: str) -> float:
        """Until when it is passed over; 0 when it is not."""
        return self._until.get(broker_name, 0.0)
