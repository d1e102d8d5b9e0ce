"""A plain connection that speaks the text protocol, for what the load generator does not do."""

import socket
from types import TracebackType
from typing import Self

from benchmarks.figures import MeasurementError
from benchmarks.peers import REPLY_SECONDS
from metaq.protocol.text.pushed import Pushed
from metaq.protocol.text.replies import OK, Reply, TextReader

RECEIVE_BYTES = 1 << 18


class TextLink:
    """One connection."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), REPLY_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = TextReader()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, request: bytes) -> None:
        self._socket.sendall(request)

    def receive(self) -> list[Reply | Pushed]:
        """The replies and pushed messages that the next bytes complete, perhaps none."""
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except TimeoutError as error:
            raise MeasurementError(f"no answer within {REPLY_SECONDS} s") from error
        if not data:
            raise MeasurementError("a broker closed a connection")
        return self._reader.receive(data)

    def replies(self) -> list[Reply]:
        """As `receive`, of a connection to which nothing is pushed."""
        frames = self.receive()
        replies = [frame for frame in frames if isinstance(frame, Reply)]
        if len(replies) < len(frames):
            raise MeasurementError("a message was pushed, though nothing is subscribed")
        return replies

    def ask(self, request: bytes) -> Reply:
        """The reply to one request; one that is no success raises."""
        self.send(request)
        replies = self.replies()
        while not replies:
            replies = self.replies()
        if replies[0].code != OK:
            raise MeasurementError(f"{request[:60]!r} was answered with {replies[0].code}: {replies[0].body[:200]!r}")
        return replies[0]
