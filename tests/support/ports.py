"""Ports for what listens later, and for what listens there again."""

import contextlib
import itertools
import os
import random
import socket
from contextlib import ExitStack
from typing import Final

FIRST: Final = 20_000
SHARE: Final = 3_000
SHARES: Final = 4
"""Each process of the tests has its own. All are below those that the kernel gives to whoever asks for any or connects."""
BLOCK: Final = 12

_share: Final = int("".join(filter(str.isdecimal, os.environ.get("PYTEST_XDIST_WORKER", ""))) or 0) % SHARES
_bases: Final = range(FIRST + _share * SHARE, FIRST + (_share + 1) * SHARE, BLOCK)
_begin: Final = random.SystemRandom().randrange(len(_bases))
_circle: Final = itertools.cycle((*_bases[_begin:], *_bases[:_begin]))


def free_ports(count: int) -> range:
    """At most ``BLOCK`` ports beside one another that nobody listens on; given again when the whole share has been given."""
    assert count <= BLOCK
    while True:
        base = next(_circle)
        found = range(base, base + count)
        with contextlib.suppress(OSError), ExitStack() as stack:
            for port in found:
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return found


def hold_port(port: int = 0) -> socket.socket:
    """Keep a port, or a free one, until the socket is closed: it can be listened on, and nobody else is given it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", port))
    return holder
