"""The connections of the HTTP port: they carry requests one after the other, in TLS or not, and none can keep others out.

A connection has ``CONNECTION_S`` for the handshake, and again for each request: its coming, its bytes, and reading the answer.
Whoever answers can change what is left (``Deadline``). There are at most ``MOST_CONNECTIONS`` at once. When one more arrives,
the oldest that has not sent a whole request is closed; if all have, the oldest of all. So a client that sends its request at
once finds room, however many others send nothing.
"""

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, cast
from urllib.parse import unquote

import gevent
from gevent import get_hub, pywsgi, socket

from metaq.replication.peers import TLS, Certificate
from metaq.server.http.http import DEADLINE
from metaq.server.http.requesthead import Head, read_head

logger = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 256
"""Half of them for streams of events (``metaq.server.http.bounded``); each takes some 40 KB."""
CONNECTION_S: Final = 10.0
"""Prometheus's own default timeout."""
MOST_JOINED: Final = 16 * 1024
"""Bytes of a body that are copied after their head: that costs less than a second call."""


class Deadline:
    """The time that the current request of a connection has left; when it is over, the connection is closed.

    Most requests end long before it, so a later end only moves the time: the timer looks at it when it is due.
    """

    def __init__(self) -> None:
        """Set no limit yet for the current greenlet, which is the connection's."""
        self._greenlet = gevent.getcurrent()
        self._end_s = self._due_s = 0.0
        self._timer: Any = None

    def within(self, seconds: float) -> None:
        """Allow so many seconds from now on, whatever was left before."""
        self._end_s = time.monotonic() + seconds
        if self._timer is None or self._end_s < self._due_s:
            self._start(seconds)

    def end(self) -> None:
        """Set no limit any more."""
        if self._timer is not None:
            self._timer.close()
            self._timer = None

    def _start(self, seconds: float) -> None:
        self.end()
        self._due_s = time.monotonic() + seconds
        self._timer = get_hub().loop.timer(seconds)
        self._timer.start(self._look)

    def _look(self) -> None:
        left_s = self._end_s - time.monotonic()
        if left_s > 0:
            self._start(left_s)
        else:
            self.end()
            self._greenlet.throw(gevent.Timeout)


class _Handler(pywsgi.WSGIHandler):
    """Reads heads in a fifth of pywsgi's time, sends an answer in one piece, and writes no log of lost connections."""

    server: "HttpServer"
    deadline: Deadline
    head: Head

    def handle(self) -> None:
        self.deadline = Deadline()
        try:
            super().handle()
        finally:
            self.deadline.end()

    def handle_one_request(self) -> Any:
        self.server.waits()
        self.deadline.within(CONNECTION_S)
        return super().handle_one_request()

    def read_request(self, raw_requestline: str) -> bool:  # type: ignore[override] # the types of gevent are those of an old one
        self.head = head = read_head(raw_requestline, self.rfile.readline)
        self.command, self.path, self.request_version = head.method, head.target, head.version
        self.close_connection = not head.goes_on
        return True

    def get_environ(self) -> dict[str, Any]:
        head, environ = self.head, self.server.get_environ()
        path, _, query = head.target.partition("?")
        host, port = cast(tuple[str, int], self.client_address)[:2]
        for name, value in head.fields.items():
            if "_" not in name:  # else it would hide the one with a hyphen
                environ[f"HTTP_{name.replace('-', '_').upper()}"] = value
        for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
            value = environ.pop(f"HTTP_{name}", None)
            if value is not None:
                environ[name] = value
        expects = self.socket if head.fields.get("expect") == "100-continue" else None
        self.wsgi_input = pywsgi.Input(self.rfile, head.length, socket=expects, chunked_input=head.is_chunked)
        environ |= {
            "REQUEST_METHOD": head.method,
            "PATH_INFO": unquote(path, "latin-1"),
            "QUERY_STRING": query,
            "SERVER_PROTOCOL": head.version,
            "REMOTE_ADDR": host,
            "REMOTE_PORT": str(port),
            "wsgi.input": self.rfile if head.wants_upgrade else self.wsgi_input,
            "wsgi.input_terminated": not head.wants_upgrade,
            # ``ssl`` is imported with TLS only
            "wsgi.url_scheme": "https" if hasattr(self.socket, "do_handshake") else "http",
            DEADLINE: self.deadline,
        }
        return environ

    def handle_one_response(self) -> None:
        self.server.asked()
        super().handle_one_response()
        if self.connection_upgraded:  # what comes next over it is no request
            self.close_connection = True

    def log_request(self) -> None:
        """Write nothing: requests are counted elsewhere, and pywsgi would make a line before it throws it away."""

    def _write_with_headers(self, data: bytes) -> None:
        """Send head and body with one call, unless the body is long or in chunks."""
        this = cast(Any, self)  # the types of gevent do not have what is its own
        self.headers_sent = True
        self.finalize_headers()
        fields = b"".join([b"%b: %b\r\n" % field for field in this.response_headers])
        head = b"HTTP/1.1 %b\r\n%b\r\n" % (this.status, fields)
        if self.response_use_chunked or len(data) > MOST_JOINED:
            this._sendall(head)
            this._write(data)
        else:
            this._sendall(head + data)

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
