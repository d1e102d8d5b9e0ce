"""One connection: a callback on the hub's io watcher, not a greenlet.

Bytes → commands → handlers → one send. Replies leave in the order of the commands. A command whose reply must wait (a put for
the disk, a held get, a cold read) is *owed*; puts may follow puts, every other command behind one that is owed waits in the
backlog, and reading stops meanwhile. So what a connection can make the broker hold is bounded.
"""

import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from metaq.protocol.commands import Command, Invalid, Put, Quit
from metaq.protocol.record import host_bytes
from metaq.protocol.replies import write_result
from metaq.protocol.text import CommandReader
from metaq.server.permissions import ANONYMOUS

logger = logging.getLogger(__name__)

RECEIVE_BYTES: Final = 64 * 1024
BUFFERS_PER_SEND: Final = 1024
"""IOV_MAX on Linux."""

READABLE: Final = 1
WRITABLE: Final = 2

Buffer = bytes | memoryview


class Handlers(Protocol):
    """What a session needs of the rest of the broker."""

    max_unsent_bytes: int

    def io(self, fd: int, events: int) -> Any:
        """A watcher of the hub's loop."""
        ...

    def now(self) -> float:
        """Seconds of the loop's own clock, read once a turn."""
        ...

    def puts(self, session: "Session", commands: Sequence[Command], at: int) -> int:
        """Stage the run of puts at ``at``, each of which is owed from then on; return where the run ends."""
        ...

    def command(self, session: "Session", command: Command) -> None:
        """Answer one other command, or make it owed."""
        ...

    def closed(self, session: "Session") -> None: ...


class Session:
    """One client. ``answer`` pays what is owed; ``reply`` answers a command at once."""

    __slots__ = (
        "_address",
        "_backlog",
        "_eof",
        "_handlers",
        "_out",
        "_reading",
        "_socket",
        "_unsent",
        "_waiting",
        "_watcher",
        "_write_watcher",
        "born_host",
        "last_io",
        "on_close",
        "owed",
        "owed_bytes",
        "principal",
        "reader",
        "staged",
        "staged_bytes",
    )

    def __init__(self, connection: socket.socket, address: Any, reader: CommandReader, handlers: Handlers) -> None:
        self._socket: socket.socket | None = connection
        self._address = address
        self.reader = reader
        self._handlers = handlers
        self._out: list[Buffer] = []
        self._unsent = 0
        self._backlog: Sequence[Command] = ()
        self._eof = False
        self._reading = True
        self._write_watcher: Any = None
        self._waiting = False
        self.owed = 0
        self.owed_bytes = 0
        self.staged: list[str] = []
        self.staged_bytes = 0
        self.principal = ANONYMOUS
        self.on_close: Callable[[], None] | None = None
        self.born_host = host_bytes(address[0], address[1])
        self.last_io = handlers.now()
        self._watcher = handlers.io(connection.fileno(), READABLE)
        self._watcher.start(self._on_readable)

    def __repr__(self) -> str:
        return f"<Session {self._address} owed {self.owed} unsent {self._unsent}>"

    @property
    def closed(self) -> bool:
        return self._socket is None

    @property
    def idle(self) -> bool:
        """Nothing is owed, waiting or unsent."""
        return not (self.owed or self._backlog or self._unsent)

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            logger.debug("connection lost peer=%s reason=%s", self._address, error)
            self.close()
            return
        if not data:
            self.finish()
            return
        self.last_io = self._handlers.now()
        commands = self.reader.receive(data)
        if commands:
            self._process(commands)
            self._flush()

    def _process(self, commands: Sequence[Command]) -> None:
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

    def _handle(self, commands: Sequence[Command]) -> None:
        at, end = 0, len(commands)
        while at < end and self._socket is not None:
            if not self.owed:
                self._waiting = False
            if type(commands[at]) is Put and not self._waiting:
                at = self._handlers.puts(self, commands, at)
            elif self.owed or self._unsent > self._handlers.max_unsent_bytes:
                self._backlog = commands[at:]
                break
            else:
                command = commands[at]
                at += 1
                if not self._one(command):
                    break
                self._waiting = self.owed > 0  # puts may follow puts, but overtake nothing else

    def _one(self, command: Command) -> bool:
        """Answer one command; false when no other is to be taken after it."""
        if type(command) is Quit:
            self.finish()
            return False
        if type(command) is Invalid:
            self.reply(write_result(command.error.status, str(command.error), command.opaque))
            if command.error.closes_connection:
                self._eof = True
                return False
        else:
            self._handlers.command(self, command)
        return True

    def finish(self) -> None:
        """Take no more commands; close when everything due is sent."""
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
        if self._socket is None:
            return
        for buffer in buffers:
            self._out.append(buffer)
            self._unsent += len(buffer)
        self._flush()

    def _flush(self) -> None:
        """Send what can be sent now, go on with the backlog as far as that makes room, and decide whether to read on."""
        limit = self._handlers.max_unsent_bytes
        self._send()
        while self._backlog and not self.owed and self._unsent <= limit:
            commands, self._backlog = self._backlog, ()
            self._process(commands)
            self._send()
        if self._socket is None:
            return
        if not self._reading or self._unsent or self._backlog or self.owed_bytes > limit:
            self._pace()
        if self._eof and self.idle:
            self.close()

    def _send(self) -> None:
        """Send what can be sent now, and watch for the rest."""
        connection, out = self._socket, self._out
        if connection is None or not out:
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
            logger.debug("connection lost peer=%s reason=%s", self._address, error)
            self.close()
            return
        if out and self._write_watcher is None:
            self._write_watcher = self._handlers.io(connection.fileno(), WRITABLE)
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
        self.last_io = self._handlers.now()
        if self._write_watcher is not None:
            self._write_watcher.close()
            self._write_watcher = None
        self._flush()

    def _pace(self) -> None:
        """Read on only while the client takes its answers and not too much is owed."""
        limit = self._handlers.max_unsent_bytes
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
        self._unsent = 0
        self._backlog = ()
        if self.on_close is not None:
            self.on_close()
        self._handlers.closed(self)
