"""The moments at which a session of the text protocol sends, tested with a fake connection."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from metaq.protocol.text.codec import CommandReader, TextLimits
from metaq.protocol.text.commands import Command, Stats
from metaq.server.access.permissions import ANYBODY
from metaq.server.text.session import TextSession
from metaq.server.wire.memory import Memory


class Watcher:
    """Nothing ever happens."""

    def start(self, callback: Callable[[], None]) -> None: ...

    def stop(self) -> None: ...


class Handlers:
    """Answers ``version`` at once, and owes the answer to ``stats``."""

    max_unsent_bytes = 1000
    spent = False
    anonymous = ANYBODY

    def __init__(self, *, due: bool) -> None:
        self._due = due
        self.memory = Memory((), self.now)
        self.memory.most = 1 << 20

    def io(self, fd: int, events: int) -> Watcher:
        return Watcher()

    def now(self) -> float:
        return 0.0

    def command(self, session: TextSession, command: Command) -> None:
        if type(command) is Stats:
            session.owed += 1
            session.due = self._due
        else:
            session.reply(b"now ")


class Client:
    """Keeps what it is sent, send by send."""

    def __init__(self) -> None:
        self.received: list[bytes] = []

    def fileno(self) -> int:
        return -1

    def send(self, data: bytes) -> int:
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[bytes]) -> int:
        self.received.append(b"".join(buffers))
        return len(self.received[-1])


def connect(*, due: bool) -> tuple[Client, TextSession]:
    client = Client()
    reader = CommandReader(TextLimits())
    return client, TextSession(cast(Any, client), ("127.0.0.1", 1), reader, cast(Any, Handlers(due=due)))


@pytest.mark.parametrize(("due", "received"), [(True, [b"now later"]), (False, [b"now ", b"later"])])
def test_answers_before_one_that_is_due(due: bool, received: list[bytes]) -> None:
    """SG-054: they go with the one at the end of the turn, in one send; before one that takes longer they go at once."""
    client, session = connect(due=due)
    session.receive(b"version 1\r\nstats x 2\r\n")
    assert client.received == received[:-1]
    session.answer(1, 0, b"later")
    assert client.received == received


def test_answers_of_several_turns() -> None:
    """SG-054: as long as each one brings on the next, they leave together, in the order of the commands."""
    client, session = connect(due=True)
    session.receive(b"stats x 1\r\nversion 2\r\nstats x 3\r\nversion 4\r\n")
    session.answer(1, 0, b"first ")
    assert client.received == []
    session.answer(1, 0, b"second ")
    assert client.received == [b"first now second now "]
    assert session.idle
