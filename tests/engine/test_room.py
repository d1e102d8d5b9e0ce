"""The refuse watermark: puts have no room, and what frees some goes on."""

import logging
from pathlib import Path
from typing import Any, Final

import pytest

from metaq.engine.duties import Duties
from metaq.engine.timers.timing import Timing
from metaq.engine.writing import Placed, internal_mark, note
from metaq.errors import DiskFull
from metaq.message import GroupPartition, TopicPartition
from metaq.store.files.disk import RealDisk, Usage
from metaq.store.files.filecache import run_here
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

    def usage(self, path: Path) -> Usage:
        return self.room


def test_a_pending_timer_does_not_stop_retention(tmp_path: Path) -> None:
    """It is put into the log again, with the secret by which its handle stays good."""
    disk = FillingDisk()
    parts = Parts(tmp_path / "data", disk, topics={JOBS.topic: {"partitions": 1}}, segment_bytes=64 * 1024, **SMALL)
    timing = Timing.open(parts.context, parts.turns, run_here)
    duties = Duties(parts.context, parts.turns, run_here)
    duties._keepers = (timing.keeper,)

    def put(body: bytes, delay_ms: int = 0) -> Placed:
        placed = timing.timers.send(internal_mark(parts.context, JOBS, body), parts.clock.now_ms() + delay_ms)
        note(parts.turns, lambda _: None)
        parts.end_turn()
        return placed

    handle = put(b"later", 30 * DAY_MS).handle
    assert handle is not None
    for _ in range(8):
        put(bytes(12 * 1024))
    disk.room = NEARLY_FULL
    for _ in range(4):
        parts.store.sync()
        timing.timers.apply()
        parts.store.checkpoint()
        duties._look_after_retention()
        parts.end_turn()
        timing.timers.flush()
    assert parts.store.shortage is not None
    assert parts.store.log.begin > 0
    assert timing.timers.pending == 1 and timing.timers.is_genuine(handle)
    timing.timers.close()
    parts.close()
