"""Deliveries of many timers that are due at once, turn by turn (``tests.support.inprocess``)."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

import gevent
import pytest

from metaq.engine.timers.delivery import PORTION, Delivery
from metaq.engine.timers.recurring import Runs
from metaq.engine.timers.timers import Timers
from metaq.engine.writing import Draft
from metaq.errors import DiskFailed, Fenced, StoreError
from metaq.message import TopicPartition
from metaq.protocol.record import decode_record
from metaq.store.files.disk import Disk, RealDisk, RealFile
from metaq.store.files.filecache import read_here, run_here
from metaq.timers.records import MARKS
from tests.support.broker import wait_until
from tests.support.inprocess import Parts

Result = TypeVar("Result")
DEADLINE_S: Final = 30.0
ORDERS: Final = TopicPartition("orders", 0)
MANY: Final = 3 * PORTION + 5


class ColdFile(RealFile):
    """A file of which nothing is in the page cache."""

    def read_cached(self, size: int, offset: int) -> bytes | None:
        return None


class ColdDisk(RealDisk):
    """A disk with such files."""

    def open(self, path: Path) -> RealFile:
        plain = super().open(path)  # which closes its own descriptor
        return ColdFile(path, os.dup(plain._fd))


class Bench:
    """Timers that are due, and a delivery that the test begins."""

    def __init__(self, data: Path) -> None:
        self.reads = 0
        self.disk_failure: StoreError | None = None
        """What each read of a delivery fails with; ``None`` when they succeed."""
        self._open(data)
        now_ms = self.parts.clock.now_ms()
        for number in range(MANY):
            self.timers.park(Draft(*ORDERS, b"%d" % number, {}, 0, 0, 5, bytes(8)), now_ms + 1 + number % 7)
        self.parts.end_turn()
        self._begin()

    def _open(self, data: Path, disk: Disk | None = None, **settings: Any) -> None:
        self.parts = Parts(data, disk, topics={ORDERS.topic: {"partitions": 1}}, **settings)
        self.timers = Timers(self.parts.context, self.parts.turns, run_here)
        self.delivery = Delivery(self.timers, Runs(self.parts.context, run_here), self._run)

    def _begin(self) -> None:
        self.parts.clock.advance(1.0)
        self.before = self.parts.store.log.staged_end
        self.delivery.start()

    def _run(self, call: Callable[[], Result]) -> Result:
        self.reads += 1
        if self.disk_failure is not None:
            raise self.disk_failure
        return call()

    def open_again(self, disk: Disk, **settings: Any) -> None:
        """Begin with parks that this process has not stored."""
        data = self.parts.settings.data
        self.close()
        self._open(data, disk, **settings)
        self.timers.start()
        wait_until(self._has_table, DEADLINE_S, "the parks are read")
        self._begin()

    def _has_table(self) -> bool:
        gevent.sleep(0.001)
        return self.timers.table is not None

    def close(self) -> None:
        self.delivery.stop()
        self.timers.close()
        self.parts.close()

    def stage(self) -> None:
        """Let the delivery stage what it stages in one turn."""
        wait_until(self._has_staged, DEADLINE_S, "the delivery is staged")

    def _has_staged(self) -> bool:
        gevent.sleep(0)
        return self.parts.store.log.staged_end > self.before

    def is_over(self) -> bool:
        """End a turn, in which the delivery goes on; return whether all is delivered."""
        gevent.sleep(0.01)
        self.parts.end_turn()
        return self.timers.pending == 0

    def bodies(self) -> list[bytes]:
        queue = self.parts.store.queue(*ORDERS)
        found = []
        for stored in self.parts.store.records(queue, 0, 1 << 20, read_here):
            assert stored is not None
            found.append(bytes(decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size])).body))
        return found


WANTED: Final = [b"%d" % number for number in sorted(range(MANY), key=lambda number: (number % 7, number))]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "data")
    yield bench
    bench.close()


def test_several_groups_are_staged_in_one_turn(bench: Bench) -> None:
    """N-6: one group in a turn is 25,600 a second where requests fill turns of 10 ms."""
    bench.stage()
    bench.parts.end_turn()
    assert bench.bodies() == WANTED
    assert bench.parts.store.queue(*MARKS).readable == 1 + 4  # the secret, and a mark for each group
    assert bench.timers.pending == 0


@pytest.mark.parametrize(("disk", "reads"), [(ColdDisk(), 1), (RealDisk(), 0)])
def test_parks_on_the_disk_are_read_for_several_groups_at_once(bench: Bench, disk: Disk, reads: int) -> None:
    """N-4, N-6: a wait for the disk ends in the next turn of the loop; there is none for what is in the page cache."""
    bench.open_again(disk)
    bench.stage()
    bench.parts.end_turn()
    assert (bench.bodies(), bench.reads) == (WANTED, reads)
    assert bench.parts.store.queue(*MARKS).readable == 1 + 4
    assert bench.timers.pending == 0


def test_when_their_turn_fails_all_groups_are_delivered_later(bench: Bench) -> None:
    """T-1, T-6: none of them is lost, none comes twice, and their order stays."""

    def refuse() -> None:
        raise Fenced("a test says so")

    bench.stage()
    bench.parts.store.fence.guard(refuse)
    bench.parts.end_turn()
    assert (bench.bodies(), bench.timers.pending) == ([], MANY)
    bench.parts.store.fence.guard(lambda: None)
    wait_until(bench.is_over, DEADLINE_S, "all are delivered")
    assert bench.bodies() == WANTED


def test_a_message_that_is_larger_than_a_segment_is_dropped(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """The others do not wait for it. Segments were larger when it was sent."""
    due_ms = bench.parts.clock.now_ms() - 1000 + 3  # in the midst of the others
    bench.timers.park(Draft(*ORDERS, bytes(3 << 20), {}, 0, 0, 5, bytes(8)), due_ms)
    bench.open_again(RealDisk(), segment_bytes=2 << 20)
    wait_until(bench.is_over, DEADLINE_S, "all are delivered")
    assert (bench.bodies(), bench.timers.delivered, bench.timers.dropped) == (WANTED, MANY, 1)
    assert "timer dropped log_offset=" in caplog.text


def test_messages_wait_while_the_disk_cannot_be_asked(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """T-1: their records are intact, so none is dropped: the broker had no file descriptor left, for instance."""
    bench.disk_failure = DiskFailed("cannot open a segment: too many open files")
    bench.open_again(ColdDisk())

    def has_tried() -> bool:
        gevent.sleep(0.001)
        return "timers wait, tried again" in caplog.text or bench.timers.dropped > 0

    wait_until(has_tried, DEADLINE_S, "the delivery has tried")
    bench.disk_failure = None
    wait_until(bench.is_over, DEADLINE_S, "all are delivered")
    assert (bench.bodies(), bench.timers.delivered, bench.timers.dropped) == (WANTED, MANY, 0)
