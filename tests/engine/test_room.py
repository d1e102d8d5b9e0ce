"""The refuse watermark: puts have no room, and what frees some goes on."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from metaq.engine.duties import Duties
from metaq.engine.timers.timing import Timing
from metaq.engine.writing import Placed, internal_mark, note
from metaq.errors import DiskFull, Fenced
from metaq.message import GroupPartition, TopicPartition
from metaq.store.files.disk import RealDisk, RealFile, Usage
from metaq.store.files.filecache import run_here
from metaq.timers.handles import Handle
from tests.engine.leases.leased import GROUPS, TOPIC, LeasedBroker
from tests.support.inprocess import Parts

GIB: Final = 1 << 30
EMPTY: Final = Usage(0, 100 * GIB)
NEARLY_FULL: Final = Usage(92 * GIB, 8 * GIB)
PLACE: Final = GroupPartition(GROUPS[0], TOPIC, 0)
JOBS: Final = TopicPartition("jobs", 0)
DAY_MS: Final = 86_400_000
SMALL: Final[dict[str, Any]] = {"max_body_bytes": 16 * 1024, "timer_engine": "sqlite3"}


class FullKeeper:
    """A keeper that finds no room."""

    oldest: Final = None

    def keep(self, before: int) -> None:
        raise DiskFull("a test says so")


@pytest.fixture
def broker() -> LeasedBroker:
    return LeasedBroker()


def lease(broker: LeasedBroker) -> int:
    """Lease one message; return the time that names the delivery."""
    assert broker.put(TOPIC, 0, b"a")
    broker.end_turn()
    request = broker.request(PLACE.group, 0, 1, DAY_MS)
    result = broker.take(request, broker.plan(request))
    assert result is not None and result.given
    broker.end_turn()
    return result.pop_ms


def test_an_open_message_does_not_stop_retention(broker: LeasedBroker) -> None:
    """Its dead letter has room, as has the snapshot of the leases; then their segments go, and with them the shortage."""
    lease(broker)
    broker.disk.room = NEARLY_FULL
    broker.retire()
    assert broker.store.shortage is not None
    assert broker.store.log.begin > 0
    assert [letter.reason for letter in broker.dead_letters(PLACE.group)] == ["aged out"]


def test_a_keeper_without_room_does_not_stop_the_others(broker: LeasedBroker, caplog: pytest.LogCaptureFixture) -> None:
    """The log says which one it is."""
    lease(broker)
    broker._duties._keepers = (FullKeeper(), broker.keeper)
    with caplog.at_level(logging.ERROR):
        broker.retire()
    assert broker.store.log.begin > 0
    assert "duty failed duty=FullKeeper.keep reason=a test says so" in caplog.text


def test_an_ack_is_kept(broker: LeasedBroker) -> None:
    """After a kill the message does not come again."""
    pop_ms = lease(broker)
    broker.store.no_room = "a test says so"
    assert not broker.put(TOPIC, 0, b"b")
    assert broker.leases.ack(PLACE, pop_ms, 0, 1) == 1
    broker.end_turn()
    assert broker.leases.unkept == 0
    state = broker.killed().state(PLACE)
    assert state is not None and not state.open


def test_what_a_full_disk_did_not_take_is_stored_when_it_is_only_nearly_full(broker: LeasedBroker) -> None:
    """The watermark does not keep leases in memory."""
    pop_ms = lease(broker)
    broker.disk.fill()
    broker.leases.ack(PLACE, pop_ms, 0, 1)
    broker.end_turn()
    assert broker.leases.unkept == 1
    broker.free_disk()
    broker.store.no_room = "a test says so"
    broker.tend()
    assert broker.leases.unkept == 0


class FillingDisk(RealDisk):
    """The real one, which says what the test wants of its room."""

    room: Usage = EMPTY
    has_room = True
    """False: the log gets no new segment."""

    def open(self, path: Path) -> RealFile:
        if not self.has_room and path.parent.name == "commitlog" and not path.exists():
            raise DiskFull(f"no room for {path}: a test says so")
        return super().open(path)

    def usage(self, path: Path) -> Usage:
        return self.room


class TimedBroker:
    """A broker with timers, and with retention that keeps what they need."""

    def __init__(self, data: Path) -> None:
        self.disk = FillingDisk()
        topics = {JOBS.topic: {"partitions": 1}}
        self.parts = Parts(data, self.disk, topics=topics, segment_bytes=64 * 1024, **SMALL)
        self.timing = Timing.open(self.parts.context, self.parts.turns, run_here)
        self._duties = Duties(self.parts.context, self.parts.turns, run_here)
        self._duties._keepers = (self.timing.keeper,)

    def close(self) -> None:
        self.timing.timers.close()
        self.parts.close()

    def put(self, body: bytes, delay_ms: int = 0) -> Placed:
        """Put a message, delayed or not, and let readers see it."""
        draft = internal_mark(self.parts.context, JOBS, body)
        placed = self.timing.timers.send(draft, self.parts.clock.now_ms() + delay_ms)
        note(self.parts.turns, lambda _: None)
        self.parts.end_turn()
        self.timing.timers.apply()
        return placed

    def delay(self) -> Handle:
        """Delay a message for longer than the test lasts; return what cancels it."""
        handle = self.put(b"later", 30 * DAY_MS).handle
        assert handle is not None
        return handle

    def retire(self) -> None:
        """Let retention delete what it may, in as many rounds as it needs."""
        for _ in range(4):
            self.parts.store.sync()
            self.timing.timers.apply()
            self.parts.store.checkpoint()
            self._duties.delete_expired()
            self.parts.end_turn()
            self.timing.timers.flush()


@pytest.fixture
def timed(tmp_path: Path) -> Iterator[TimedBroker]:
    timed = TimedBroker(tmp_path / "data")
    yield timed
    timed.close()


def test_a_pending_timer_does_not_stop_retention(timed: TimedBroker) -> None:
    """It is put into the log again, with the secret by which its handle stays good."""
    handle = timed.delay()
    for _ in range(8):
        timed.put(bytes(12 * 1024))
    timed.disk.room = NEARLY_FULL
    timed.retire()
    assert timed.parts.store.shortage is not None
    assert timed.parts.store.log.begin > 0
    assert timed.timing.timers.pending == 1 and timed.timing.timers.is_genuine(handle)


def test_handles_stay_good_when_their_secret_is_not_stored_again(timed: TimedBroker) -> None:
    """It is where it was before."""
    handle = timed.delay()

    def refuse() -> None:
        raise Fenced("a test says so")

    timed.parts.store.fence.guard(refuse)
    timed.timing.keeper.keep(timed.parts.store.log.end)
    timed.parts.end_turn()
    timed.parts.store.fence.guard(lambda: None)
    other = timed.delay()
    assert timed.timing.timers.is_genuine(handle) and timed.timing.timers.is_genuine(other)
