"""Bulk fetches (request 30030), by one thread over a connection of its own."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final, NamedTuple, Self

from metaq.address import parse_address
from metaq.client.connecting.access import OPEN, Access
from metaq.client.connecting.forks import renewed_in_children
from metaq.client.connecting.link import LANGUAGE
from metaq.client.connecting.transport import refusal, unanswered
from metaq.errors import BrokerBusy, ConnectionFailed, OffsetOutOfRange, ProtocolError, RequestTimeout, StreamLost
from metaq.protocol.remoting.bulk import Bulk, BulkFetch, decode_bulk
from metaq.protocol.remoting.codes import Request, Response
from metaq.protocol.remoting.frames import HEAD, HEAD_SIZE, MAX_FRAME_BYTES, FrameReader, RemotingCommand, encode_request
from metaq.protocol.remoting.headers import encode_header

_HEADER_LENGTH: Final = 0xFFFFFF
_INT31: Final = 0x7FFFFFFF
_READ: Final = {Response.SUCCESS, Response.PULL_NOT_FOUND, Response.PULL_OFFSET_MOVED}
"""The answers that hold the offsets of the partition."""


class _Asked(NamedTuple):
    wanted: BulkFetch
    opaque: int


class BulkConnection:
    """A connection to one broker, master or slave; a context manager.

    It is for one thread and one fetch at a time; ``prefetch`` requests the next one ahead. An error on the stream closes the
    connection; a refusal by the broker does not.
    """

    def __init__(self, address: str, timeout_s: float, access: Access = OPEN) -> None:
        """Connect; ``ConnectionFailed`` when that fails or exceeds ``timeout_s``, which also limits each fetch."""
        self.address = address
        self._timeout_s = timeout_s
        self._opaques = itertools.count(1)
        self._asked: _Asked | None = None
        """The request that the broker has yet to answer."""
        self._lost = ""
        self._rooms: list[bytearray] = []
        """The memory of the last two bodies, for later ones: new memory for each would cost as much as receiving it."""
        self._access = access
        self._socket = access.connect(parse_address(address), timeout_s)
        renewed_in_children(self)

    def _renew(self) -> None:
        """Become unusable in a child of a fork, because the connection belongs to one thread of the parent."""
        with suppress(OSError):
            self._lose("it belongs to the process that this one was forked from")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; a later fetch raises ``ConnectionFailed``."""
        self._lose("it was closed")

    def fetch(self, wanted: BulkFetch) -> Bulk:
        """Fetch messages from an offset on: at least one, unless the partition ends there.

        ``max_bytes`` limits the size of the records, but a larger first one is returned all the same. The broker has limits of
        its own, too. At the end of the partition, and when a slave has not copied the messages yet, the answer has no units.

        ``OffsetOutOfRange`` for an offset that has aged out or lies beyond the end; another ``Refused`` for a topic or
        partition that does not exist or may not be read. A busy broker is asked again until the time limit.
        ``RequestTimeout``, ``ConnectionFailed``.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._fetch(wanted, deadline)
            except BrokerBusy as busy:
                if time.monotonic() + busy.retry_after_s >= deadline:
                    raise
                time.sleep(busy.retry_after_s)

    def prefetch(self, wanted: BulkFetch) -> None:
        """Send the request of the next fetch ahead, so that the broker works in parallel. The fetch raises what fails here."""
        with suppress(ConnectionFailed, RequestTimeout), self._guarded():
            self._ask(wanted, time.monotonic() + self._timeout_s)

    def _fetch(self, wanted: BulkFetch, deadline: float) -> Bulk:
        with self._guarded():
            self._ask(wanted, deadline)
            answer, body = self._answer(deadline)
            bulk = decode_bulk(wanted.queue_offset, answer.fields, body) if answer.code in _READ else None
        if bulk is None:
            raise refusal(answer)
        if answer.code == Response.PULL_OFFSET_MOVED:
            raise OffsetOutOfRange(answer.code, answer.remark or "no reason given", least=bulk.least, most=bulk.most)
        return bulk

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Guard a use of the stream: close the connection when it fails, and raise the error of the client for it."""
        if self._lost:
            raise self._failure()
        try:
            yield
        except TimeoutError as error:
            self._lose("a fetch on it was not answered in time")
            raise unanswered(Request.BULK_FETCH, self.address) from error
        except (OSError, ProtocolError) as error:
            self._lose(str(error))
            raise self._failure() from error
        except BaseException:
            self._lose("a fetch was interrupted in the middle")
            raise

    def _ask(self, wanted: BulkFetch, deadline: float) -> None:
        """Send a request, unless it was sent ahead. The answer to another request that was sent ahead is discarded."""
        if self._asked is not None and self._asked.wanted != wanted:
            self._answer(deadline)
        if self._asked is None:
            opaque = next(self._opaques) & _INT31
            self._socket.settimeout(_left(deadline))
            fields = self._access.signed(encode_header(wanted), b"")
            self._socket.sendall(encode_request(Request.BULK_FETCH, opaque, fields, language=LANGUAGE))
            self._asked = _Asked(wanted, opaque)

    def _answer(self, deadline: float) -> tuple[RemotingCommand, memoryview]:
        """Receive the answer and its body, which is not copied."""
        assert self._asked is not None
        length, word = HEAD.unpack(self._receive(memoryview(bytearray(HEAD_SIZE)), deadline))
        size = word & _HEADER_LENGTH
        if not 4 + size <= length <= MAX_FRAME_BYTES:
            raise StreamLost(f"a frame of {length} bytes with a header of {size}")
        reader = FrameReader()
        header = self._receive(memoryview(bytearray(size)), deadline)
        frames = reader.receive(HEAD.pack(4 + size, word) + header)  # parsed as a frame without a body
        if reader.error is not None:
            raise reader.error
        if not frames[0].is_response or frames[0].opaque != self._asked.opaque:
            raise StreamLost("a frame that does not answer the request")
        body = self._receive(self._room(length - 4 - size), deadline)
        self._asked = None
        return frames[0], body

    def _room(self, size: int) -> memoryview:
        """Return memory for a body: that of an earlier one of which nobody holds a slice any more, or else new memory."""
        for room in self._rooms:
            with suppress(BufferError):  # by which a bytearray refuses to grow while a slice of it is in use
                room.append(0)
                room.pop()
                room.extend(bytes(max(0, size - len(room))))
                return memoryview(room)[:size]
        self._rooms = [*self._rooms[-1:], bytearray(size)]
        return memoryview(self._rooms[-1])[:size]

    def _receive(self, buffer: memoryview, deadline: float) -> memoryview:
        """Fill the buffer, and return it."""
        rest = buffer
        while rest:
            self._socket.settimeout(_left(deadline))
            count = self._socket.recv_into(rest)
            if not count:
                raise StreamLost("the broker closed the connection")
            rest = rest[count:]
        return buffer

    def _lose(self, reason: str) -> None:
        self._lost = self._lost or reason
        self._socket.close()

    def _failure(self) -> ConnectionFailed:
        return ConnectionFailed(f"the connection to {self.address} is lost: {self._lost}")


def _left(deadline: float) -> float:
    """Return the seconds left; ``TimeoutError`` when there are none, because sockets take 0 for "do not wait"."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
