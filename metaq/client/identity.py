"""Who a client is, and the ids of its messages (specs: remoting protocol, section 5.11; store format, section 2)."""

import datetime
import itertools
import os
import secrets
import socket
import struct
import time
from typing import Final

_UNIQUE_ID: Final = struct.Struct(">4sHIIH")  # address, process, random, milliseconds of the month, counter
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
    """Message ids of 32 hexadecimal digits, made like those of Java clients."""

    def __init__(self, address: str) -> None:
        self._address = socket.inet_aton(address)
        self._process = os.getpid() & 0xFFFF
        self._random = secrets.randbits(32)
        self._counter = itertools.count()
        self._month_begins_ms = self._next_begins_ms = 0

    def next(self) -> str:
        """An id that was never given out before."""
        now_ms = time.time_ns() // 1_000_000
        if now_ms >= self._next_begins_ms:
            self._begin_month()
        passed = (now_ms - self._month_begins_ms) & 0xFFFFFFFF
        counter = next(self._counter) & 0xFFFF
        return _UNIQUE_ID.pack(self._address, self._process, self._random, passed, counter).hex().upper()

    def _begin_month(self) -> None:
        first = datetime.datetime.now(datetime.UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        self._month_begins_ms = round(first.timestamp() * 1000)
        self._next_begins_ms = round((first + datetime.timedelta(days=32)).replace(day=1).timestamp() * 1000)
