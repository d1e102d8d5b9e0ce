"""Parts of the broker that go on whatever one connection does, tested with fake connections."""

import random
import socket
import time
from collections.abc import Callable
from typing import Any, Final, cast

import pytest

from metaq.address import Address
from metaq.config import load
from metaq.engine.tables import locks
from metaq.engine.tables.locks import LOCK_S, QueueLocks
from metaq.message import MessageQueue
from metaq.protocol.remoting.codes import Request
from metaq.protocol.remoting.frames import FrameReader, RemotingCommand, encode_request
from metaq.protocol.text.codec import CommandReader, TextLimits
from metaq.server.access.permissions import ANONYMOUS, ANYBODY, Principal
from metaq.server.endpoint import Endpoint
from metaq.server.remoting.session import Answer, Kept, RemotingSession
from metaq.server.text.session import TextSession
from metaq.server.wire.listeners import KEEP_ALIVE, Listener
from metaq.server.wire.memory import Memory
from metaq.server.wire.reads import StoreRead, StoreReads
from metaq.server.wire.session import GRAIN
from metaq.store.files.filecache import Read

LIMIT: Final = 4096


class Watcher:
    """Nothing ever happens."""

    def start(self, callback: Callable[[], None]) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


class Host:
    """The parts of a broker that a session needs when its client sends no requests."""

    max_unsent_bytes = LIMIT
    spent = False
    anonymous = ANYBODY

    def __init__(self, most: int = 1 << 30) -> None:
        self.now_s = 0.0
        self.sessions: list[Any] = []
        self.memory = Memory(self.sessions, self.now)
        self.memory.most = most

    def io(self, fd: int, events: int) -> Watcher:
        return Watcher()

    def now(self) -> float:
        return self.now_s

    def closed(self, session: Any) -> None:
        if session in self.sessions:
            self.sessions.remove(session)


class FullStream:
    """A client that never reads."""

    def close(self) -> None: ...

    def fileno(self) -> int:
        return -1

    def send(self, data: bytes) -> int:
        raise BlockingIOError

    def sendmsg(self, buffers: list[bytes]) -> int:
        raise BlockingIOError


def test_a_client_that_does_not_read_is_not_told_for_ever() -> None:
    """SG-089: what waits for it has a limit, also when it is the broker who speaks."""
    session = RemotingSession(cast(Any, FullStream()), ("127.0.0.1", 1), FrameReader(), cast(Any, Host()))
    for _ in range(1000):
        session.tell(Request.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g" * 100})
    assert int(repr(session).rstrip(">").rpartition(" ")[2]) < 2 * LIMIT


class LostStream(FullStream):
    """A client that is gone, which a send finds out."""

    def send(self, data: bytes) -> int:
        raise ConnectionResetError


class Timer:
    """Never ends."""

    def start(self, callback: Callable[..., None], *arguments: object) -> None: ...

    def close(self) -> None: ...


def test_who_is_gone_is_neither_told_nor_waited_for() -> None:
    """SG-089: whoever asks knows at once, also when nothing but the question itself shows that the connection is lost."""
    host: Any = Host()
    host.timer = lambda seconds: Timer()
    answers: list[RemotingCommand | None] = []
    told, asked = [RemotingSession(cast(Any, LostStream()), ("127.0.0.1", 1), FrameReader(), host) for _ in range(2)]
    for known in (1, 2):  # an open connection that is lost, then one that is known to be closed
        assert not told.tell(Request.CHECK_TRANSACTION_STATE, {})
        asked.ask(Request.PUSH_REPLY_MESSAGE_TO_CLIENT, {}, b"", answers.append)
        assert told.closed and asked.closed
        assert answers == [None] * known


class Cancel:
    """Cancels a held request, and counts how often such are compared."""

    compared = 0

    def __init__(self, name: int, called: list[int]) -> None:
        self._name = name
        self._called = called

    def __call__(self) -> None:
        self._called.append(self._name)

    def __eq__(self, other: object) -> bool:
        Cancel.compared += 1
        return self is other

    __hash__ = object.__hash__


def test_a_request_that_is_held_no_longer_is_not_looked_for_among_all_others() -> None:
    """SG-089: one connection may hold thousands; when it closes those that are left are cancelled, the oldest first."""
    session = RemotingSession(cast(Any, FullStream()), ("127.0.0.1", 1), FrameReader(), cast(Any, Host()))
    called: list[int] = []
    cancels = [Cancel(name, called) for name in range(1000)]
    for cancel in cancels:
        session.at_close(cancel)
    for cancel in reversed(cancels[2:]):
        session.not_at_close(cancel)
        session.not_at_close(cancel)
    assert Cancel.compared <= len(cancels)
    session.close()
    assert called == [0, 1]


MIB: Final = 1 << 20
FRAME: Final = (1 << 24).to_bytes(4) + (20).to_bytes(4)
"""The head of one of 16 MiB."""
PUT: Final = b"put t 0 1048576 0 1\r\n"


def remoting(host: Host, *, named: bool = False) -> RemotingSession:
    """A connection that has said nothing yet."""
    session = RemotingSession(cast(Any, FullStream()), ("127.0.0.1", 1), FrameReader(), cast(Any, host))
    session.principal = Principal("named" if named else ANONYMOUS, admin=True)
    host.sessions.append(session)
    return session


def text(host: Host) -> TextSession:
    session = TextSession(
        cast(Any, FullStream()), ("127.0.0.1", 1), CommandReader(TextLimits(max_body_bytes=MIB)), cast(Any, host)
    )
    host.sessions.append(session)
    return session


def test_what_never_ends_makes_room() -> None:
    """SG-054: beyond the limit those go that have kept most for longest, of both protocols, until an eighth is free."""
    host = Host(most=8 * MIB)
    old = [remoting(host) if number % 2 else text(host) for number in range(8)]
    for session in old:
        session.receive((FRAME if isinstance(session, RemotingSession) else PUT) + bytes(MIB - 100))
    host.now_s = 10.0
    assert host.memory.held == sum(session.kept_waiting[0] for session in old) <= host.memory.most
    new = remoting(host)
    new.receive(FRAME + bytes(2 * MIB))
    assert not new.closed  # though it holds more than each of the others: it has just begun
    assert host.memory.held <= 7 * MIB
    assert [session.closed for session in old].count(True) == host.memory.evicted == 3
    for session in host.sessions[:]:
        session.close()
    assert host.memory.held == 0


def test_strangers_make_room_first() -> None:
    """E-05, SG-054: who has logged in goes on with what is large and old; a stranger's half line costs it no connection."""
    host = Host(most=8 * MIB)
    client, person = remoting(host, named=True), text(host)
    client.receive(FRAME + bytes(4 * MIB))
    person.receive(b"get t ")
    host.now_s = 60.0
    strangers = [remoting(host) for _ in range(5)]
    for session in strangers:
        session.receive(FRAME + bytes(MIB))
        host.now_s += 0.01
    assert (client.closed, person.closed) == (False, False)
    assert 0 < [session.closed for session in strangers].count(True) < 3
    greedy = remoting(host, named=True)
    greedy.receive(FRAME + bytes(7 * MIB))
    assert not person.closed
    assert host.memory.held <= 7 * MIB


@pytest.mark.parametrize("seed", range(20))
def test_the_account_is_what_is_held(seed: int) -> None:
    """SG-054, SG-089: whatever comes, is owed, is answered, is not read and is closed, in any order and any slices."""
    chance, host = random.Random(seed), Host(most=MIB)
    owed: list[tuple[RemotingSession, Kept]] = []

    def request(session: RemotingSession, command: RemotingCommand) -> None:
        if chance.random() < 0.5:
            owed.append((session, session.owe(command, chance.choice((0, len(command.body))))))
        else:
            session.respond(command, Answer(body=(bytes(chance.randrange(20_000)),)))

    cast(Any, host).request = request
    for _ in range(300):
        host.now_s += chance.random()
        if len(host.sessions) < 6:
            remoting(host, named=chance.random() < 0.5)
        session: RemotingSession = chance.choice(host.sessions)
        match chance.randrange(6):
            case 0 | 1 | 2:
                frames = b"".join(encode_request(1, number, {"a": "b" * number}, bytes(5000)) for number in range(4))
                session.receive(frames[chance.randrange(2) * 8 : chance.randrange(9, len(frames))])
            case 3 if owed:
                session, kept = owed.pop(chance.randrange(len(owed)))
                session.pay(kept, Answer(body=(bytes(chance.randrange(20_000)),)))
            case 4:
                session._drop_sent(0)
                session._on_writable()
            case _ if chance.random() < 0.1:
                session.close()
        held = sum(each.kept_waiting[0] + each.owed_bytes for each in host.sessions)
        assert abs(host.memory.held - held) <= GRAIN * len(host.sessions)
        assert host.memory.held <= MIB + sum(each.owed_bytes for each in host.sessions)
    for each in host.sessions[:]:
        each.close()
    assert host.memory.held == 0


class Broken(StoreRead):
    """A request that meets an error which nobody expected."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def read(self, read: Read) -> None:
        raise ValueError("a test says so")


class Breaking:
    """Counts how often it is broken off."""

    def __init__(self) -> None:
        self.broken = 0

    def break_off(self) -> None:
        self.broken += 1


def test_who_wakes_a_held_request_survives_it() -> None:
    """SG-060: the connection is closed, the others that wait are woken all the same."""
    session = Breaking()
    StoreReads(load(None, {}, {}), lambda call: call()).start(Broken(session))
    assert session.broken == 1


def test_there_is_room_for_so_many_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-123: beyond it those that are held are kept, and those that have run out make room."""
    monkeypatch.setattr(locks, "MOST_LOCKS", 3)
    table = QueueLocks()
    queues = [MessageQueue("T", "metaq", number) for number in range(5)]
    assert table.lock("g", "a", queues[:2], 0.0) == queues[:2]
    assert table.lock("g", "a", queues, 1.0) == queues[:3]
    assert table.lock("h", "b", queues, 2.0) == []
    assert table.lock("h", "b", queues, 2.0 + LOCK_S) == queues[:3]
    assert len(table) == 3


def test_nobody_takes_the_locks_of_all_groups() -> None:
    """SG-123, E-05: whatever groups and clients one names in its requests, there is room for the others."""
    table = QueueLocks()
    queues = [MessageQueue("T", "metaq", number) for number in range(16_000)]
    for number in range(14):
        table.lock(f"made-up-{number}", f"client-{number}", queues, 0.0, "eve@10.0.0.66")
    assert len(table) == locks.MOST_OF_ONE
    assert table.lock("billing", "one", queues[:9], 0.0, "billing@10.0.0.7") == queues[:9]
    assert table.lock("billing", "one", queues[:9], 1.0, "billing@10.0.0.8") == queues[:9]
    table.unlock("made-up-0", "client-0", queues)
    assert table.lock("made-up-0", "client-0", [*queues[:9], *queues[:9]], 0.0, "eve@10.0.0.66") == queues[:9]
    table.expire(1.0 + LOCK_S)
    assert (len(table), len(table._owned)) == (0, 0)


class Loop:
    """A loop whose clock is set an hour ahead."""

    def now(self) -> float:
        return time.time() + 3600


def test_nobody_is_idle_because_the_clock_was_set() -> None:
    """SG-054: silence is measured by a clock that nobody sets."""
    before = time.monotonic()
    assert before <= Endpoint(load(None, {}, {}), Loop(), None).now() <= time.monotonic()


def test_a_connection_ends_soon_after_its_client_is_gone() -> None:
    """MQ-054: also when the client's machine cannot say so, and nothing is to be sent to it."""
    listener = Listener("listen", Address("127.0.0.1", 0))
    with listener.socket:
        listener.listen()
        listener.socket.settimeout(10)
        with socket.create_connection(listener.address), listener.socket.accept()[0] as accepted:
            assert [accepted.getsockopt(*option[:2]) for option in KEEP_ALIVE] == [1, 60, 20, 3]
