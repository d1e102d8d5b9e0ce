"""Who a client is, and the ids of its messages (specs: remoting protocol, section 5.11; store format, section 2)."""

import itertools
import os
import secrets
import socket
import time
from typing import Final

from metaq.protocol.ids import make_unique_id

_ANYWHERE: Final = ("192.0.2.1", 9)
"""An address that is never sent to: choosing the way to it tells this machine's own address."""
_instances: Final = itertools.count()


def own_address() -> str:
    """The IPv4 address of this machine as others are likely to see it; loopback when it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANYWHERE)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def client_id(address: str, instance: str) -> str:
    """``address@instance``; without an instance's name, one that no other client has."""
    return f"{address}@{instance or f'{os.getpid()}#{time.time_ns()}.{next(_instances)}'}"


class UniqueIds:
    """Message ids as Java clients make them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.renew()

    def renew(self) -> None:
        """Give out no id that the parent gives out, in a child of a fork."""
        self._process = os.getpid()
        self._number = secrets.randbits(32)
        self._counter = itertools.count()

    def next(self) -> str:
        """An id that was never given out before."""
        now_ms = time.time_ns() // 1_000_000
        return make_unique_id(self._address, self._process, self._number, now_ms, next(self._counter))
