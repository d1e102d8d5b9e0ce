"""A session of the text protocol: replies leave in the order of the commands.

A command whose reply must wait (a put for the disk, a held get, a cold read) is *owed*. Puts may follow puts that are owed;
every other command after an owed one waits in the backlog. So does a put in a transaction, although its own reply is never
owed.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from metaq.engine.figures.counters import Counters
from metaq.engine.turn import Short
from metaq.errors import MetaqError
from metaq.protocol.text.codec import CommandReader
from metaq.protocol.text.commands import Ack, Command, Extend, Invalid, Nack, Put, Quit
from metaq.protocol.text.replies import ERROR, OK, STORED_AT, write_result
from metaq.server.wire.session import Buffer, Session, SessionHost, Stream

MOST_UNREAD: Final = 64 * 1024
"""Unsent bytes beyond which nothing is pushed to a client: the leases of what it has not read run all the same."""
REPLY_BYTES: Final = 120
"""What a reply that is owed takes of memory beside the body of its put: a text of some 60 characters."""
ENDS_OF_LEASES: Final = (Ack, Nack, Extend)


class TextHandlers(SessionHost, Protocol):
    """The parts of the broker that a text session needs."""

    def puts(self, session: "TextSession", commands: Sequence[Command], at: int) -> int:
        """Stage the run of plain puts at ``at``, each of which is owed from then on; return where the run ends."""
        ...

    def transactional_puts(self, session: "TextSession", commands: Sequence[Command], at: int) -> int:
        """Answer the run of puts with a transaction key at ``at``; return where it ends."""
        ...

    def command(self, session: "TextSession", command: Command) -> None:
        """Answer one other command, or make it owed."""
        ...


class HeldCommand(Protocol):
    """A command that waits for a message."""

    def cancel(self) -> None:
        """Forget it without an answer."""
        ...

    def wake(self) -> None:
        """Look once more, and answer."""
        ...


class Subscriber(Protocol):
    """A subscription of a session."""

    def end(self) -> None:
        """Push nothing more, and give back what is out."""
        ...

    def look(self) -> None:
        """Push what may be pushed now."""
        ...

    def finished(self, partition: int, ordinal: int) -> None:
        """Take note that a message is not out any more."""
        ...


class TextSession(Session):
    """One client that speaks the text protocol."""

    __slots__ = ("_handlers", "_reader", "_waiting", "held", "lease_changes", "leases_from", "roll_back", "subscriptions")

    def __init__(self, connection: Stream, address: Any, reader: CommandReader, handlers: TextHandlers) -> None:
        super().__init__(connection, address, handlers, reader.receive)
        self._handlers = handlers
        self._reader = reader
        self._waiting = False
        self.roll_back: Callable[[], object] | None = None
        """Ends the connection's transactions when it closes."""
        self.held: HeldCommand | None = None
        """The get or pop that waits for a message."""
        self.leases_from: dict[tuple[str, str], None] = {}
        """The topics and groups from which this connection has leased messages."""
        self.lease_changes = 0
        """Of the commands that are owed, those that end leases: more of these may follow them."""
        self.subscriptions: dict[tuple[str, str], Subscriber] = {}
        """By topic and group."""

    def close(self) -> None:
        super().close()
        roll_back, self.roll_back = self.roll_back, None
        if roll_back is not None:
            roll_back()

    def _drop_waiting(self) -> None:
        held, self.held = self.held, None
        if held is not None:
            held.cancel()
        subscriptions, self.subscriptions = self.subscriptions, {}
        for subscription in subscriptions.values():
            subscription.end()

    def _ended(self) -> None:
        super()._ended()
        if self.held is not None:  # the client may be gone: whether it still reads, only the answer can show
            self.held.wake()

    def _count_unfinished(self) -> int:
        return self._reader.buffered

    def _may_go_on(self) -> bool:
        return not self.owed and self._unsent <= self._handlers.max_unsent_bytes

    def _handle(self, commands: Sequence[Command]) -> None:
        at, end = 0, len(commands)
        while at < end and self._socket is not None:
            if at and self._handlers.spent:
                self._backlog = commands[at:]
                break
            if not self.owed:
                self._waiting = False
            command = commands[at]
            if type(command) is Put and command.transaction is None and not self._waiting:
                at = self._handlers.puts(self, commands, at)
            elif self._must_wait(command):
                self._backlog = commands[at:]
                break
            elif type(command) is Put:
                at = self._handlers.transactional_puts(self, commands, at)
            else:
                at += 1
                if not self._one(command):
                    break
                self._waiting = self.owed > 0  # puts may follow puts, but overtake nothing else

    def _must_wait(self, command: Command) -> bool:
        """Return whether a command cannot be answered yet. Ends of leases may follow each other: they are answered in order.

        One that makes dead letters may follow none: it reads the messages first.
        """
        if self._unsent > self._handlers.max_unsent_bytes:
            return True
        if not self.owed:
            return False
        if self.owed != self.lease_changes or type(command) not in ENDS_OF_LEASES:
            return True
        return type(command) is Nack and command.dead

    @property
    def is_expected(self) -> bool:
        return self.owed > 0 or (bool(self.subscriptions) and not self._unsent)  # a subscriber reads what it is sent

    # -- pushes -------------------------------------------------------------------------------------------------------

    @property
    def takes_pushes(self) -> bool:
        """True when the client reads what it is sent."""
        return self._socket is not None and not self._eof and self._unsent <= MOST_UNREAD

    def push(self, *buffers: Buffer) -> None:
        """Send what is no reply to a command; between two replies."""
        if self._socket is not None:
            if not self._unsent:  # the client was silent because there was nothing to read
                self.last_io = self._host.now()
                if not self.kept_waiting[0]:
                    self._since = self.last_io
            self.reply(*buffers)
            self.flush()

    def _on_writable(self) -> None:
        super()._on_writable()
        if self.takes_pushes:
            for subscription in list(self.subscriptions.values()):
                subscription.look()

    def _one(self, command: Command) -> bool:
        """Answer one command; return false when no other may be taken after it."""
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


class TextOutcome:
    """The replies to one session's puts of one turn."""

    __slots__ = ("_counters", "_session", "replies", "size", "turn")

    def __init__(self, session: TextSession, turn: int, counters: Counters) -> None:
        self._session = session
        self._counters = counters
        self.turn = turn
        self.replies: list[str] = []
        self.size = 0
        """The bytes of the bodies."""

    def stored(self) -> None:
        owed_bytes = self.size + REPLY_BYTES * len(self.replies)
        self._session.answer(len(self.replies), owed_bytes, "".join(self.replies).encode())

    def refused(self, error: MetaqError, outcome: str) -> None:
        self._counters.refuse(error, sum(reply.startswith(f"result {OK} ") for reply in self.replies))
        self._replace(error.status, lambda _: f"the message {outcome}: {error}")

    def late(self, short: Short) -> None:
        self._replace(ERROR, lambda place: f"{STORED_AT}{place}, not yet {short.level}")

    def _replace(self, code: int, text: Callable[[str], str]) -> None:
        self.replies = [replace_result(reply, code, text) for reply in self.replies]
        self.stored()


def result(code: int, text: str, opaque: str) -> str:
    """Return a ``result`` frame as text; the length is counted in UTF-8 bytes."""
    return f"result {code} {len(text) if text.isascii() else len(text.encode())} {opaque}\r\n{text}"


def replace_result(reply: str, code: int, text: Callable[[str], str]) -> str:
    """Return the reply to the same put with another outcome, unless it was refused before. ``text`` receives the old body."""
    line, _, body = reply.partition("\r\n")
    _, old_code, _, opaque = line.split(" ")
    return result(code, text(body), opaque) if int(old_code) == OK else reply
