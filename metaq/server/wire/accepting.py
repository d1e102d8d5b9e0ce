"""New connections of a listening socket, as many as one turn of the loop takes."""

import errno
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import gevent

from metaq.server.wire.listeners import IPV4_IN_IPV6

logger = logging.getLogger(__name__)

ACCEPTS_A_TURN: Final = 64
ACCEPT_PAUSE_S: Final = 0.2


def new_connections(listening: socket.socket, watcher: Any, start: Callable[[], None]) -> Iterator[tuple[socket.socket, Any]]:
    """Yield new connections, not blocking, and their addresses, IPv4 as IPv4.

    Without descriptors or memory for more, stop the watcher; ``start`` is called after a pause if the socket is still open.
    """
    for _ in range(ACCEPTS_A_TURN):
        try:
            connection, address = listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno == errno.ECONNABORTED:
                continue
            logger.error("cannot accept, pausing reason=%s", error)
            watcher.stop()
            gevent.spawn_later(ACCEPT_PAUSE_S, _start_again, listening, start)
            return
        connection.setblocking(False)
        yield connection, (address[0].removeprefix(IPV4_IN_IPV6), *address[1:])


def _start_again(listening: socket.socket, start: Callable[[], None]) -> None:
    if listening.fileno() >= 0:
        start()
