"""Sectors of queue files that the disk cannot read: the messages whose units are there are lost, and nothing else."""

import os
import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.offsets.offsetlog import OFFSETS
from metaq.engine.tables.topics import FOLDER
from metaq.errors import ReadFailed
from metaq.message import OFFSETS_TOPIC, GroupPartition
from metaq.store.bulk import BulkReader
from metaq.store.copies.snapshots import ordinal_at
from metaq.store.expiry import delete_expired
from metaq.store.files.disk import RealDisk, RealFile
from metaq.store.files.filecache import read_here
from metaq.store.log.segments import segment_name
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import UNIT_SIZE
from metaq.store.recovery.recovery import open_store
from metaq.timers.fold import place_of
from metaq.timers.records import PARKS
from tests.store.test_store_features import SETTINGS, bodies, put
from tests.support.faultydisk import DATA, SECTOR, FaultyDisk
from tests.support.manualclock import ManualClock
from tests.support.served import Served

COUNT: Final = 200
TOPIC: Final = PARKS.topic
"""One whose places are searched, too."""
BAD: Final = 2
"""The number of the sector that cannot be read."""
LOST: Final = range(BAD * SECTOR // UNIT_SIZE, (BAD + 1) * SECTOR // UNIT_SIZE)
ALL: Final = 1 << 20


class Folder:
    """A store with messages of one partition, a millisecond apart, all units of which are in one file."""

    def __init__(self) -> None:
        self.clock, self.disk = ManualClock(), FaultyDisk(random.Random(1))
        self.store = self.open()
        self.times: list[int] = []
        self.places: list[int] = []
        for number in range(COUNT):
            self.times.append(self.clock.now_ms())
            self.places.append(put(self.store, TOPIC, b"%03d" % number * 100))
            self.clock.advance(0.001)
        self.store.sync()
        self.store.sweep()

    def open(self) -> MessageStore:
        store, recovery = open_store(DATA, replace(SETTINGS, queue_file_bytes=8 * SECTOR), self.clock, self.disk)
        assert recovery.problems == []
        return store

    def hit(self) -> None:
        path = self.store.queue(TOPIC, 0).directory / segment_name(0)
        assert len(self.disk.content(path)) == COUNT * UNIT_SIZE
        self.disk.unreadable[path] = {BAD}


@pytest.fixture(params=["written by this process", "found by it"])
def folder(request: pytest.FixtureRequest) -> Folder:
    made = Folder()
    if request.param == "found by it":
        made.store.close()
        made.store = made.open()
    made.hit()
    return made


def is_lost(ordinal: int) -> bool:
    return ordinal in LOST


def test_all_other_messages_are_read(folder: Folder) -> None:
    """SG-018, F-BIT: by every way to read."""
    store = folder.store
    queue = store.queue(TOPIC, 0)
    expected = [None if is_lost(number) else b"%03d" % number * 100 for number in range(COUNT)]
    assert bodies(store, TOPIC) == expected
    reader, bulk = store.reader, BulkReader(store.log, store.reader)
    ordinal, seen = 0, []
    while ordinal < COUNT:
        _, following = reader.hot_slices(queue, ordinal, COUNT, ALL, read_here)
        if following == ordinal:
            seen += [ordinal] if reader.record(queue, ordinal, read_here) is not None else []
            following += 1
        else:
            seen += range(ordinal, following)
        ordinal = following
    assert seen == [number for number in range(COUNT) if not is_lost(number)]
    for number in range(COUNT):
        hot, checked = reader.hot_run(queue, number, 1, 0, read_here), reader.checked_run(queue, number, 1, ALL, read_here)
        assert (checked is None) == is_lost(number)
        assert hot is None or (checked is not None and hot.units == checked.units)
        assert bulk.cold(queue, number, 1, ALL, read_here).size == (0 if checked is None else len(checked.view))
        for way in (bulk.hot, bulk.raw):
            piece = way(queue, number, 1, ALL, read_here)
            assert piece is None or (checked is not None and piece.units == checked.units)
    store.close()


def test_searches_pass_over_it(folder: Folder) -> None:
    """SG-018: for positions, times and places in the log."""
    store = folder.store
    queue, after = store.queue(TOPIC, 0), LOST.stop
    assert store.first(queue, read_here)[0] == 0
    size = queue.readable_text_end // COUNT
    for number in range(COUNT):
        near = after if is_lost(number) else number
        assert store.locate(queue, number * size + 1, read_here)[0] == near
        assert store.reader.at_time(queue, folder.times[number], read_here) == near
        place = LOST.start if is_lost(number) or number == after else number
        assert ordinal_at(queue, folder.places[number]) == place
        assert place_of(store, folder.places[number], read_here).parks == place
    store.close()


def test_segments_expire(folder: Folder) -> None:
    """SG-047: also when the units of the messages that are the oldest then cannot be read."""
    store = folder.store
    for _ in range(2):
        store.checkpoint()
    folder.clock.advance(10)
    assert delete_expired(store, needed_from=folder.places[LOST.stop - 1]).delete
    assert folder.places[LOST.start] < store.log.begin < folder.places[LOST.stop - 1]
    assert store.first(store.queue(TOPIC, 0), read_here)[0] == LOST.stop
    store.close()


class BadSector(RealFile):
    """A file of which one sector cannot be read."""

    def read(self, size: int, offset: int) -> bytes:
        if offset < 2 * SECTOR and offset + size > SECTOR:
            raise ReadFailed("cannot read: input/output error")
        return super().read(size, offset)

    def read_cached(self, size: int, offset: int) -> bytes | None:
        return None


class BadDisk(RealDisk):
    """The real one, with such files in the queue of the consumer offsets."""

    def open(self, path: Path) -> RealFile:
        plain = super().open(path)
        is_bad = path.parent.parent.name == OFFSETS_TOPIC
        return BadSector(path, os.dup(plain._fd)) if is_bad else plain  # the plain one closes its own descriptor


def test_a_start_reads_the_other_offsets(tmp_path: Path) -> None:
    """P09, SG-018: where it has no snapshot of them."""
    data, places = tmp_path / "data", [GroupPartition(f"group-{number}", "orders", 0) for number in range(COUNT)]
    with ExitStack() as stack:
        engine = Served(stack, data).broker.engine
        store, offsets = engine.store, engine.context.offsets
        store.queue("orders", 0)
        for place in places:
            offsets.commit(*place, 7, store.clock.monotonic())
            engine.offset_log.append()
            engine.turns.finish()
        assert store.queue(OFFSETS_TOPIC, 0).next >= COUNT
    for snapshot in (data / FOLDER).glob(f"{OFFSETS}*"):
        snapshot.unlink()
    with ExitStack() as stack:
        offsets = Served(stack, data, BadDisk()).broker.engine.context.offsets
        assert [offsets.get(*place) is None for place in places].count(True) == SECTOR // UNIT_SIZE
