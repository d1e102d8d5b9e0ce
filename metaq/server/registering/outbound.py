"""A connection that this process opens to another process, with the remoting protocol."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Final

import gevent
from gevent.event import AsyncResult
from gevent.lock import BoundedSemaphore

from metaq.address import Address
from metaq.errors import ConnectionFailed, Refused, RequestTimeout
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request
from metaq.replication.peers import STRANGER, Peers

RECEIVE_BYTES: Final = 64 * 1024


class Outbound:
    """A client connection for requests of this process's greenlets. Requests from the other side are ignored."""

    def __init__(
        self, address: Address, timeout_s: float, ended: Callable[[], None] | None = None, peers: Peers = STRANGER
    ) -> None:
        """Connect. Raise ``ConnectionFailed`` after ``timeout_s`` at the latest.

        ``ended`` is called when the connection breaks.
        """
        self._name = str(address)
        self._timeout_s = timeout_s
        self._ended = ended
        self._peers = peers
        self._opaques = itertools.count(1)
        self._waiting: dict[int, Any] = {}
        self._failure: str | None = None
        self._sending = BoundedSemaphore(1)
        try:
            self._socket = peers.connect(address, timeout_s)
        except OSError as error:
            raise ConnectionFailed(f"cannot connect to {self._name}: {error.strerror or error}") from error
        self._socket.settimeout(None)
        self._reading = gevent.spawn(self._read)

    def call(self, code: int, fields: Mapping[str, str], body: bytes = b"") -> RemotingCommand:
        """Send a request and return its response.

        Raise ``ConnectionFailed``, ``RequestTimeout``, or ``Refused`` when the response code is not 0.
        """
        credentials = self._peers.credentials()
        if credentials is not None:
            fields = credentials.signed(fields, body)
        opaque = next(self._opaques)
        answered = self._waiting[opaque] = AsyncResult()
        late = RequestTimeout(f"{self._name} did not answer request {int(code)} within {self._timeout_s} s")
        try:
            with gevent.Timeout(self._timeout_s, late):
                self._send(encode_request(code, opaque, fields, body))
                answer = answered.get()
        finally:
            del self._waiting[opaque]
        assert isinstance(answer, RemotingCommand)
        if answer.code:
            raise Refused(answer.code, f"{self._name}: {answer.remark}")
        return answer

    def _send(self, frame: bytes) -> None:
        """Send a frame as a whole, after those of other greenlets. Raise ``ConnectionFailed``.

        A frame that is sent in part ends the connection: the other side would take the next one for the rest.
        """
        with self._sending:
            if self._failure is not None:
                raise ConnectionFailed(self._failure)
            try:
                self._socket.sendall(frame)
            except OSError as error:
                raise ConnectionFailed(self._end(error.strerror or str(error))) from error
            except BaseException:  # a time limit, or the end of the greenlet
                self._end("a request was sent in part only")
                raise

    def _read(self) -> None:
        reader = FrameReader()
        reason = "it closed the connection"
        try:
            while reader.error is None and (data := self._socket.recv(RECEIVE_BYTES)):
                for frame in reader.receive(data):
                    if frame.is_response and frame.opaque in self._waiting:
                        self._waiting[frame.opaque].set(frame)
        except OSError as error:
            reason = error.strerror or str(error)
        if reader.error is not None:
            reason = str(reader.error)
        self._end(reason)

    def _end(self, reason: str) -> str:
        """End the connection and all requests on it, and return why it has failed: the first reason counts."""
        if self._failure is not None:
            return self._failure
        failure = self._failure = f"{self._name}: {reason}"
        self._socket.close()
        for answered in self._waiting.values():
            answered.set_exception(ConnectionFailed(failure))
        if self._ended is not None:
            self._ended()
        return failure

    def close(self) -> None:
        """Close the connection; ``ended`` is not called."""
        self._ended = None
        self._reading.kill()
        self._end("the connection is closed")
