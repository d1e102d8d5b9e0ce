"""The long way of a request: a greenlet reads it by all rules, in TLS or not, and runs a WSGI application for its answer.

A connection has ``CONNECTION_S`` for the handshake, and again for each request: its coming, its bytes, and reading the answer.
Whoever answers can change what is left (``Deadline``). After the answer the connection goes back to its port
(``metaq.server.http.port``), which may have a short way for the next request; one in TLS stays.
"""

import io
import logging
import select
import socket as std_socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast
from urllib.parse import unquote

import gevent
from gevent import get_hub, pywsgi, socket

from metaq.replication.peers import TLS, Certificate
from metaq.server.http.away import CONNECTION_S, Away
from metaq.server.http.environ import DEADLINE, SHORT_WAY
from metaq.server.http.requesthead import Head, read_head
from metaq.server.http.session import Take
from metaq.server.wire.pace import Pace
from metaq.server.wire.session import READABLE

logger = logging.getLogger(__name__)

MOST_JOINED: Final = 16 * 1024
"""Bytes of a body that are copied after their head: that costs less than a second call."""
MOST_CHUNKED: Final = 64 * 1024
"""Bytes of a body in chunks that are read, all for nothing: no request needs one."""
REST_S: Final = 0.001
"""seconds; with a sleep of 0, connections would not go on."""


class Deadline:
    """The end of the current request of a connection: its time is over, or its client is gone. The connection is closed then.

    Most requests end long before it, so a later end only moves the time: the timer looks at it when it is due.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Set no limit yet for the current greenlet, which is the connection's."""
        self._connection = connection
        self._greenlet = gevent.getcurrent()
        self.is_over = False
        """True when the request has been ended."""
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

    @contextmanager
    def or_departure(self) -> Iterator[None]:
        """End the request, too, when its client closes the connection meanwhile.

        That is seen until the next request comes over it, which clients seldom send before they have the answer.
        """
        watcher = get_hub().loop.io(self._connection.fileno(), READABLE)
        watcher.start(self._look_for_departure, watcher)
        try:
            yield
        finally:
            watcher.close()

    def _look_for_departure(self, watcher: Any) -> None:
        watcher.stop()
        hangs_up = select.poll()
        hangs_up.register(self._connection.fileno(), select.POLLRDHUP)
        if hangs_up.poll(0):
            self._throw(ConnectionResetError("the client has closed the connection"))

    def _throw(self, error: BaseException) -> None:
        self.is_over = True
        self._greenlet.throw(error)

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
            self._throw(gevent.Timeout())


class _Received(io.RawIOBase):
    """The bytes of a connection: first those that have come already."""

    def __init__(self, connection: socket.socket, data: bytes, rest: Callable[[], None]) -> None:
        self._connection = connection
        self._data = memoryview(data)
        self._rest = rest
        self._is_over = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        size = min(len(buffer), len(self._data))
        if size:
            buffer[:size], self._data = self._data[:size], self._data[size:]
            return size
        if self._is_over:
            return None
        self._rest()  # what comes fast enough is received without waiting, and so without others
        return self._connection.recv_into(buffer)

    def end(self, buffered: io.BufferedReader) -> bytes:
        """Receive no more, and return what has come that nobody has read."""
        self._is_over = True
        return buffered.peek() + bytes(self._data)


_LAST: Final = b"\r\n\r\n"
"""The end of the last chunk, and of what may come after it."""


class _Body(pywsgi.Input):
    """The body of a request."""

    __slots__ = ("_deadline",)

    def __init__(self, deadline: Deadline, *given: Any) -> None:
        super().__init__(*given)
        self._deadline = deadline

    def _discard(self) -> None:
        """Read what the application has left, so that a client that still sends can read the answer.

        Nothing is read when the request was ended: nothing ends this wait any more.
        """
        if self._deadline.is_over:
            return
        if self.chunked_input:
            self._discard_chunks()
        else:
            super()._discard()  # type: ignore[misc] # the types of gevent do not have what is its own

    def _discard_chunks(self) -> None:
        """Read to the end of the chunks, or so many bytes: pywsgi would read byte by byte, however many there are.

        A chunk may end as the last one does; the connection is closed in any case (``Head.goes_on``).
        """
        left, last = MOST_CHUNKED, b""
        while left > 0 and last != _LAST and (data := self.rfile.read1(left)):
            left -= len(data)
            last = (last + data)[-len(_LAST) :]


class _Handler(pywsgi.WSGIHandler):
    """Reads heads in a fifth of pywsgi's time, sends an answer in one piece, and writes no log of lost connections."""

    server: "HttpServer"
    deadline: Deadline
    head: Head

    def __init__(
        self,
        connection: socket.socket,
        address: Any,
        server: "HttpServer",
        data: bytes,
        away: Away,
        remember: Callable[[Take], None],
    ) -> None:
        self._received = _Received(connection, data, server.rest)
        super().__init__(connection, address, server, io.BufferedReader(self._received))  # type: ignore[call-arg] # types of an old gevent
        self._away = away
        self._remember = remember
        self._is_secured = hasattr(connection, "do_handshake")  # ``ssl`` is imported with TLS only
        self.rest: bytes | None = None
        """The bytes that have come of the next request, when the connection goes back to its port."""

    def handle(self) -> None:
        self.deadline = Deadline(self.socket)
        try:
            super().handle()
        finally:
            self.deadline.end()

    def handle_one_request(self) -> Any:
        self.server.rest()  # the next one may be there already, and all of its answer may be sent at once
        self._away.waits()
        self.deadline.within(CONNECTION_S)
        result = super().handle_one_request()
        if result is True and not self._is_secured:
            self.rest = self._received.end(self.rfile)
            cast(Any, self).socket = None  # pywsgi neither reads on nor closes it
        return result

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
        self.wsgi_input = _Body(self.deadline, self.rfile, head.length, expects, head.is_chunked)
        environ |= {
            "REQUEST_METHOD": head.method,
            "PATH_INFO": unquote(path, "latin-1"),
            "QUERY_STRING": query,
            "SERVER_PROTOCOL": head.version,
            "REMOTE_ADDR": host,
            "REMOTE_PORT": str(port),
            "wsgi.input": self.rfile if head.wants_upgrade else self.wsgi_input,
            "wsgi.input_terminated": not head.wants_upgrade,
            "wsgi.url_scheme": "https" if self._is_secured else "http",
            DEADLINE: self.deadline,
        }
        if head.is_usual and not self._is_secured:
            environ[SHORT_WAY] = self._remember
        return environ

    def handle_one_response(self) -> None:
        self._away.asked = True
        super().handle_one_response()
        if self.connection_upgraded:  # what comes next over it is no request
            self.close_connection = True

    def log_request(self) -> None:
        """Write nothing: requests are counted elsewhere, and pywsgi would make a line before it throws it away."""

    def _write_with_headers(self, data: bytes) -> None:
        """Send head and body with one call, unless the body is long or in chunks. Say when the connection ends after them."""
        this = cast(Any, self)  # the types of gevent do not have what is its own
        self.headers_sent = True
        self.finalize_headers()
        if self.close_connection and all(name.lower() != b"connection" for name, _ in this.response_headers):
            this.response_headers.append((b"Connection", b"close"))
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
    """The long way. A first byte of TLS starts a handshake, as on every other port."""

    def __init__(
        self,
        address: tuple[str, int],
        answer: Callable[..., Iterable[bytes]],
        certificate: Certificate | None,
        pace: Callable[[], Pace | None],
    ) -> None:
        """Prepare the server of an address. It is never started: ``serve`` gets its connections.

        ``answer`` is a WSGI application; ``pace`` returns that of the present broker, if there is one.
        """
        # without a name, pywsgi would look up its own in DNS and wait for that
        environ = {"SERVER_NAME": address[0], "SERVER_PORT": str(address[1])}
        super().__init__(address, answer, log=None, error_log=None, environ=environ, handler_class=_Handler)
        self._certificate = certificate
        self._pace = pace

    def rest(self) -> None:
        """Let others run when this turn of the loop has taken long enough, or nobody measures it."""
        pace = self._pace()
        if pace is None or not pace.measures or pace.spent:
            gevent.sleep(REST_S)

    def serve(
        self, connection: std_socket.socket, address: Any, data: bytes, away: Away, remember: Callable[[Take], None]
    ) -> tuple[std_socket.socket, Any, bytes] | None:
        """Answer the next request of a connection, from which ``data`` has come already; in TLS, all.

        Return the connection for its next request, its client's address, and what has come of that; ``None`` when it is closed.
        """
        plain = socket.socket(connection.family, connection.type, fileno=connection.detach())
        try:
            with gevent.Timeout(CONNECTION_S):
                secured = self._secured(plain, data)
            handler = _Handler(secured, address, self, data, away, remember)
            handler.handle()
            if handler.rest is None:
                return None
            back = std_socket.socket(plain.family, plain.type, fileno=plain.detach())
            back.setblocking(False)
            return back, address, handler.rest
        except (OSError, gevent.Timeout) as error:  # the client is gone, or too slow
            logger.debug("http connection lost reason=%s", error)
            return None
        finally:
            plain.close()

    def _secured(self, connection: socket.socket, data: bytes) -> socket.socket:
        """Return the connection, in TLS when it begins with a handshake. Raise ``OSError`` when that fails."""
        if self._certificate is None or data or connection.recv(1, socket.MSG_PEEK) != bytes((TLS,)):
            return connection
        secured = self._certificate.secured(connection)
        try:
            secured.do_handshake()
        except BaseException:
            secured.close()
            raise
        return secured
