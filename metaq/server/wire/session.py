"""One connection: callbacks on the hub's io watchers, not a greenlet.

Bytes → commands → handlers → one send. This is what both protocols share: the socket, the buffers on their way out, and the
pace. What the client says waits in the backlog while it does not take its answers or too much is owed to it, and when the turn
has taken long enough (``metaq.server.wire.pace``). Reading stops meanwhile, so what a connection can make the broker hold is
bounded. ``TextSession`` and ``RemotingSession`` say what the bytes mean.
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
"""Bytes from which on the account is told of a change: to tell it of each small put would cost 5 % of one."""
HELD_BACK_BYTES: Final = 4096
"""More than that is not held back for the end of the turn: a client that sends many transactions in one go has use for it."""

READABLE: Final = 1
WRITABLE: Final = 2

Buffer = bytes | memoryview


class Stream(Protocol):
    """A connected socket that does not block: ``BlockingIOError`` when it would, ``OSError`` when it is lost."""

    def recv(self, size: int, /) -> bytes: ...

    def send(self, data: Buffer, /) -> int: ...

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int: ...

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Host(Protocol):
    """What every session needs of the rest of the broker."""

    max_unsent_bytes: int
    memory: Memory
    anonymous: Principal
    """Who has not logged in."""

    @property
    def spent(self) -> bool:
        """Whether requests that have not been begun are for the next turn of the loop."""
        ...

    def put_off(self, session: "Session") -> None:
        """Flush the session in one of the next turns."""
        ...

    def io(self, fd: int, events: int) -> Any:
        """A watcher of the hub's loop."""
        ...

    def now(self) -> float:
        """Seconds of a clock that nobody sets; the loop's own follows the wall clock."""
        ...

    def closed(self, session: "Session") -> None: ...


class Session:
    """One client. ``answer`` pays what is owed; ``reply`` answers a command at once."""

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
        "on_close",
        "outcome",
        "owed",
        "owed_bytes",
        "principal",
    )

    def __init__(self, connection: Stream, address: Any, host: Host, receive: Callable[[bytes], Sequence[Any]]) -> None:
        """``receive`` turns bytes into commands."""
        self._socket: Stream | None = connection
        self.address = address
        self._host = host
        self._receive = receive
        self._out: list[Buffer] = []
        self._unsent = 0
        self._backlog: Sequence[Any] = ()
        self._backlog_bytes = 0  # at most
        self._unfinished = 0
        self._held = 0  # of all that, and of what is owed, as the account knows it
        self._eof = False
        self._reading = True
        self._write_watcher: Any = None
        self.owed = 0
        self.owed_bytes = 0
        self.due = False
        """Something owed is answered at the end of this turn: what little is unsent goes with that, in one send."""
        self.outcome: Any = None
        """What the puts of the current turn lead to."""
        self.principal = host.anonymous
        self.on_close: Callable[[], None] | None = None
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
    def idle(self) -> bool:
        """Nothing is owed, waiting or unsent."""
        return not (self.owed or self._backlog or self._unsent)

    @property
    def kept_waiting(self) -> tuple[int, float]:
        """Bytes that only the client can release, and since when it has released none."""
        return self._unfinished + self._backlog_bytes + self._unsent, self._since

    @property
    def is_stranger(self) -> bool:
        """Whether nobody has logged in here."""
        return not self.principal.named

    # -- what the protocols say ---------------------------------------------------------------------------------------

    def _handle(self, commands: Sequence[Any]) -> None:
        """Answer commands in order; those that have to wait become the backlog."""
        raise NotImplementedError

    def _count_unfinished(self) -> int:
        """Bytes of a command whose end has not come."""
        raise NotImplementedError

    def _may_go_on(self) -> bool:
        """Whether the backlog can be taken up."""
        return self._unsent <= self._host.max_unsent_bytes

    def _ended(self) -> None:
        """The client sends nothing more."""
        self.finish()

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        if not self._host.spent:  # else it is called again in the next turn
            self._take_in()

    def _take_in(self) -> None:
        if self._socket is None:  # what another connection did in this turn has closed it
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
        """Take what the client sent."""
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
        """Handle commands in order, until one has to wait: for what is owed, or for a client that does not read."""
        try:
            self._handle(commands)
        except AssertionError:
            raise  # the broker's own state is wrong: the process ends
        except Exception:  # noqa: BLE001 - logged with its trace; see break_off
            self.break_off()

    def break_off(self) -> None:
        """Close because of an error that nobody expected; other connections go on. Called while it is handled."""
        logger.exception("command failed, connection closed session=%s", self)
        self.close()

    def wind_up(self) -> None:
        """Take what the client has sent so far, then ``finish``: what is found unread at the close is answered by nobody."""
        if self._reading:
            self._take_in()
        self.finish()

    def finish(self) -> None:
        """Take no more commands; close when everything due is sent."""
        if self._socket is None:
            return
        self._eof = True
        self._pace()
        if self.idle:
            self.close()

    # -- sending ------------------------------------------------------------------------------------------------------

    def reply(self, *buffers: Buffer) -> None:
        """Answer the command that is being handled; sent together with the other answers of this turn."""
        self._out.extend(buffers)
        self._unsent += sum(map(len, buffers))

    def answer(self, replies: int, size: int, *buffers: Buffer) -> None:
        """Pay what is owed: the answers to ``replies`` commands which had ``size`` bytes; then go on with the backlog."""
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
        """Send what can be sent now, go on with the backlog as far as that makes room, and decide whether to read on."""
        limit = self._host.max_unsent_bytes
        if not (self._backlog and self._may_go_on()):  # else what goes out now goes with what the backlog says
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
        """Tell the account what is held here now; that may close this connection, or another one."""
        held = self._unfinished + self._backlog_bytes + self._unsent + self.owed_bytes
        more = held - self._held
        if not -GRAIN < more < GRAIN:
            self._held = held
            self._host.memory.change(more)

    def _send(self) -> None:
        """Send what can be sent now and is not better sent later, and watch for the rest."""
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
        """Read on only while the client takes its answers and not too much is owed."""
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
        if self._socket is None:
            return
        self._watcher.close()
        if self._write_watcher is not None:
            self._write_watcher.close()
        self._socket.close()
        self._socket = None
        self._out = []
        self._backlog = ()
        self._unfinished = self._backlog_bytes = self._unsent = 0
        freed, self._held = self._held, 0
        self._host.memory.change(-freed)
        # what refers back to the session, so that what it keeps goes with its last user and not with the next collection
        on_close, self.on_close = self.on_close, None
        self._receive = _nothing
        self.outcome = None
        if on_close is not None:
            on_close()
        self._host.closed(self)


def _nothing(data: bytes) -> Sequence[Any]:
    """Is read from a connection that is closed."""
    return ()
