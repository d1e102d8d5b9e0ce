"""The connections of the HTTP port: they carry requests one after the other, in TLS or not, and none can keep others out.

A connection has ``CONNECTION_S`` for the handshake, and again for each request: its coming, its bytes, and reading the answer.
Whoever answers can change what is left (``Deadline``). There are at most ``MOST_CONNECTIONS`` at once. When one more arrives,
the oldest that has not sent a whole request is closed; if all have, the oldest of all. So a client that sends its request at
once finds room, however many others send nothing.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import gevent
from gevent import pywsgi, socket

from metaq.replication.peers import TLS, Certificate
from metaq.server.http.http import DEADLINE

logger = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 256
"""Half of them for streams of events (``metaq.server.http.bounded``); each takes some 40 KB."""
CONNECTION_S: Final = 10.0
"""Prometheus's own default timeout."""


class Deadline:
    """The time that the current greenlet's request has left; when it is over, its connection is closed."""

    def __init__(self) -> None:
        self._limit: gevent.Timeout | None = None

    def within(self, seconds: float) -> None:
        """Allow so many seconds from now on, whatever was left before."""
        self.end()
        self._limit = gevent.Timeout.start_new(seconds)

    def end(self) -> None:
        """Set no limit any more."""
        if self._limit is not None:
            self._limit.close()
            self._limit = None


class _Handler(pywsgi.WSGIHandler):
    """Refuses malformed requests, and ends lost connections, without a log entry."""

    server: "HttpServer"
    deadline: Deadline

    def handle_one_request(self) -> Any:
        self.server.waits()
        self.deadline = Deadline()
        self.deadline.within(CONNECTION_S)
        try:
            return super().handle_one_request()
        finally:
            self.deadline.end()

    def get_environ(self) -> dict[str, Any]:
        scheme = "https" if hasattr(self.socket, "do_handshake") else "http"  # ``ssl`` is imported with TLS only
        return {**super().get_environ(), DEADLINE: self.deadline, "wsgi.url_scheme": scheme}

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
        """By greenlet, the oldest first: true while the connection waits for an answer to a whole request."""

    def waits(self) -> None:
        """Record that the current greenlet's connection waits for its next request: among those that do, it is the youngest."""
        if self._connections.pop(gevent.getcurrent(), None) is not None:  # else it was dropped to make room
            self._connections[gevent.getcurrent()] = False

    def asked(self) -> None:
        """Record that the current greenlet's connection has sent a request."""
        if gevent.getcurrent() in self._connections:
            self._connections[gevent.getcurrent()] = True

    def handle(self, connection: socket.socket, address: Any) -> None:
        """Handle one connection from its first byte to its last."""
        if len(self._connections) >= MOST_CONNECTIONS:
            self._end_oldest()
        self._connections[gevent.getcurrent()] = False
        try:
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
            )  # else an answer may wait 40 ms for an acknowledgement
            with gevent.Timeout(CONNECTION_S):
                secured = self._secured(connection)
            super().handle(secured, address)
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
