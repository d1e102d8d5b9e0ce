"""Which brokers are away: told once when one goes and once when it is back, however many requests meet it."""

import logging
import threading
import time
from collections.abc import Callable

from metaq.errors import ConnectionFailed, RouteNotFound, RouteProblem

logger = logging.getLogger(__name__)


class Presence:
    """What the connections of a client find out about brokers, by their addresses."""

    def __init__(self, name_of: Callable[[str], str | None]) -> None:
        """``name_of`` is the name of the broker at an address, ``None`` when none is known to be there."""
        self._name_of = name_of
        self.renew()

    def renew(self) -> None:
        """Know nothing yet, in a child of a fork."""
        self._guard = threading.Lock()  # guards what follows
        self._away: dict[str, float] = {}
        """Since when."""

    def lost(self, address: str, reason: str) -> None:
        """There is no connection to it, or one broke while answers were waited for."""
        name = self._name_of(address)
        with self._guard:
            is_news = name is not None and address not in self._away
            if is_news:
                self._away[address] = time.monotonic()
        if is_news:
            logger.warning("broker lost broker=%s address=%s reason=%s", name, address, reason)

    def heard(self, address: str) -> None:
        """It has answered."""
        if address not in self._away:  # looked at for every answer
            return
        with self._guard:
            since = self._away.pop(address, None)
        if since is not None:
            away_s = round(time.monotonic() - since, 1)
            logger.warning("broker back broker=%s address=%s away_s=%s", self._name_of(address), address, away_s)


def level_of(error: object) -> int:
    """How loud to log that something failed and is tried again: that somebody is away is told once, and not here."""
    unreachable = isinstance(error, RouteNotFound) and error.reason is RouteProblem.REGISTRY_UNREACHABLE
    return logging.DEBUG if unreachable or isinstance(error, ConnectionFailed) else logging.WARNING
