"""One connection: callbacks on the hub's io watchers, not a greenlet.

Bytes → commands → handlers → one send. All protocols share what is here: the socket, the buffers to be sent, and the pace.
Commands wait in the backlog while the client does not read its answers, while too much is owed to it, and once the turn has
taken long enough (``metaq.server.wire.pace``). Reading stops meanwhile, so the memory that a connection can occupy is bounded.
``TextSession``, ``RemotingSession`` and ``HttpSession`` define what the bytes mean.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from metaq.protocol.record import host_bytes
from metaq.server.access.permissions import Principal
from metaq.server.wire.memory import Memory

logger = logging.getLogger(__name__)

RECEIVE_BYTES: Final = 64 * 1024
BUFFERS_PER_SEND: Final = 1024
"""IOV_MAX on Linux."""

GRAIN: Final = 4096
"""Changes of fewer bytes are not reported to the memory account: reporting each small put would cost 5 % of the put."""
HELD_BACK_BYTES: Final = 4096
"""More unsent bytes than this are not held back until the end of the turn: a client that sends many transactions in one go can
use the early answers."""

READABLE: Final = 1
WRITABLE: Final = 2

Buffer = bytes | memoryview


class Stream(Protocol):
    """A connected non-blocking socket. Methods raise ``BlockingIOError`` when they would block, ``OSError`` when it is lost."""

    def recv(self, size: int, /) -> bytes: ...

    def send(self, data: Buffer, /) -> int: ...

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class SessionHost(Protocol):
    """The parts of the broker that every session needs."""

    max_unsent_bytes: int
    memory: Memory
    anonymous: Principal
    """The principal of a connection that has not logged in."""

    @property
    def spent(self) -> bool:
        """True when requests that have not begun must wait for the next turn of the loop."""
        ...

    def put_off(self, session: "Session") -> None:
        """Flush the session in one of the next turns."""
        ...

    def io(self, fd: int, events: int) -> Any:
        """Return a new watcher of the hub's loop."""
        ...

    def now(self) -> float:
        """Return monotonic seconds. The loop's own clock follows the wall clock, which can be set."""
        ...

    def closed(self, session: "Session") -> None: ...


class Session:
    """One client. ``reply`` answers a command at once; ``answer`` sends answers that were owed."""

    __slots__ = (
        "_backlog",
        "_backlog_bytes",
        "_eof",
        "_held",
        "_host",
        "_out",
        "_reading",
        "_receive",
        "_since",
        "_socket",
        "_unfinished",
        "_unsent",
        "_watcher",
        "_write_watcher",
        "address",
        "born_host",
        "due",
        "last_io",
        "outcome",
        "owed",
        "owed_bytes",
        "principal",
    )

    def __init__(self, connection: Stream, address: Any, host: SessionHost, receive: Callable[[bytes], Sequence[Any]]) -> None:
        """Begin to read. ``receive`` turns bytes into commands."""
        self._socket: Stream | None = connection
        self.address = address
        self._host = host
        self._receive = receive
        self._out: list[Buffer] = []
        self._unsent = 0
        self._backlog: Sequence[Any] = ()
        self._backlog_bytes = 0  # an upper bound
        self._unfinished = 0
        self._held = 0  # the sum of the above, of unsent bytes and of owed bytes, as last reported to the account
        self._eof = False
        self._reading = True
        self._write_watcher: Any = None
        self.owed = 0
        self.owed_bytes = 0
        self.due = False
        """True when something owed is answered at the end of this turn: a few unsent bytes then wait for it, for one send in
        all."""
        self.outcome: Any = None
        """The outcome of the puts of the current turn."""
        self.principal = host.anonymous
        self.born_host = host_bytes(address[0], address[1])
        self._since = self.last_io = host.now()
        self._watcher = host.io(connection.fileno(), READABLE)
        self._watcher.start(self._on_readable)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.address} owed {self.owed} unsent {self._unsent}>"

    @property
    def closed(self) -> bool:
        return self._socket is None

    @property
    def ended(self) -> bool:
        """True when no more commands are taken, from a client that has sent its last one or is being disconnected."""
        return self._eof or self._socket is None

    @property
    def idle(self) -> bool:
        """True when nothing is owed, waiting or unsent."""
        return not (self.owed or self._backlog or self._unsent)

    @property
    def is_expected(self) -> bool:
        """True when the client waits for something, and may be silent for as long as it likes."""
        return self.owed > 0

    @property
    def kept_waiting(self) -> tuple[int, float]:
        """The bytes that only the client can release, and the monotonic time since which it has released none."""
        return self._unfinished + self._backlog_bytes + self._unsent, self._since

    @property
    def is_stranger(self) -> bool:
        """True when the client has not logged in."""
        return not self.principal.named

    # -- what the protocols say ---------------------------------------------------------------------------------------

    def _handle(self, commands: Sequence[Any]) -> None:
        """Answer commands in order. Those that have to wait become the backlog."""
        raise NotImplementedError

    def _count_unfinished(self) -> int:
        """Return the bytes received of a command that is still incomplete."""
        raise NotImplementedError

    def _may_go_on(self) -> bool:
        """Return whether the backlog can be handled now."""
        return self._unsent <= self._host.max_unsent_bytes

    def _drop_waiting(self) -> None:
        """Drop what waits for an answer to this client, or from it: the connection is closed."""
        raise NotImplementedError

    def _ended(self) -> None:
        """Handle the end of input: the client sends nothing more."""
        self.finish()

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        if not self._host.spent:  # otherwise the watcher, which is level-triggered, calls again in the next turn
            self._take_in()

    def _take_in(self) -> None:
        if self._socket is None:  # closed by another connection's work in this turn
            return
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("connection lost peer=%s reason=%s", self.address, error)
            self.close()
            return
        if not data:
            self._ended()
            return
        self.receive(data)

    def receive(self, data: bytes) -> None:
        """Take bytes from the client, and handle the commands that they complete."""
        self.last_io = self._host.now()
        before = self._unfinished
        commands = self._receive(data)
        self._unfinished = self._count_unfinished()
        if commands:
            self._since = self.last_io
            if self._host.spent:
                self._backlog = commands
            else:
                self._process(commands)
            if self._backlog:
                self._backlog_bytes = before + len(data) - self._unfinished
            self.flush()
        elif self._socket is not None:
            if not before:
                self._since = self.last_io
            self._weigh()

    def _process(self, commands: Sequence[Any]) -> None:
        """Handle commands in order, until one has to wait for answers that are owed, or for a client that does not read."""
        try:
            self._handle(commands)
        except AssertionError:
            raise  # the broker's own state is wrong: the process ends
        except Exception:  # noqa: BLE001 - logged with its trace; see break_off
            self.break_off()

    def break_off(self) -> None:
        """Log an unexpected error and close this connection; others go on. Call it while the exception is handled."""
        logger.exception("command failed, connection closed session=%s", self)
        self.close()

    def wind_up(self) -> None:
        """Read what the client has sent so far, then ``finish``.

        Input that is still unread at the close would get no answer.
        """
        if self._reading:
            self._take_in()
        self.finish()

    def finish(self) -> None:
        """Take no more commands, and close once everything due is sent."""
        if self._socket is None:
            return
        self._eof = True
        self._pace()
        if self.idle:
            self.close()

    # -- sending ------------------------------------------------------------------------------------------------------

    def reply(self, *buffers: Buffer) -> None:
        """Answer the command that is being handled. The bytes are sent together with the other answers of this turn."""
        self._out.extend(buffers)
        self._unsent += sum(map(len, buffers))

    def answer(self, replies: int, size: int, *buffers: Buffer) -> None:
        """Send answers that were owed, to ``replies`` commands of ``size`` bytes in all, then go on with the backlog."""
        self.owed -= replies
        self.owed_bytes -= size
        self.due = False
        if self._socket is None:
            return
        for buffer in buffers:
            self._out.append(buffer)
            self._unsent += len(buffer)
        self.flush()

    def flush(self) -> None:
        """Send as much as possible now, go on with the backlog as far as that makes room, and decide whether to read on."""
        limit = self._host.max_unsent_bytes
        if not (self._backlog and self._may_go_on()):  # if not, it is sent together with the backlog's answers
            self._send()
        while self._backlog and self._may_go_on():
            if self._host.spent:
                self._host.put_off(self)
                self._send()
                break
            commands, self._backlog = self._backlog, ()
            self._process(commands)
            self._send()
        if self._socket is None:
            return
        if not self._backlog:
            self._backlog_bytes = 0
        if not self._reading or self._unsent or self._backlog or self.owed_bytes > limit:
            self._pace()
        if self._eof and self.idle:
            self.close()
        else:
            self._weigh()

    def _weigh(self) -> None:
        """Report to the account what this connection holds now; the account may close this connection, or others."""
        held = self._unfinished + self._backlog_bytes + self._unsent + self.owed_bytes
        more = held - self._held
        if not -GRAIN < more < GRAIN:
            self._held = held
            self._host.memory.change(more)

    def _send(self) -> None:
        """Send as much as possible now, unless it is better sent later, and watch for the moment to send the rest."""
        connection, out = self._socket, self._out
        if connection is None or not out or (self.due and self._unsent <= HELD_BACK_BYTES):
            return
        try:
            while out:
                sent = connection.send(out[0]) if len(out) == 1 else connection.sendmsg(out[:BUFFERS_PER_SEND])
                self._unsent -= sent
                if not self._unsent:
                    out.clear()
                    break
                self._drop_sent(sent)
        except BlockingIOError:
            pass
        except OSError as error:
            logger.debug("connection lost peer=%s reason=%s", self.address, error)
            self.close()
            return
        if out and self._write_watcher is None:
            self._write_watcher = self._host.io(connection.fileno(), WRITABLE)
            self._write_watcher.start(self._on_writable)

    def _drop_sent(self, sent: int) -> None:
        out = self._out
        index = 0
        while sent and sent >= len(out[index]):
            sent -= len(out[index])
            index += 1
        del out[:index]
        if sent:
            out[0] = memoryview(out[0])[sent:]

    def _on_writable(self) -> None:
        self._since = self.last_io = self._host.now()
        if self._write_watcher is not None:
            self._write_watcher.close()
            self._write_watcher = None
        self.flush()

    def _pace(self) -> None:
        """Read on only while the client reads its answers and not too much is owed."""
        limit = self._host.max_unsent_bytes
        wanted = not (self._eof or self._backlog or self._unsent > limit or self.owed_bytes > limit)
        if wanted != self._reading:
            self._reading = wanted
            if wanted:
                self._watcher.start(self._on_readable)
            else:
                self._watcher.stop()

    def close(self) -> None:
        """Close now; answers that are still owed are dropped when they come."""
        connection = self.leave()
        if connection is not None:
            connection.close()

    def leave(self) -> Stream | None:
        """End the session as ``close`` does, and return its connection, which stays open; ``None`` when it has ended before."""
        connection = self._socket
        if connection is None:
            return None
        self._watcher.close()
        if self._write_watcher is not None:
            self._write_watcher.close()
        self._socket = None
        self._out = []
        self._backlog = ()
        self._unfinished = self._backlog_bytes = self._unsent = 0
        freed, self._held = self._held, 0
        self._host.memory.change(-freed)
        # break references back to the session, so that its memory is freed with its last user, not at the next collection
        self._receive = _nothing
        self.outcome = None
        self._drop_waiting()
        self._host.closed(self)
        return connection


def _nothing(data: bytes) -> Sequence[Any]:
    """Return no commands. Replaces the reader of a closed connection."""
    return ()
