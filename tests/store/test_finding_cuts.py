"""Where a queue is cut with its log: found with few reads, and in spite of damage."""

import os
import random
from pathlib import Path

import pytest

from metaq.message import Durability
from metaq.store.copies.applying import end_before
from metaq.store.copies.discarding import cut_at_next_opening
from metaq.store.files.disk import RealDisk, RealFile
from metaq.store.files.filecache import read_here
from metaq.store.log.segments import segment_name
from metaq.store.queues.consumequeue import UNIT, UNIT_SIZE
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from tests.store.test_copying import SLAVE, hidden_by_walking, plain
from tests.store.test_record_groups import FIRST as T0
from tests.store.test_record_groups import put
from tests.support.faultydisk import DATA, SECTOR, FaultyDisk


@pytest.mark.parametrize("seed", range(10))
def test_a_damaged_unit_does_not_lead_astray(tmp_path: Path, seed: int) -> None:
    """F-BIT: a unit with a wrong place in the log hides no message but those next to it."""
    rng = random.Random(seed)
    store, _ = open_store(tmp_path / "data", SLAVE)
    for number in range(100):
        put(store, T0, b"%d" % number)
    end = store.log.end
    store.close()
    units = SLAVE.queue_file_bytes // UNIT_SIZE
    for _ in range(20):
        store, _ = open_store(tmp_path / "data", SLAVE)
        queue = store.queue(*T0)
        log_offset = rng.randrange(end)
        count = hidden_by_walking(queue, log_offset)
        damaged = rng.choice([ordinal for ordinal in range(99) if ordinal not in {count - 1, count}])
        path = queue.directory / segment_name(damaged // units * units * UNIT_SIZE)
        with path.open("r+b") as file:
            file.seek(damaged % units * UNIT_SIZE)
            right = file.read(UNIT_SIZE)
            file.seek(-UNIT_SIZE, os.SEEK_CUR)
            file.write(UNIT.pack(rng.choice((0, end, 1 << 62)), 100, 0))
            file.flush()
            assert end_before(store, queue, log_offset)[0] == count
            file.seek(-UNIT_SIZE, os.SEEK_CUR)
            file.write(right)
        store.close()


def test_units_that_cannot_be_read_count_as_lost() -> None:
    """SG-018: a start and a change of role go on, and no message after the cut shows."""
    disk = FaultyDisk(random.Random(1))
    store, _ = open_store(DATA, SLAVE, disk=disk)
    for number in range(100):
        put(store, T0, b"%d" % number)
    places = [store.queue(*T0).unit(ordinal, read_here)[0] for ordinal in range(100)]
    store.close()
    store, _ = open_store(DATA, SLAVE, disk=disk)
    queue = store.queue(*T0)
    units = SLAVE.queue_file_bytes // UNIT_SIZE
    lost = range(units, 2 * units)
    path = queue.directory / segment_name(units * UNIT_SIZE)
    disk.unreadable[path] = set(range(-(-SLAVE.queue_file_bytes // SECTOR)))
    for ordinal, place in enumerate(places):
        count = end_before(store, queue, place)[0]
        assert count == ordinal or (ordinal - 1 in lost and count == lost.start)
    assert queue.unit(lost.start, read_here) == (0, 0, 0)


class CountedFile(RealFile):
    """A file whose reads are counted."""

    reads = 0

    def read(self, size: int, offset: int) -> bytes:
        CountedFile.reads += 1
        return super().read(size, offset)


class CountedDisk(RealDisk):
    """The real one with such files."""

    def open(self, path: Path) -> RealFile:
        plain = super().open(path)  # which closes its own descriptor
        return CountedFile(path, os.dup(plain._fd))


def test_a_long_cut_is_found_with_few_reads(tmp_path: Path) -> None:
    """P08: nothing else runs meanwhile."""
    settings = StoreSettings(segment_bytes=1 << 20, durability=Durability.REPLICA)
    store, _ = open_store(tmp_path / "data", settings)
    for _ in range(2000):
        store.put(*plain(store, T0, b"small"))
    store.append()
    store.close()
    store, _ = open_store(tmp_path / "data", settings, disk=CountedDisk())
    end, _, _ = store.queue(*T0).unit(10, read_here)
    CountedFile.reads = 0
    cut_at_next_opening(store, end, None)
    assert CountedFile.reads < 30
    store.close()
    store, _ = open_store(tmp_path / "data", settings)
    assert (store.queue(*T0).next, store.log.end) == (10, end)
    store.close()
