"""The endpoint of a process: its listeners, its connections, and the handlers that answer them.

Every address speaks both protocols, with the same handlers.
"""

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import nsmallest
from typing import Any, Final

from metaq.address import Address
from metaq.config import Settings
from metaq.errors import MetaqError, RequestFailed
from metaq.protocol.remoting.codes import Response
from metaq.protocol.remoting.frames import RemotingCommand
from metaq.protocol.remoting.requests import RequestReader
from metaq.protocol.remoting.sending.plain import KnownHeads
from metaq.protocol.text.codec import CommandReader, PutHead, TextLimits
from metaq.protocol.text.commands import Command, Quit
from metaq.protocol.text.replies import BAD_REQUEST, write_result
from metaq.server.access.authentication import Authentication
from metaq.server.remoting.admission import Admission, admission
from metaq.server.remoting.session import Answer, RemotingSession, RequestHandler, RunHandler, failure
from metaq.server.remoting.signing import signed
from metaq.server.text.session import TextSession
from metaq.server.wire.accepting import new_connections
from metaq.server.wire.listeners import Listener, resolve
from metaq.server.wire.memory import Memory
from metaq.server.wire.opening import Opening
from metaq.server.wire.pace import Pace
from metaq.server.wire.session import READABLE, Session, Stream
from metaq.server.wire.tls import TlsContext

logger = logging.getLogger(__name__)

PutsHandler = Callable[[TextSession, Sequence[Command], int], int]
CommandHandler = Callable[[TextSession, Any], None]

BUSY_RETRY_MS: Final = 1000
ROOM_SHARE: Final = 100
"""The part of ``max_connections`` that is made room for at once."""


class Endpoint:
    """All listeners and sessions of a process: the ``SessionHost`` of its sessions and the ``Door`` of new connections."""

    def __init__(
        self,
        settings: Settings,
        loop: Any,
        tls: TlsContext | None,
        bound: Mapping[str, "Listener"] | None = None,
        authentication: Authentication | None = None,
    ) -> None:
        """Prepare an endpoint without handlers, which the owner fills in before ``start``.

        ``bound`` are listeners, by setting, that are bound already; ``authentication`` has loaded the users already.
        """
        self.sessions: set[Session] = set()
        self.memory = Memory(self.sessions, self.now)
        self.configure(settings)
        self._loop = loop
        self.tls = tls
        self.authentication = authentication or Authentication(settings.users_file, settings.failed_logins_per_minute, self.now)
        self.anonymous = self.authentication.anonymous
        self._bound = dict(bound or {})
        self.listeners: dict[str, Listener] = {}
        self.puts: PutsHandler = _no_puts
        self.transactional_puts: PutsHandler = _no_puts
        self.runs: dict[int, RunHandler] = {}
        self.known_runs: dict[int, RunHandler] = {}
        """The same, for sessions whose principal is known without a signature."""
        self._commands: Mapping[type, CommandHandler] = {}
        self._requests: dict[int, tuple[Admission, RequestHandler]] = {}
        self._sends: KnownHeads = {}
        self.pace = Pace(loop)
        self.put_off = self.pace.put_off
        self._openings: set[Opening] = set()
        self._watchers: list[Any] = []

    def configure(self, settings: Settings) -> None:
        """Take over the limits for connections. Those for the length of a line and a body apply to new connections only."""
        self._settings = settings
        self.max_unsent_bytes = settings.max_unsent_bytes
        self.memory.most = settings.max_connections_bytes
        self.handshake_timeout_s = min(settings.handshake_timeout_ms, settings.idle_timeout_ms) / 1000
        self._limits = TextLimits(settings.max_line_bytes, settings.max_body_bytes)
        self._heads: dict[bytes, PutHead] = {}  # parsed heads of lines that keep these limits

    def answer(self, handlers: Mapping[int, RequestHandler]) -> None:
        """Add handlers for request codes, replacing those that exist. ``admission`` knows the right that each code needs."""
        self._requests.update({code: (admission(code), handler) for code, handler in handlers.items()})

    def answering(self, code: int) -> tuple[Admission, RequestHandler]:
        """Return what a request code needs, and the handler for it. Raise ``RequestFailed`` when there is none."""
        found = self._requests.get(code)
        if found is None:
            raise RequestFailed(Response.REQUEST_CODE_NOT_SUPPORTED, f"the request code {code} is not supported")
        return found

    def answer_runs(self, handlers: Mapping[int, RunHandler]) -> None:
        """Add handlers that take runs of plain requests of a code; ``answer`` has one for those that they do not take."""
        self.known_runs.update(handlers)
        self.runs.update({code: signed(self.authentication, admission(code), run) for code, run in handlers.items()})

    def answer_text(self, commands: Mapping[type, CommandHandler], puts: PutsHandler, transactional_puts: PutsHandler) -> None:
        """Set the handlers of the text protocol: one for each type of command, and those for runs of puts."""
        self._commands, self.puts, self.transactional_puts = commands, puts, transactional_puts

    # -- life ---------------------------------------------------------------------------------------------------------

    def bind(self, setting: str, value: str) -> Address:
        """Bind the address that a setting names, and return it with the actual port."""
        listener = self._bound.get(setting)
        if listener is None:
            listener = Listener(setting, resolve(setting, value, self._settings))
        self.listeners[setting] = listener
        return listener.address

    def start(self) -> None:
        """Begin to accept connections."""
        self.pace.start()
        for listener in self.listeners.values():
            listener.listen()
            watcher = self._loop.io(listener.socket.fileno(), READABLE)
            watcher.start(self._on_accept, listener, watcher)
            self._watchers.append(watcher)

    def release(self) -> Mapping[str, "Listener"]:
        """Accept no more connections, close those that have sent nothing, and return the listeners, still bound, for another
        endpoint."""
        for watcher in self._watchers:
            watcher.close()
        self._watchers = []
        for opening in list(self._openings):
            opening.on_readable()
        for opening in list(self._openings):
            opening.close()
        self._pause()
        return self.listeners

    def close(self) -> None:
        """Stop accepting connections, close the listeners, and close connections that have sent nothing."""
        for listener in self.release().values():
            listener.socket.close()

    def close_idle(self) -> None:
        """Close connections that have been silent for longer than ``idle_timeout_ms`` and wait for nothing."""
        oldest = self.now() - self._settings.idle_timeout_ms / 1000
        for session in [session for session in self.sessions if session.last_io < oldest and not session.is_expected]:
            logger.info("connection idle, closed session=%s", session)
            session.close()

    # -- new connections ----------------------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        return len(self.sessions) + len(self._openings)

    def _on_accept(self, listener: Listener, watcher: Any) -> None:
        for connection, address in new_connections(listener.socket, watcher, partial(self._accept_again, listener, watcher)):
            if self.connections >= self._settings.max_connections:
                self._make_room()
            if self.connections >= self._settings.max_connections:
                self._turn_away(connection)
                continue
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._openings.add(Opening(connection, address, self))

    def _accept_again(self, listener: Listener, watcher: Any) -> None:
        if watcher in self._watchers:  # otherwise the listener was released meanwhile, and may be another endpoint's
            watcher.start(self._on_accept, listener, watcher)

    def _make_room(self) -> None:
        """Close connections without a login: those that wait for nothing, and of these the ones silent for longest, first.

        It closes several at once, because it looks at all. Without users nobody logs in, and it closes none.
        """
        if not self.authentication.has_users:
            return
        limit = self._settings.max_connections
        strangers: list[Opening | Session] = [*self._openings, *(each for each in self.sessions if each.is_stranger)]
        closed = nsmallest(max(1, limit // ROOM_SHARE), strangers, key=_worth)
        for stranger in closed:
            stranger.close()
        if closed:
            logger.warning(
                "connections without a login closed count=%d limit=%d hint=%s",
                len(closed),
                limit,
                "there are as many connections as allowed, and users come first; setting: max_connections",
            )

    def _turn_away(self, connection: socket.socket) -> None:
        limit = self._settings.max_connections
        text = f"there are {limit} connections already (max_connections); retry after {BUSY_RETRY_MS} ms"
        try:
            connection.send(write_result(503, text, "2147483647"))
        except OSError as error:
            logger.debug("cannot tell a client that it is turned away reason=%s", error)
        connection.close()

    def text(self, connection: Stream, address: Any) -> Session:
        return TextSession(connection, address, CommandReader(self._limits, self._heads), self)

    def remoting(self, connection: Stream, address: Any) -> Session:
        return RemotingSession(connection, address, RequestReader(self._sends), self)

    def opened(self, opening: Opening, session: Session | None) -> None:
        self._openings.discard(opening)
        if session is not None:
            self.sessions.add(session)

    # -- what sessions need -------------------------------------------------------------------------------------------

    @property
    def spent(self) -> bool:
        return self.pace.spent

    def io(self, fd: int, events: int) -> Any:
        return self._loop.io(fd, events)

    def timer(self, seconds: float) -> Any:
        return self._loop.timer(seconds)

    def now(self) -> float:
        return time.monotonic()

    def command(self, session: TextSession, command: Command) -> None:
        handler = self._commands.get(type(command))
        if handler is not None:
            handler(session, command)
        elif not isinstance(command, Quit):  # the session ends by itself
            session.reply(write_result(BAD_REQUEST, "this command is not available", command.opaque))

    def request(self, session: RemotingSession, request: RemotingCommand) -> None:
        try:
            needs, handler = self.answering(request.code)
            needs.check_size(request)  # first: checking a signature reads the whole body
            self.authentication.identify(session, request)
            needs.check_right(session.principal)
            answer = handler(session, request)
        except MetaqError as error:
            answer = failure(error)
        except AssertionError:
            raise  # the broker's own state is wrong: the process ends
        except Exception:  # the stream is still in step, so the connection stays open
            logger.exception("request failed code=%d session=%s", request.code, session)
            answer = Answer(Response.SYSTEM_ERROR, remark=f"request {request.code} met an error of the broker, see its log")
        if answer is not None:
            session.respond(request, answer)

    def closed(self, session: Session) -> None:
        self.sessions.discard(session)
        self._pause()

    def _pause(self) -> None:
        """Stop measuring turns once no connection is left and none will come: by then the loop may belong to another one."""
        if not (self._watchers or self.sessions):
            self.pace.stop()


def _worth(connection: Opening | Session) -> tuple[bool, float]:
    return connection.is_expected, connection.last_io


def _no_puts(session: TextSession, commands: Sequence[Command], at: int) -> int:
    raise NotImplementedError("this process stores no messages")
