"""Connections to brokers and registries: one for each address, shared by all requests."""

import contextlib
import functools
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from metaq.address import parse_address
from metaq.client.connecting.access import OPEN, Access
from metaq.client.connecting.presence import Presence, level_of
from metaq.client.connecting.transport import Asked, ClientAnswer, Done, Greet, RemotingRequest, unanswered
from metaq.errors import ClientClosed, ClientError, ConnectionFailed, NotConnected, ProtocolError, RequestTimeout
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request, encode_response

logger = logging.getLogger(__name__)

LANGUAGE: Final = "PYTHON"
_RECEIVE_BYTES: Final = 1024 * 1024
"""Large, because a reader may wait up to 5 ms for the interpreter's lock, and should then receive everything that came."""
_CONNECT_TIMEOUT_S: Final = 3.0
_STALL_S: Final = 10.0
"""The longest time that sending one frame may take; after that the connection is given up."""
_EVER_S: Final = 365 * 86400.0
"""The reader's time limit, practically infinite. It needs one: both directions share the kernel's non-blocking mode."""
_INT31: Final = 0x7FFFFFFF
_NOBODY: Final = Presence(lambda address: None)
"""For connections to addresses that are not known as brokers."""


class _Pending(NamedTuple):
    """A request that waits for its answer."""

    done: Done
    deadline: float
    code: int


class Link:
    """One connection, with a thread that reads; requests are matched to their answers by opaque. Thread-safe.

    A request that times out affects neither the connection nor other requests on it.
    """

    def __init__(
        self, address: str, timeout_s: float, asked: Asked, access: Access = OPEN, presence: Presence = _NOBODY
    ) -> None:
        """Connect; ``NotConnected`` when that does not succeed within ``timeout_s``."""
        self.address = address
        self._asked = asked
        self._access = access
        self._presence = presence
        self._outgoing = access.connect(parse_address(address), timeout_s)
        # A time limit belongs to the socket object, so each direction has an object of its own.
        self._incoming = self._outgoing.dup()
        self._incoming.settimeout(_EVER_S)
        self._outgoing.settimeout(_STALL_S)
        self._sending = threading.Lock()
        self._opaques = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._lost = ""
        self._closed = False
        threading.Thread(target=self._read, name=f"metaq-link-{address}", daemon=True).start()

    @property
    def alive(self) -> bool:
        """True until the connection is known to be lost."""
        return not self._lost

    def submit(self, request: RemotingRequest, deadline: float, done: Done) -> None:
        """Send a request; see ``Transport.submit``."""
        opaque = next(self._opaques) & _INT31
        fields = self._access.signed(request.fields, request.body)
        frame = encode_request(request.code, opaque, fields, request.body, language=LANGUAGE)
        self._pending[opaque] = _Pending(done, deadline, request.code)
        try:
            self._send(frame, deadline)
        except ClientError:
            if self._pending.pop(opaque, None) is not None:  # else ``done`` has been called already
                raise

    def tell(self, request: RemotingRequest, deadline: float) -> None:
        """Send a one-way request; see ``Transport.tell``."""
        opaque = next(self._opaques) & _INT31
        fields = self._access.signed(request.fields, request.body)
        frame = encode_request(request.code, opaque, fields, request.body, oneway=True, language=LANGUAGE)
        self._send(frame, deadline)

    def expire(self, now: float) -> None:
        """Fail the requests whose deadline has passed. Answers that still arrive are dropped."""
        for opaque, pending in list(self._pending.items()):
            if pending.deadline < now and self._pending.pop(opaque, None) is not None:
                self._finish(pending.done, unanswered(pending.code, self.address))

    def lose(self, reason: str) -> None:
        """Close the connection; requests in flight and later ones fail with ``reason``."""
        self._closed = True
        self._break(reason)
        self._fail_all()

    def abandon(self) -> None:
        """Close the descriptors in a child of a fork, without shutting down the connection, which is the parent's."""
        for handle in (self._incoming, self._outgoing):
            with contextlib.suppress(OSError):
                handle.close()

    def _break(self, reason: str) -> None:
        """Send nothing more, and end the thread that reads, which then fails the requests in flight."""
        self._lost = self._lost or reason
        with contextlib.suppress(OSError):  # the other side may have closed it
            self._incoming.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads

    def _fail_all(self) -> None:
        while self._pending:
            with contextlib.suppress(KeyError):  # another thread may take the last one
                _, pending = self._pending.popitem()
                self._finish(pending.done, self._failure())

    def _failure(self) -> ConnectionFailed:
        return ConnectionFailed(f"the connection to {self.address} is lost: {self._lost}")

    def _send(self, frame: bytes, deadline: float) -> None:
        if not self._sending.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise RequestTimeout(f"{self.address} accepts no data")
        try:
            if self._lost:
                raise NotConnected(str(self._failure()))
            self._outgoing.sendall(frame)
        # Callbacks are not called here: one may take a lock that the sending thread already holds.
        except OSError as error:
            self._break(f"sending failed: {error}")
            raise self._failure() from error
        except BaseException:
            self._break("a request was interrupted in the middle")
            raise
        finally:
            self._sending.release()

    def _read(self) -> None:
        reader = FrameReader()
        try:
            while data := self._incoming.recv(_RECEIVE_BYTES):
                for frame in reader.receive(data):
                    self._take(frame)
                if reader.error is not None:
                    raise reader.error
            reason = "the other side closed it"
        except (OSError, ProtocolError, MemoryError) as error:
            reason = str(error) or "memory is short"
        self._break(reason)
        if self._pending and not self._closed:
            self._presence.lost(self.address, self._lost)
        self._fail_all()
        self._incoming.close()
        with self._sending:
            self._outgoing.close()

    def _take(self, frame: RemotingCommand) -> None:
        if frame.is_response:
            self._presence.heard(self.address)
            pending = self._pending.pop(frame.opaque, None)
            if pending is not None:
                self._finish(pending.done, frame)
            return
        try:
            self._asked(self.address, frame, functools.partial(self._answer, frame))
        except Exception:
            logger.exception("request of a broker failed address=%s code=%s", self.address, frame.code)

    def _answer(self, request: RemotingCommand, answer: ClientAnswer) -> None:
        if request.is_oneway:
            return
        head = encode_response(request, answer.code, answer.fields, answer.remark, len(answer.body))
        try:
            self._send(head + answer.body, time.monotonic() + _STALL_S)
        except ClientError as error:
            level = level_of(error)
            logger.log(level, "answer to a broker was not sent address=%s code=%s reason=%s", self.address, request.code, error)

    def _finish(self, done: Done, outcome: RemotingCommand | ClientError) -> None:
        try:
            done(outcome)
        except Exception:
            logger.exception("callback of a request failed address=%s", self.address)


class Links:
    """The connections of a client by address, opened when they are needed: a ``Transport`` over sockets. Thread-safe."""

    def __init__(
        self,
        asked: Asked,
        greet: Greet,
        access: Access = OPEN,
        *,
        connect_timeout_s: float = _CONNECT_TIMEOUT_S,
        name_of: Callable[[str], str | None] = lambda address: None,
    ) -> None:
        """Connect to nothing yet. ``name_of`` is that of ``Presence``."""
        self._access = access
        self._presence = Presence(name_of)
        self._asked = asked
        self._greet = greet
        self._connect_timeout_s = connect_timeout_s
        self._closed = False
        self._links: dict[str, Link] = {}
        self.renew()

    def renew(self) -> None:
        for link in self._links.values():
            link.abandon()
        self._presence.renew()
        self._guard = threading.Lock()  # guards what follows, and whether it is closed
        self._links = {}
        self._connecting: dict[str, threading.Lock] = {}

    def submit(self, address: str, request: RemotingRequest, deadline: float, done: Done) -> None:
        self._link(address, deadline).submit(request, deadline, done)

    def tell(self, address: str, request: RemotingRequest, deadline: float) -> None:
        self._link(address, deadline).tell(request, deadline)

    def expire(self) -> None:
        """Fail the requests whose deadline has passed; it must be called periodically."""
        now = time.monotonic()
        for link in self._alive():
            link.expire(now)

    def close(self) -> None:
        with self._guard:
            self._closed = True
        for link in self._alive():
            link.lose("the client was closed")

    def _alive(self) -> list[Link]:
        with self._guard:
            self._links = {address: link for address, link in self._links.items() if link.alive}
            return list(self._links.values())

    def _link(self, address: str, deadline: float) -> Link:
        link = self._links.get(address)
        return link if link is not None and link.alive else self._connect(address, deadline)

    def _connect(self, address: str, deadline: float) -> Link:
        """Connect to an address. One thread connects, and others that need the same address wait and use its connection."""
        with self._guard:
            connecting = self._connecting.setdefault(address, threading.Lock())
        if not connecting.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise RequestTimeout(f"no connection to {address} in time")
        try:
            if self._closed:
                raise ClientClosed("the client was closed")
            link = self._links.get(address)
            if link is not None and link.alive:
                return link
            left = deadline - time.monotonic()
            if left <= 0:
                raise RequestTimeout(f"no connection to {address} in time")
            try:
                link = Link(address, min(left, self._connect_timeout_s), self._asked, self._access, self._presence)
            except NotConnected as error:
                self._presence.lost(address, str(error))
                raise
            self._introduce(link)
            with self._guard:
                if not self._closed:
                    self._links[address] = link
                    return link
            link.lose("the client was closed")
            raise ClientClosed("the client was closed")
        finally:
            connecting.release()

    def _introduce(self, link: Link) -> None:
        """Send the greeting before any other request: a broker answers pulls only of members that it knows."""
        greeting = self._greet(link.address)
        if greeting is not None:
            link.submit(greeting, time.monotonic() + _STALL_S, _ignore)


def _ignore(outcome: RemotingCommand | ClientError) -> None:
    """Ignore the outcome of a greeting: the next heartbeat repeats it, and a lost connection is noticed elsewhere."""
