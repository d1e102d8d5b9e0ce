"""The answer to slaves that connect to a replica that is a slave itself."""

import logging
from typing import Any, Final

import gevent
from gevent import socket

from metaq.errors import MetaqError, ProtocolError
from metaq.replication.feeder import HELLO_TIMEOUT_S, MOST_NAMELESS, read_hello
from metaq.replication.frames import encode_control
from metaq.replication.peers import TLS, Certificate

logger = logging.getLogger(__name__)

NO_MASTER: Final = "this replica is a slave itself"


class TurningAway:
    """Tells slaves that this is no master, in TLS if they use it: otherwise they would report an error of TLS."""

    def __init__(self, certificate: Certificate | None) -> None:
        self._certificate = certificate
        self._greenlets: dict[Any, None] = {}  # the oldest first

    def serve(self, connection: socket.socket, log_end: int) -> None:
        """Answer a new connection in a greenlet of its own; the oldest one of too many is ended."""
        if len(self._greenlets) >= MOST_NAMELESS:
            oldest = next(iter(self._greenlets))
            del self._greenlets[oldest]
            oldest.kill(block=False)
        greenlet = gevent.spawn(self._answer, connection, log_end)
        self._greenlets[greenlet] = None
        greenlet.link(self._forget)

    def _forget(self, greenlet: Any) -> None:
        self._greenlets.pop(greenlet, None)

    def stop(self) -> None:
        """End all connections."""
        gevent.killall(list(self._greenlets))

    def _answer(self, connection: socket.socket, log_end: int) -> None:
        try:
            with gevent.Timeout(HELLO_TIMEOUT_S, ProtocolError(f"no hello within {HELLO_TIMEOUT_S:.0f} s")):
                if self._certificate is not None and connection.recv(1, socket.MSG_PEEK)[:1] == bytes((TLS,)):
                    connection = self._certificate.secured(connection)
                    connection.do_handshake()
                read_hello(connection)  # a connection that is closed with unread bytes may lose what was sent
                connection.sendall(encode_control(log_end, {"no_master": NO_MASTER}))
        except (OSError, MetaqError) as error:
            logger.debug("cannot tell a slave that this is no master reason=%s", error)
        finally:
            connection.close()
