"""The connections of the HTTP port: each carries one request, in TLS or not, and none can keep others out.

A connection has ``CONNECTION_S`` for everything: the handshake, the request, and reading the answer. There are at most
``MOST_CONNECTIONS`` at once. When one more arrives, the oldest that has not sent a whole request is closed; if all have, the
oldest of all. So a client that sends its request at once finds room, however many others send nothing.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import gevent
from gevent import pywsgi, socket

from metaq.replication.peers import TLS, Certificate

logger = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 16
CONNECTION_S: Final = 10.0
"""Prometheus's own default timeout."""


class _Handler(pywsgi.WSGIHandler):
    """Refuses malformed requests, and ends lost connections, without a log entry."""

    server: "HttpServer"

    def handle_one_response(self) -> None:
        self.server.asked()
        super().handle_one_response()

    def handle_error(self, kind: Any, error: Any, trace: Any) -> None:
        if issubclass(kind, Exception) and not issubclass(kind, OSError):
            super().handle_error(kind, error, trace)
        else:  # the client is gone, or this connection is being closed: nobody would read an error
            self.close_connection = True

    def _handle_client_error(self, error: Exception) -> tuple[str, bytes]:
        return "400", b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HttpServer(pywsgi.WSGIServer):
    """One port. A first byte of TLS starts a handshake, as on every other port."""

    def __init__(
        self, listening: socket.socket, answer: Callable[..., Iterable[bytes]], certificate: Certificate | None
    ) -> None:
        """Prepare the server. ``answer`` is a WSGI application."""
        # without a name, pywsgi would look up its own in DNS and wait for that
        environ = {"SERVER_NAME": listening.getsockname()[0]}
        super().__init__(listening, answer, log=None, error_log=None, environ=environ, handler_class=_Handler)
        self._certificate = certificate
        self._connections: dict[Any, bool] = {}
        """By greenlet, the oldest first: true once the connection has sent its request."""

    def asked(self) -> None:
        """Record that the current greenlet's connection has sent its request."""
        if gevent.getcurrent() in self._connections:
            self._connections[gevent.getcurrent()] = True

    def handle(self, connection: socket.socket, address: Any) -> None:
        """Handle one connection from its first byte to its last."""
        if len(self._connections) >= MOST_CONNECTIONS:
            self._end_oldest()
        self._connections[gevent.getcurrent()] = False
        try:
            with gevent.Timeout(CONNECTION_S):
                super().handle(self._secured(connection), address)
        except (OSError, gevent.Timeout) as error:  # the client is gone, or too slow
            logger.debug("http connection lost reason=%s", error)
        finally:
            self._connections.pop(gevent.getcurrent(), None)

    def _secured(self, connection: socket.socket) -> socket.socket:
        """Return the connection, in TLS when it begins with a handshake. Raise ``OSError`` when that fails."""
        if self._certificate is None or connection.recv(1, socket.MSG_PEEK) != bytes((TLS,)):
            return connection
        secured = self._certificate.secured(connection)
        try:
            secured.do_handshake()
        except BaseException:
            secured.close()
            raise
        return secured

    def _end_oldest(self) -> None:
        silent = (connection for connection, asked in self._connections.items() if not asked)
        oldest = next(silent, None) or next(iter(self._connections))
        del self._connections[oldest]
        logger.info("http connection dropped reason=%d others are open, too", MOST_CONNECTIONS)
        oldest.kill(block=False)
