"""A connection of the HTTP port on the long way: in a greenlet that reads requests by all rules."""

import time
from typing import Any, Final

CONNECTION_S: Final = 10.0
"""Prometheus's own default timeout."""


class Away:
    """One such connection."""

    def __init__(self, greenlet: Any, all_of_port: "dict[Any, Away]") -> None:
        """Record a connection that ``greenlet`` serves; the port has it among all of its own until it is dropped."""
        self._greenlet = greenlet
        self._all_of_port = all_of_port
        self.asked = False
        """True while it waits for an answer to a whole request."""
        self.since = time.monotonic()
        """The monotonic time at which it began to wait for its next request."""

    def waits(self) -> None:
        """Record that its next request is waited for."""
        self.asked, self.since = False, time.monotonic()

    def drop(self) -> None:
        """Close it."""
        del self._all_of_port[self._greenlet]
        self._greenlet.kill(block=False)
