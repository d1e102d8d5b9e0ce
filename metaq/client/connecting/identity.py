"""The id of a client, and the ids of its messages (specs: remoting protocol, section 5.11; store format, section 2)."""

import itertools
import os
import secrets
import socket
import time
from typing import Final

from metaq.protocol.ids import make_unique_id, unique_id_prefix

_ANYWHERE: Final = ("192.0.2.1", 9)
"""An address that no packet is sent to: connecting a UDP socket to it selects a route, which tells this machine's address."""
_instances: Final = itertools.count()


def own_address() -> str:
    """Return the IPv4 address of this machine as others are likely to see it; loopback when it has no other."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ANYWHERE)
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def client_id(address: str, instance: str) -> str:
    """Return ``address@instance``; when ``instance`` is empty, with a name that no other client has."""
    return f"{address}@{instance or f'{os.getpid()}#{time.time_ns()}.{next(_instances)}'}"


class UniqueIds:
    """A generator of message ids in the form of the Java clients."""

    def __init__(self, address: str) -> None:
        self._address = address
        self.renew()

    def renew(self) -> None:
        """Start another sequence in a child of a fork, so that no id is one of the parent's."""
        self._prefix = unique_id_prefix(self._address, os.getpid(), secrets.randbits(32))
        self._counter = itertools.count()

    def next(self) -> str:
        """Return an id that was never returned before."""
        return make_unique_id(self._prefix, time.time_ns() // 1_000_000, next(self._counter))
