"""Connections to brokers and registries: one for each address, shared by all requests."""

import contextlib
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from metaq.client.connecting.access import OPEN, Access
from metaq.client.connecting.connection import STALL_S, LinkConnection
from metaq.client.connecting.presence import Presence, level_of
from metaq.client.connecting.reading import LinkReader
from metaq.client.connecting.transport import Asked, ClientAnswer, Done, Greet, Meanwhile, RemotingRequest, Waiter, unanswered
from metaq.client.connecting.writing import LinkWriter
from metaq.errors import ClientClosed, ClientError, NotConnected
from metaq.protocol.remoting.frames import RemotingCommand, encode_request, encode_response

logger = logging.getLogger(__name__)

LANGUAGE: Final = "PYTHON"
_CONNECT_TIMEOUT_S: Final = 3.0
_INT31: Final = 0x7FFFFFFF
_NOBODY: Final = Presence(lambda address: None)
"""For connections to addresses that are not known as brokers."""


class _Pending(NamedTuple):
    """A request that waits for its answer."""

    done: Done
    deadline: float
    code: int
    is_call: bool
    """Whether a caller waits, so that ``done`` only wakes it."""


class Link:
    """The requests of one connection, each matched to its answer by opaque. Thread-safe.

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
        self._connection = LinkConnection(address, timeout_s, access)
        self._opaques = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._closed = False
        self._writer = LinkWriter(self._connection)
        self._reader = LinkReader(self._connection, self)
        try:
            self._reader.start()
        except RuntimeError as error:
            self._connection.abandon()
            advice = "end threads, or raise the limit of them (ulimit -u, pids.max)"
            raise NotConnected(f"no thread for a connection to {address}: {error}; {advice}") from error

    @property
    def alive(self) -> bool:
        """True until the connection is known to be lost."""
        return not self._connection.lost

    def call(self, request: RemotingRequest, deadline: float, meanwhile: Meanwhile | None = None) -> RemotingCommand:
        """Send a request and wait for the answer; see ``Transport.call``."""
        waiter = Waiter()
        opaque, frame = self._encoded(request)
        self._pending[opaque] = _Pending(waiter.set, deadline, request.code, True)
        try:
            self._writer.write(frame, deadline)
            if meanwhile is not None:
                meanwhile()
            self._reader.read_for(waiter, deadline)
            return waiter.wait(deadline, request, self.address)
        finally:
            self._pending.pop(opaque, None)

    def submit(self, request: RemotingRequest, deadline: float, done: Done, *, soon: bool = False) -> None:
        """Send a request; see ``Transport.submit``."""
        opaque, frame = self._encoded(request)
        self._pending[opaque] = _Pending(done, deadline, request.code, False)
        try:
            (self._writer.soon if soon else self._writer.write)(frame, deadline)
            if self._connection.lost:  # perhaps it was before the request could be seen to be in flight
                raise self._connection.failure()
        except ClientError:
            if self._pending.pop(opaque, None) is not None:  # else ``done`` has been called already
                raise
        self._reader.expect()

    def tell(self, request: RemotingRequest, deadline: float) -> None:
        """Send a one-way request; see ``Transport.tell``."""
        self._writer.write(self._encoded(request, oneway=True)[1], deadline)

    def _encoded(self, request: RemotingRequest, *, oneway: bool = False) -> tuple[int, bytes]:
        """Return a new opaque, and the frame of the request with it."""
        opaque = next(self._opaques) & _INT31
        fields = self._access.signed(request.fields, request.body)
        return opaque, encode_request(request.code, opaque, fields, request.body, oneway=oneway, language=LANGUAGE)

    def expire(self, now: float) -> None:
        """Fail the requests whose deadline has passed. Answers that still arrive are dropped."""
        for opaque, pending in list(self._pending.items()):
            if pending.deadline < now and self._pending.pop(opaque, None) is not None:
                self._finish(pending.done, unanswered(pending.code, self.address))

    def lose(self, reason: str) -> None:
        """Close the connection; requests in flight and later ones fail with ``reason``."""
        self._closed = True
        self._connection.give_up(reason)
        self._fail_all()

    def abandon(self) -> None:
        """Give the connection up in a child of a fork; it is the parent's."""
        self._connection.abandon()

    def _fail_all(self) -> None:
        while self._pending:
            with contextlib.suppress(KeyError):  # another thread may take the last one
                _, pending = self._pending.popitem()
                self._finish(pending.done, self._connection.failure())

    # -- what is read: a Receiver -------------------------------------------------------------------------------------

    def answered(self, frame: RemotingCommand) -> bool:
        if not frame.is_response:
            return False
        pending = self._pending.get(frame.opaque)
        if pending is None or not pending.is_call:
            return False
        self._presence.heard(self.address)
        if self._pending.pop(frame.opaque, None) is not None:  # else it has just expired
            pending.done(frame)
        return True

    def take(self, frame: RemotingCommand) -> None:
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

    def in_flight(self) -> bool:
        return bool(self._pending)

    def ended(self) -> None:
        if self._pending and not self._closed:
            self._presence.lost(self.address, self._connection.lost)
        self._fail_all()
        self._writer.end()

    def _answer(self, request: RemotingCommand, answer: ClientAnswer) -> None:
        if request.is_oneway:
            return
        head = encode_response(request, answer.code, answer.fields, answer.remark, len(answer.body))
        try:
            self._writer.write(head + answer.body, time.monotonic() + STALL_S)
        except ClientError as error:
            level = level_of(error)
            logger.log(level, "answer to a broker was not sent address=%s code=%s reason=%s", self.address, request.code, error)

    def _finish(self, done: Done, outcome: RemotingCommand | ClientError) -> None:
        try:
            done(outcome)
        except Exception:
            logger.exception("callback of a request failed address=%s", self.address)


class _Place:
    """An address, to which one thread at a time connects."""

    def __init__(self) -> None:
        self.turn = threading.Lock()  # held by the thread that connects; guards what follows
        self.failures = 0
        self.reason = ""
        """The reason of the last failure; not the error, whose trace would keep the objects of the thread that had it."""


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
        self._places: dict[str, _Place] = {}

    def call(
        self, address: str, request: RemotingRequest, deadline: float, meanwhile: Meanwhile | None = None
    ) -> RemotingCommand:
        return self._link(address, deadline).call(request, deadline, meanwhile)

    def submit(self, address: str, request: RemotingRequest, deadline: float, done: Done, *, soon: bool = False) -> None:
        self._link(address, deadline).submit(request, deadline, done, soon=soon)

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
        """Connect to an address. One thread connects, and others that need the same address wait for what it achieves."""
        with self._guard:
            place = self._places.setdefault(address, _Place())
        failures = place.failures
        if not place.turn.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise NotConnected(f"no connection to {address} in time")
        try:
            if self._closed:
                raise ClientClosed("the client was closed")
            link = self._links.get(address)
            if link is not None and link.alive:
                return link
            if place.failures != failures:
                raise NotConnected(place.reason)
            left = deadline - time.monotonic()
            if left <= 0:
                raise NotConnected(f"no connection to {address} in time")
            try:
                link = Link(address, min(left, self._connect_timeout_s), self._asked, self._access, self._presence)
            except NotConnected as error:
                if left >= self._connect_timeout_s / 2:  # less time says little about what others would have achieved
                    place.failures += 1
                    place.reason = str(error)
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
            place.turn.release()

    def _introduce(self, link: Link) -> None:
        """Send the greeting before any other request: a broker answers pulls only of members that it knows."""
        greeting = self._greet(link.address)
        if greeting is not None:
            link.submit(greeting, time.monotonic() + STALL_S, _ignore)


def _ignore(outcome: RemotingCommand | ClientError) -> None:
    """Ignore the outcome of a greeting: the next heartbeat repeats it, and a lost connection is noticed elsewhere."""
