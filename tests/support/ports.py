"""Ports for servers that listen later, or that listen on the same port again."""

import itertools
import os
import random
import socket
from collections import deque
from contextlib import ExitStack
from typing import Final

FIRST: Final = 20_000
SHARE: Final = 3_000
SHARES: Final = 4
"""Each process of the tests has its own. All are below those that the kernel gives to whoever asks for any or connects."""
BLOCK: Final = 10
"""The last port of a block says whose it is: what a process has bound, and nobody may bind beside it."""
KEPT: Final = 30
"""Blocks that a process keeps; older ones it gives back. A share has 300 for a process of the tests and those it starts."""

_share: Final = int("".join(filter(str.isdecimal, os.environ.get("PYTEST_XDIST_WORKER", ""))) or 0) % SHARES
_bases: Final = range(FIRST + _share * SHARE, FIRST + (_share + 1) * SHARE, BLOCK)
_begin: Final = random.SystemRandom().randrange(len(_bases))
_circle: Final = itertools.cycle((*_bases[_begin:], *_bases[:_begin]))
_kept: Final[deque[socket.socket]] = deque()


def free_ports(count: int) -> range:
    """Ports beside one another, less than ``BLOCK``, that nobody listens on, and no other caller in any process is given."""
    assert count < BLOCK
    for base in itertools.islice(_circle, len(_bases)):
        found = range(base, base + count)
        claim = socket.socket()
        try:
            claim.bind(("127.0.0.1", base + BLOCK - 1))
            with ExitStack() as stack:
                for port in found:
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            claim.close()
            continue
        _kept.append(claim)
        if len(_kept) > KEPT:
            _kept.popleft().close()
        return found
    raise AssertionError(f"all ports of {_bases} are taken: more processes than {len(_bases) // KEPT} share them")


def hold_port(port: int = 0) -> socket.socket:
    """Keep a port, or a free one, until the socket is closed: it can be listened on, and nobody else is given it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("127.0.0.1", port))
    return holder
