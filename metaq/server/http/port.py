"""The connections of the HTTP port: none can keep others out.

A connection is a session (``metaq.server.http.session``), and a greenlet while one of its requests goes the long way
(``metaq.server.http.httpserver``). One that sends nothing for ``CONNECTION_S``, or does not read what it is sent, is closed.
There are at most ``MOST_CONNECTIONS`` at once. When one more arrives, the one is closed that has waited longest without having
sent a whole request; if all have sent one, the oldest of all. So a client that sends its request at once finds room, however
many others send nothing.
"""

import logging
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import gevent
from gevent import get_hub

from metaq.engine.pool import run_in_pool
from metaq.replication.peers import Certificate
from metaq.server.access.permissions import ANONYMOUS, Principal
from metaq.server.http.away import CONNECTION_S, Away
from metaq.server.http.environ import Environ, StartResponse
from metaq.server.http.session import HeadKey, HttpSession, Take
from metaq.server.wire.accepting import new_connections
from metaq.server.wire.memory import Memory
from metaq.server.wire.pace import Pace
from metaq.server.wire.session import READABLE, Session, Stream

if TYPE_CHECKING:
    from metaq.server.http.httpserver import HttpServer

logger = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 256
"""Half of them for streams of events (``metaq.server.http.bounded``); each of those takes some 40 KB."""
ANSWER_S: Final = 60.0
"""The longest that an answer is owed: after that, the broker that owed it is gone."""
SWEEP_S: Final = 1.0
MOST_UNSENT: Final = 64 * 1024
"""Bytes of answers that a client has not read, or of messages whose answers are owed; beyond, nothing is received from it."""
MOST_HELD: Final = 64 * 1024 * 1024
MOST_HEADS: Final = 256
LONGEST_HEAD: Final = 4096
"""Bytes of a head that is remembered."""


class HttpPort:
    """The port: what its sessions need (``HttpHost``), and the connections that are on the long way."""

    max_unsent_bytes = MOST_UNSENT
    anonymous = Principal(ANONYMOUS)
    """The principal of a connection without a request that was understood: it may do nothing."""

    def __init__(
        self,
        listening: socket.socket,
        answer: Callable[[Environ, StartResponse], Any],
        certificate: Certificate | None,
        pace: Callable[[], Pace | None],
    ) -> None:
        """Begin to accept. ``answer`` is a WSGI application; ``pace`` returns that of the present broker, if there is one."""
        self._listening = listening
        self._address = listening.getsockname()[:2]
        self._answer = answer
        self._certificate = certificate
        self._pace = pace
        self._loop = get_hub().loop
        self._server: HttpServer | None = None
        self.sessions: dict[HttpSession, None] = {}
        """The oldest first."""
        self.away: dict[Any, Away] = {}
        """The connections on the long way, by greenlet."""
        self.heads: dict[HeadKey, Take] = {}
        self._heads_of: Pace | None = None
        """The pace of the broker that the heads are for."""
        self.memory = Memory(self.sessions, self.now)
        self.memory.most = MOST_HELD
        self._accepting = self._loop.io(listening.fileno(), READABLE)
        self._accepting.start(self._accept)
        self._sweeping = self._loop.timer(SWEEP_S, SWEEP_S)
        self._sweeping.start(self._sweep)

    def close(self) -> None:
        """Close the port and all connections."""
        self._accepting.close()
        self._sweeping.close()
        self._listening.close()
        for session in list(self.sessions):
            session.close()
        for away in list(self.away.values()):
            away.drop()

    # -- new connections, and those that wait too long ----------------------------------------------------------------

    def _accept(self) -> None:
        for connection, address in new_connections(self._listening, self._accepting, self._start_accepting):
            # else an answer may wait 40 ms for an acknowledgement
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if len(self.sessions) + len(self.away) >= MOST_CONNECTIONS:
                self._make_room()
            if self._certificate is None:
                self.take(connection, address, b"")
            else:  # the first byte says whether it is to be in TLS
                self.go_long(connection, address, b"", None)

    def _start_accepting(self) -> None:
        self._accepting.start(self._accept)

    def _make_room(self) -> None:
        """Close the connection that others need most to be closed."""
        waiting = [(session.waits_since, session.close) for session in self.sessions if not session.owed]
        waiting += [(away.since, away.drop) for away in self.away.values() if not away.asked]
        if not waiting:
            waiting = [(away.since, away.drop) for away in self.away.values()]
            waiting += [(session.waits_since, session.close) for session in self.sessions]
        logger.info("http connection dropped reason=%d others are open, too", MOST_CONNECTIONS)
        min(waiting, key=lambda each: each[0])[1]()

    def _sweep(self) -> None:
        self._forget_heads()
        now = self.now()
        for session in list(self.sessions):
            if now - session.waits_since > (ANSWER_S if session.owed else CONNECTION_S):
                session.close()

    # -- the two ways -------------------------------------------------------------------------------------------------

    def take(self, connection: Stream, address: Any, data: bytes) -> None:
        """Have a session for a connection from which ``data`` has come already."""
        session = HttpSession(connection, address, self)
        self.sessions[session] = None
        if data:
            session.receive(data)

    def go_long(self, connection: Any, address: Any, data: bytes, key: HeadKey | None) -> None:
        """Serve a connection in a greenlet; it comes back after the answer to its next request, unless it is in TLS."""
        greenlet = gevent.spawn(self._serve, connection, address, data, key)
        self.away[greenlet] = Away(greenlet, self.away)

    def _serve(self, connection: socket.socket, address: Any, data: bytes, key: HeadKey | None) -> None:
        away = self.away[gevent.getcurrent()]
        try:
            if self._server is None:
                make = run_in_pool(_server_class)
                self._server = self._server or make(self._address, self._answer, self._certificate, self._pace)
            more = self._server.serve(connection, address, data, away, lambda take: self._remember(key, take))
        finally:
            dropped = self.away.pop(gevent.getcurrent(), None) is None
        if more is None:
            return
        if dropped:  # in the turn in which it ended, so it was not killed any more
            more[0].close()
        else:
            self.take(*more)

    def _remember(self, key: HeadKey | None, take: Take) -> None:
        if key is None or len(key[1]) > LONGEST_HEAD:
            return
        self._forget_heads()
        if len(self.heads) >= MOST_HEADS:
            self.heads.clear()
        self.heads[key] = take

    def _forget_heads(self) -> None:
        """Forget the heads once another broker serves: what takes their requests would keep the one before, and its store."""
        pace = self._pace()
        if pace is not self._heads_of:
            self.heads.clear()
            self._heads_of = pace

    # -- what sessions need -------------------------------------------------------------------------------------------

    @property
    def spent(self) -> bool:
        pace = self._pace()
        return pace is not None and pace.spent

    def put_off(self, session: Session) -> None:
        pace = self._pace()
        assert pace is not None  # of a turn without one, nothing is spent
        pace.put_off(session)

    def io(self, fd: int, events: int) -> Any:
        return self._loop.io(fd, events)

    def now(self) -> float:
        return time.monotonic()

    def closed(self, session: Session) -> None:
        assert isinstance(session, HttpSession)
        self.sessions.pop(session, None)


def _server_class() -> "type[HttpServer]":
    """Return the class of the server. It takes 3 MB and 30 ms to import, so that happens when it is needed, in a thread."""
    from metaq.server.http.httpserver import HttpServer  # noqa: PLC0415

    return HttpServer
