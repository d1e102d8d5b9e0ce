"""Ports for what is deployed: chosen long before anybody listens there."""

import contextlib
import os
import random
import socket
from contextlib import ExitStack
from typing import Final, NamedTuple

WIDTH: Final = 8
"""Ports of one broker, those among them that it takes beside what its settings name: above listen, two below remoting."""
FIRST: Final = 20_000
SHARE: Final = 3_000
SHARES: Final = 4
"""Each process of the tests has its own. All are below those that the kernel gives to whoever connects to something."""


class Ports(NamedTuple):
    """Of one broker, by its settings."""

    listen: int
    remoting_listen: int
    registry_listen: int
    replication_listen: int
    http_listen: int

    def settings(self, *names: str) -> dict[str, str]:
        """The addresses, of these names only."""
        return {name: f"127.0.0.1:{getattr(self, name)}" for name in names or self._fields}


def broker_ports(count: int) -> list[Ports]:
    """For so many brokers; nobody listens there or beside them now."""
    share = int("".join(filter(str.isdecimal, os.environ.get("PYTEST_XDIST_WORKER", ""))) or 0) % SHARES
    begin = FIRST + share * SHARE
    found: list[Ports] = []
    with ExitStack() as stack:
        while len(found) < count:
            base = random.SystemRandom().randrange(begin, begin + SHARE, WIDTH)
            with contextlib.suppress(OSError):
                for port in range(base, base + WIDTH):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
                found.append(Ports(base, base + 4, base + 5, base + 6, base + 7))
    return found
