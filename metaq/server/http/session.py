"""A connection of the HTTP port between requests, and during requests that have a short way.

A client that sends much sends the same head again and again; only the length of the body differs. Once such a request has
taken the long way (``metaq.server.http.httpserver``), which reads the head by all rules and finds out who asks, it may leave
a ``Take`` for its head. The next request with the same bytes, the digits of ``Content-Length`` aside, is answered by that,
without a greenlet, as the commands of the other protocols are.

Everything else goes the long way, with the bytes that have come: a head that is new or has not come as a whole, a long body,
what a ``Take`` does not take. It goes when the answers before it are sent. After its answer the connection comes back, so a
client that mixes requests pays for each what that one costs.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from metaq.server.wire.session import Buffer, Session, SessionHost, Stream

MOST_BODY: Final = 64 * 1024
"""Bytes of the longest body that has a short way: what a connection keeps of one that has not come as a whole."""
_LENGTHS: Final = (b"\r\nContent-Length: ", b"\r\ncontent-length: ")
_DIGITS: Final = 5
_END: Final = b"\r\n\r\n"

HeadKey = tuple[str, bytes]
"""The host of a client, and a head without the digits of its length."""
Take = Callable[["HttpSession", bytes], bool]
"""Takes a request by its body: answers it, or makes it owed. Returns false, with nothing done, when it needs the long way."""


class Arrived(NamedTuple):
    """One request that has a short way, or all that has come from a place on."""

    take: Take | None
    """``None`` for what goes the long way."""
    data: bytes
    body_at: int
    key: HeadKey | None
    """Under which the long way may leave a ``Take``."""


class HttpHost(SessionHost, Protocol):
    """The parts of the HTTP port that a session needs."""

    heads: dict[HeadKey, Take]

    def go_long(self, connection: Stream, address: Any, data: bytes, key: HeadKey | None) -> None:
        """Serve a connection, from which ``data`` has come already, the long way until its next request is answered."""
        ...


class HttpSession(Session):
    """One connection."""

    __slots__ = ("_heads", "_kept", "_needed", "_port", "_where")

    def __init__(self, connection: Stream, address: Any, port: HttpHost) -> None:
        super().__init__(connection, address, port, self._split)
        self._port = port
        self._heads = port.heads
        self._where: str = address[0]
        self._kept = bytearray()  # not bytes: each small piece of a body would copy all that came before it
        """The head and a part of the body of a request that has a short way."""
        self._needed = 0
        """The size of that request."""

    @property
    def waits_since(self) -> float:
        """The monotonic time since which the client can send, or read, and has not."""
        return self._since

    # -- from bytes to requests ---------------------------------------------------------------------------------------

    def _split(self, data: bytes) -> list[Arrived]:
        """Return the requests that are there as a whole; the last part has what goes the long way."""
        if self._kept:
            self._kept += data
            if len(self._kept) < self._needed:
                return []
            data = bytes(self._kept)
            self._kept = bytearray()
        arrived: list[Arrived] = []
        at, end = 0, len(data)
        while at < end:
            head_end = data.find(_END, at)
            first = _digits_at(data, at, head_end)
            if first < 0:
                arrived.append(Arrived(None, data[at:], 0, None))
                break
            last = data.find(b"\r", first)
            digits = data[first:last]
            key = (self._where, data[at:first] + data[last:head_end])
            take = self._heads.get(key)
            body_at = head_end + len(_END)
            if take is None or not digits.isdigit() or len(digits) > _DIGITS or int(digits) > MOST_BODY:
                # a line that ends without CR: the head may end before ``head_end``, and is not the one of the key
                usual = data.count(b"\n", at, head_end) == data.count(b"\r\n", at, head_end)
                arrived.append(Arrived(None, data[at:], 0, key if usual else None))
                break
            stop = body_at + int(digits)
            if stop > end:
                self._kept, self._needed = bytearray(data[at:]), stop - at
                break
            arrived.append(Arrived(take, data[at:stop], body_at - at, key))
            at = stop
        return arrived

    def _count_unfinished(self) -> int:
        return len(self._kept)

    # -- from requests to answers -------------------------------------------------------------------------------------

    def _may_go_on(self) -> bool:
        return not self.owed and not self._unsent

    def _handle(self, commands: Sequence[Arrived]) -> None:
        at, end = 0, len(commands)
        while at < end and self._socket is not None:
            if at and self._host.spent:
                self._backlog = commands[at:]
                return
            take, data, body_at, key = commands[at]
            if take is None or not take(self, data[body_at:]):
                rest = data if take is None else b"".join([each.data for each in commands[at:]]) + bytes(self._kept)
                self._go_long(Arrived(None, rest, 0, key))
                return
            at += 1

    def _go_long(self, rest: Arrived) -> None:
        """Leave the connection to the long way, as soon as all answers to earlier requests are sent."""
        self._kept = bytearray()
        if self.owed or self._unsent:
            self._backlog = [rest]
            return
        connection = self.leave()
        if connection is not None:
            self._port.go_long(connection, self.address, rest.data, rest.key)

    def answer(self, replies: int, size: int, *buffers: Buffer) -> None:
        self._since = self._host.now()
        super().answer(replies, size, *buffers)

    def _drop_waiting(self) -> None:
        self._kept = bytearray()

    def _ended(self) -> None:
        if self._kept:  # the long way says what is wrong with half a request
            self._go_long(Arrived(None, bytes(self._kept), 0, None))
            self._backlog_bytes += self._unfinished  # both are 0 if it has gone
            self._unfinished = 0
            self.flush()
        else:
            super()._ended()


def _digits_at(data: bytes, at: int, head_end: int) -> int:
    """Return where the length of a body stands in a head; -1 when it has none, in the usual form, or has not come."""
    if head_end < 0:
        return -1
    for field in _LENGTHS:
        found = data.find(field, at, head_end)
        if found >= 0:
            return found + len(field)
    return -1
