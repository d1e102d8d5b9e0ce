"""Brokers that cannot be reached: one log line when a broker is lost and one when it is back, however many requests fail."""

import logging
import threading
import time
from collections.abc import Callable

from metaq.errors import ConnectionFailed, RouteNotFound, RouteProblem

logger = logging.getLogger(__name__)


class Presence:
    """The brokers that the connections of a client have lost, by their addresses. Thread-safe."""

    def __init__(self, name_of: Callable[[str], str | None]) -> None:
        """Take ``name_of``, which returns the name of the broker at an address, or ``None`` when no broker is known there."""
        self._name_of = name_of
        self.renew()

    def renew(self) -> None:
        """Forget everything, in a child of a fork."""
        self._guard = threading.Lock()  # guards what follows
        self._away: dict[str, float] = {}
        """The moments at which brokers were lost, by address."""

    def lost(self, address: str, reason: str) -> None:
        """Note that a broker cannot be connected to, or that a connection broke while requests were in flight."""
        name = self._name_of(address)
        with self._guard:
            is_news = name is not None and address not in self._away
            if is_news:
                self._away[address] = time.monotonic()
        if is_news:
            logger.warning("broker lost broker=%s address=%s reason=%s", name, address, reason)

    def heard(self, address: str) -> None:
        """Note that a broker has answered."""
        if address not in self._away:  # checked for every answer, so without the lock
            return
        with self._guard:
            since = self._away.pop(address, None)
        if since is not None:
            away_s = round(time.monotonic() - since, 1)
            logger.warning("broker back broker=%s address=%s away_s=%s", self._name_of(address), address, away_s)


def level_of(error: object) -> int:
    """Return the level at which to log an error that is followed by a retry.

    It is DEBUG when a broker or registry cannot be reached, because ``Presence`` logs that once, else WARNING.
    """
    unreachable = isinstance(error, RouteNotFound) and error.reason is RouteProblem.REGISTRY_UNREACHABLE
    return logging.DEBUG if unreachable or isinstance(error, ConnectionFailed) else logging.WARNING
