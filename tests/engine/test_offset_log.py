"""The conditions on which a master accepts offset commits: a real store and its turns, with manual clock and replicas."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from metaq.config import Settings
from metaq.engine.offsets.offsetlog import MOST_BACK_S, OffsetLog
from metaq.engine.role import NoReplicas, RoleParts
from metaq.engine.tables.offsets import OffsetTable
from metaq.engine.tables.topics import TopicTable
from metaq.engine.turn import Turns
from metaq.errors import DiskFull, Overloaded
from metaq.fields import from_values
from metaq.message import OFFSETS_TOPIC, Durability
from metaq.store.copies.epochs import Epochs
from metaq.store.files.filecache import run_here
from metaq.store.messagestore import MessageStore
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from tests.support.manualclock import ManualClock

STORE: Final = StoreSettings(segment_bytes=1 << 16, queue_file_bytes=256, durability=Durability.MEMORY)

SETTINGS: Final = {"durability": Durability.REPLICA, "replica_timeout_ms": 500, "replication_listen": "127.0.0.1:0"}


class Copies:
    """A stand-in for the replicas: the end of what they hold, and whether there is hope for more."""

    def __init__(self) -> None:
        self.held_end = 0
        self.hopeful = True


class Hub:
    """Ends no turn: the test does."""

    class loop:
        @staticmethod
        def run_callback(_: Callable[[], None]) -> None:
            pass

        @staticmethod
        def timer(_: float) -> None:
            """Return nothing: no turn waits for a sync."""


class Master:
    """The parts of a broker at REPLICA that keep offsets."""

    def __init__(self, data: Path, *, waits: bool = True) -> None:
        self.clock = ManualClock()
        self.store: MessageStore = open_store(data, STORE, self.clock)[0]
        settings = from_values(Settings, {**SETTINGS, "data": data})
        hub: Any = Hub
        self.copies = Copies()
        parts = RoleParts(NoReplicas(), self.copies if waits else None)
        self.turns = Turns(self.store, settings, hub, run_here, lambda _: None, parts)
        self.offsets = OffsetTable()
        context: Any = SimpleNamespace(
            store=self.store,
            settings=settings,
            offsets=self.offsets,
            epochs=Epochs(self.store),
            topics=TopicTable(data, 10),
            store_host=bytes(8),
        )
        self.log = OffsetLog(context, self.turns, run_here)

    def commit(self, offset: int) -> None:
        self.log.check()
        self.offsets.commit("billing", "orders", 0, offset, self.clock.monotonic())

    def append(self) -> None:
        """Append to the log and finish the turn, as the duty does."""
        self.log.append()
        self.turns.finish()

    def copy(self) -> None:
        """The replicas have everything."""
        self.copies.held_end = self.store.log.end
        self.turns.release()


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    made = Master(tmp_path / "data")
    yield made
    made.store.close()


def test_commits_are_taken_while_the_replicas_follow(master: Master) -> None:
    """P09: what they lack is never older than half a second."""
    for offset in range(1, 9):
        master.commit(offset)
        master.append()
        master.clock.advance(MOST_BACK_S * 0.45)
        master.commit(offset * 10)
        master.copy()


def test_none_is_taken_while_an_older_one_is_on_its_way(master: Master) -> None:
    """P09: for longer than a failover may take back."""
    master.commit(1)
    master.append()
    master.clock.advance(MOST_BACK_S + 0.001)
    with pytest.raises(Overloaded, match="committed before"):
        master.commit(2)
    master.copy()
    master.commit(2)


def test_none_is_taken_after_one_was_answered_late(master: Master) -> None:
    """P09: it has waited in vain, so the replicas may lack it however long ago it was committed."""
    master.commit(1)
    master.append()
    master.clock.advance(0.501)
    master.turns.expire()
    assert master.turns.nothing_parked()
    with pytest.raises(Overloaded, match="that are in the log"):
        master.commit(2)
    master.copy()
    master.commit(2)


def test_none_is_taken_before_the_replicas_have_what_a_new_master_found(tmp_path: Path) -> None:
    """P09: the master before may have put offsets there that nobody else has."""
    before = Master(tmp_path / "data")
    before.commit(1)
    before.append()
    before.store.close()
    after = Master(tmp_path / "data")
    with pytest.raises(Overloaded, match="that are in the log"):
        after.commit(2)
    after.copy()
    after.commit(2)
    after.store.close()


def test_all_are_taken_where_no_replica_is_waited_for(tmp_path: Path) -> None:
    """P09: at DISK and MEMORY the log of the master alone counts."""
    master = Master(tmp_path / "data", waits=False)
    master.commit(1)
    master.clock.advance(10 * MOST_BACK_S)
    master.commit(2)
    master.store.close()


def test_changes_are_taken_down_while_the_disk_has_no_room_for_messages(master: Master) -> None:
    """P09: a consumer can finish what it has, at ``refuse_ratio`` too."""
    master.store.no_room = "the disk is 96 % full"
    master.commit(1)
    master.append()
    master.copy()
    master.clock.advance(2 * MOST_BACK_S)
    master.commit(2)
    assert master.store.queue(OFFSETS_TOPIC, 0).next == 1


def test_a_full_disk_is_named(master: Master) -> None:
    """P09: not replicas that have everything there is."""
    master.commit(1)
    master.store.behind = DiskFull("no room for a segment")
    master.append()
    master.clock.advance(MOST_BACK_S + 0.001)
    with pytest.raises(DiskFull, match="no room for a segment"):
        master.commit(2)
    master.store.behind = None
    master.append()
    master.copy()
    master.commit(2)
