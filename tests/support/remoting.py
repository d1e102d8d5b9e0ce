"""A plain client of the remoting protocol for tests: one socket, no thread, one frame after the other."""

import itertools
import select
import socket
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Self

from metaq.protocol.remoting.codes import JSON
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request

TIMEOUT_S: Final = 30.0
RECEIVE_BYTES: Final = 64 * 1024


class ConnectionEnded(AssertionError):
    """The server closed the connection, or what it sent is no frame."""


def check_open(connection: socket.socket) -> None:
    """Raise ``ConnectionEnded``, or ``OSError``, when the other end has closed a connection: no answer would come."""
    readable, _, _ = select.select([connection], [], [], 0)
    if readable and not connection.recv(1, socket.MSG_PEEK):
        raise ConnectionEnded("the broker has closed the connection")


class RemotingClient:
    """One connection. What the server asks of its own accord is kept in ``requests``, in the order of arrival."""

    def __init__(self, host: str, port: int, *, timeout_s: float = TIMEOUT_S, language: str = "JAVA") -> None:
        self.requests: list[RemotingCommand] = []
        self.language = language
        self._socket = socket.create_connection((host, port), timeout=timeout_s)
        self._reader = FrameReader()
        self._responses: dict[int, RemotingCommand] = {}
        self._opaques = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def check_open(self) -> None:
        """Raise ``ConnectionEnded`` when the server has closed the connection, as a client must before it sends."""
        check_open(self._socket)

    @property
    def local_address(self) -> tuple[str, int]:
        host, port = self._socket.getsockname()[:2]
        return str(host), int(port)

    def call(
        self,
        code: int,
        fields: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        serialization: int = JSON,
    ) -> RemotingCommand:
        """Ask, and return the response; ``TimeoutError`` after the connection's time, ``ConnectionEnded``."""
        return self.response(self.send(code, fields, body, serialization=serialization))

    def send(
        self,
        code: int,
        fields: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        oneway: bool = False,
        serialization: int = JSON,
    ) -> int:
        """Ask without waiting; the opaque under which ``response`` finds the answer."""
        opaque = next(self._opaques)
        self.send_bytes(
            encode_request(code, opaque, fields, body, oneway=oneway, language=self.language, serialization=serialization)
        )
        return opaque

    def send_bytes(self, data: bytes) -> None:
        """Send bytes as they are: a frame, several, or nonsense."""
        self._socket.sendall(data)

    def response(self, opaque: int) -> RemotingCommand:
        """The response to the request that was sent under ``opaque``."""
        self._receive_until(lambda: opaque in self._responses)
        return self._responses.pop(opaque)

    def answered(self, opaque: int) -> bool:
        """Return whether the response has been received already, without a read from the connection."""
        return opaque in self._responses

    def request(self, code: int) -> RemotingCommand:
        """The oldest request of the server with this code, taken out of ``requests``; waits for it."""
        self._receive_until(lambda: any(request.code == code for request in self.requests))
        found = next(request for request in self.requests if request.code == code)
        self.requests.remove(found)
        return found

    def wait_closed(self) -> None:
        """Wait until the server closes the connection; what it sends before is kept."""
        try:
            self._receive_until(lambda: False)
        except ConnectionEnded:
            return

    def _receive_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:
                raise ConnectionEnded("the server closed the connection")
            for frame in self._reader.receive(data):
                if frame.is_response:
                    self._responses[frame.opaque] = frame
                else:
                    self.requests.append(frame)
            if self._reader.error is not None:
                raise ConnectionEnded(f"the server sent what is no frame: {self._reader.error}")

    def close(self) -> None:
        self._socket.close()
