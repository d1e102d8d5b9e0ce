"""Parts of the broker that go on whatever one connection does, with connections that only pretend."""

import time
from collections.abc import Callable
from typing import Any, Final, cast

import pytest

from metaq.config import load
from metaq.message import MessageQueue
from metaq.protocol.codes import Request
from metaq.protocol.remoting import FrameReader
from metaq.server import locks
from metaq.server.front import Front
from metaq.server.locks import LOCK_S, QueueLocks
from metaq.server.look import Looks, Question
from metaq.server.permissions import ANYBODY
from metaq.server.remoting import SMALL_BYTES, RemotingSession
from metaq.store.files import Read

LIMIT: Final = 4096


class Watcher:
    """Nothing ever happens."""

    def start(self, callback: Callable[[], None]) -> None: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


class Host:
    """What a session needs of a broker, for one that asks nothing."""

    max_unsent_bytes = LIMIT
    spent = False
    anonymous = ANYBODY
    unfinished_bytes = 0
    most_unfinished_bytes = 3 * SMALL_BYTES

    def io(self, fd: int, events: int) -> Watcher:
        return Watcher()

    def now(self) -> float:
        return 0.0

    def closed(self, session: RemotingSession) -> None: ...


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


def test_frames_that_never_end() -> None:
    """SG-054: together have a limit; who goes beyond it with much is closed, and gives its room back."""
    host: Any = Host()
    sessions = [RemotingSession(cast(Any, FullStream()), ("127.0.0.1", number), FrameReader(), host) for number in range(4)]
    head = (1 << 24).to_bytes(4) + (20).to_bytes(4)
    one, two, small, late = sessions
    for session, size in ((one, SMALL_BYTES + 1), (two, SMALL_BYTES + 1), (small, SMALL_BYTES), (late, SMALL_BYTES + 1)):
        session.receive(head + bytes(size - len(head)))
    assert [session.closed for session in sessions] == [False, False, False, True]
    assert host.unfinished_bytes == 3 * SMALL_BYTES + 2
    one.close()
    two.receive(bytes(SMALL_BYTES - 1))
    assert (two.closed, host.unfinished_bytes) == (False, 3 * SMALL_BYTES)
    for session in sessions:
        session.close()
    assert host.unfinished_bytes == 0


class Broken(Question):
    """A question that meets an error which nobody expected."""

    def __init__(self, session: Any) -> None:
        self.session = session

    def look(self, read: Read) -> None:
        raise ValueError("a test says so")


class Breaking:
    """Counts how often it is broken off."""

    def __init__(self) -> None:
        self.broken = 0

    def break_off(self) -> None:
        self.broken += 1


def test_who_wakes_a_held_question_survives_it() -> None:
    """SG-060: the connection is closed, the others that wait are woken all the same."""
    session = Breaking()
    Looks(load(None, {}, {}), lambda call: call()).look(Broken(session))
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


class Loop:
    """A loop whose clock is set an hour ahead."""

    def now(self) -> float:
        return time.time() + 3600


def test_nobody_is_idle_because_the_clock_was_set() -> None:
    """SG-054: silence is measured by a clock that nobody sets."""
    before = time.monotonic()
    assert before <= Front(load(None, {}, {}), Loop(), None).now() <= time.monotonic()
