"""PURE: the brokers that sends avoid for a while, because they were slow or failed."""

from typing import Final

# typed as a tuple of any length: the compiled module mistakes a fixed-length tuple of floats for one that was never set
ISOLATION: Final[tuple[tuple[float, float], ...]] = ((3.0, 180.0), (2.0, 120.0), (1.0, 60.0), (0.55, 30.0))
"""The seconds that a send took at least, and the seconds for which its broker is then avoided."""
FAILURE_ISOLATION_S: Final = 60.0


class BrokerHealth:
    """The time until which each broker is avoided. Times are readings of a monotonic clock, in seconds."""

    def __init__(
        self, isolation: tuple[tuple[float, float], ...] = ISOLATION, failure_isolation_s: float = FAILURE_ISOLATION_S
    ) -> None:
        """Take the times for which brokers are avoided: as ``ISOLATION`` when they were slow, and when they failed."""
        self._isolation = isolation
        self._failure_isolation_s = failure_isolation_s
        self._until: dict[str, float] = {}

    def took(self, broker_name: str, seconds: float, now: float) -> None:
        """Note that a send was answered after ``seconds``; a quick answer makes the broker available again."""
        isolation = next((isolation for limit, isolation in self._isolation if seconds >= limit), 0.0)
        if isolation:
            self._until[broker_name] = now + isolation
        else:
            self._until.pop(broker_name, None)

    def failed(self, broker_name: str, now: float) -> None:
        """Note that a send was not answered, or was refused for a reason that may not apply to another broker."""
        self._until[broker_name] = now + self._failure_isolation_s

    def is_available(self, broker_name: str, now: float) -> bool:
        """Return whether sends may choose the broker now."""
        return self._until.get(broker_name, now) <= now

    def available_at(self, broker_name: str) -> float:
        """Return the time until which the broker is avoided; 0 when it is not."""
        return self._until.get(broker_name, 0.0)
