"""Sectors of queue files that the disk cannot read: the messages whose units are there are lost, and nothing else."""

import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from metaq.engine.offsets.offsetlog import OFFSETS
from metaq.engine.reading.collecting import collect_messages
from metaq.engine.reading.filters import tag_filter
from metaq.engine.tables.topics import FOLDER
from metaq.errors import ReadFailed
from metaq.message import OFFSETS_TOPIC, GroupPartition
from metaq.store.bulk import BulkReader
from metaq.store.copies.snapshots import ordinal_at
from metaq.store.expiry import delete_expired
from metaq.store.files.disk import File, RealDisk, RealFile
from metaq.store.files.filecache import read_here
from metaq.store.log.segments import segment_name
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import UNIT_SIZE
from metaq.store.recovery.recovery import open_store
from metaq.timers.fold import place_of
from metaq.timers.records import PARKS
from tests.store.test_store_features import SEGMENT, SETTINGS, bodies, put
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
MOST_FAILED: Final = 1 + 8 + 2 * 8
"""Reads that fail where one unit is looked at and then a block with 8 bad sectors: each of these, and the larger reads."""


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
    damaged = store.reader.damaged
    assert collect_messages(store, queue, 0, COUNT, tag_filter("another"), read_here) == ([], [], COUNT)
    assert store.reader.damaged - damaged == len(LOST)  # they may have had that tag
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


class Page:
    """A store of whose queue 8 neighbouring sectors cannot be read, and a ``Read`` that counts the reads that fail."""

    def __init__(self) -> None:
        self.clock, self.disk = ManualClock(), FaultyDisk(random.Random(1))
        settings = replace(SETTINGS, segment_bytes=1 << 20, queue_file_bytes=1 << 20)
        self.store, _ = open_store(DATA, settings, self.clock, self.disk)
        self.lost = range(BAD * SECTOR // UNIT_SIZE, (BAD + 8) * SECTOR // UNIT_SIZE)
        self.places = []
        for number in range(COUNT + self.lost.stop):
            self.places.append(put(self.store, TOPIC, b"%03d" % number))
            self.clock.advance(0.001)
        self.queue = self.store.queue(TOPIC, 0)
        self.store.sync()
        self.store.sweep()
        self.disk.unreadable[self.queue.directory / segment_name(0)] = set(range(BAD, BAD + 8))
        self.failed = 0

    def read(self, file: File, size: int, offset: int) -> bytes:
        try:
            return read_here(file, size, offset)
        except ReadFailed:
            self.failed += 1
            raise


def next_message(page: Page) -> None:
    assert page.store.reader.next_intact(page.queue, page.lost.start, page.read)[0] == page.lost.stop


def text_position(page: Page) -> None:
    middle = page.queue.readable_text_end * page.lost[len(page.lost) // 2] // page.queue.readable
    assert page.store.locate(page.queue, middle, page.read)[0] == page.lost.stop


def time(page: Page, *, upper: bool = False) -> None:
    time_ms = page.clock.now_ms() - page.queue.readable + page.lost[len(page.lost) // 2]
    found = page.store.reader.at_time(page.queue, time_ms, page.read, upper=upper)
    assert found == (page.lost.start - 1 if upper else page.lost.stop)


def time_before(page: Page) -> None:
    time(page, upper=True)


def place(page: Page) -> None:
    assert place_of(page.store, page.places[page.lost.stop], page.read).parks == page.lost.start


def oldest(page: Page) -> None:
    assert page.store.reader.oldest(page.queue, page.lost.start, page.read) == page.lost.start


@pytest.mark.parametrize("search", [next_message, text_position, time, time_before, place, oldest])
def test_a_search_reads_bad_sectors_once_at_each_step(search: Callable[[Page], None]) -> None:
    """SG-018: a disk may try for seconds before a read fails, and nothing else may run meanwhile."""
    page = Page()
    search(page)
    assert 0 < page.failed < 12 * MOST_FAILED
    page.store.close()


def test_the_way_to_the_next_message_reads_bad_sectors_once() -> None:
    page = Page()
    next_message(page)
    assert 8 <= page.failed <= MOST_FAILED
    page.store.close()


def test_messages_are_kept_whose_units_cannot_be_read_for_a_time() -> None:
    """SG-047: retention does not take them for those of deleted segments."""
    clock, disk, count = ManualClock(), FaultyDisk(random.Random(1)), 20 * SECTOR // UNIT_SIZE
    store, _ = open_store(DATA, replace(SETTINGS, queue_file_bytes=8 * SECTOR), clock, disk)
    put(store, "other", bytes(SEGMENT // 2))
    put(store, "other", bytes(SEGMENT // 2))
    places = [put(store, TOPIC, b"%03d" % number) for number in range(count)]
    store.sync()
    store.sweep()
    for _ in range(2):
        store.checkpoint()
    queue = store.queue(TOPIC, 0)
    paths = [queue.directory / segment_name(number * 8 * SECTOR) for number in range(2)]
    for path in paths:
        disk.unreadable[path] = set(range(8))
    clock.advance(10)
    assert delete_expired(store, needed_from=places[0]).delete
    for path in paths:
        disk.unreadable[path].clear()
    assert [store.reader.record(queue, number, read_here) is None for number in range(count)].count(True) == 0
    store.close()


def test_a_queue_file_expires_whose_units_cannot_be_read() -> None:
    """SG-047: when units after them lead to deleted segments."""
    clock, disk, count = ManualClock(), FaultyDisk(random.Random(1)), 20 * SECTOR // UNIT_SIZE
    store, _ = open_store(DATA, replace(SETTINGS, queue_file_bytes=8 * SECTOR), clock, disk)
    places = [put(store, TOPIC, b"%03d" % number) for number in range(count)]
    store.sync()
    store.sweep()
    for _ in range(2):
        store.checkpoint()
    queue = store.queue(TOPIC, 0)
    path = queue.directory / segment_name(0)
    disk.unreadable[path] = set(range(8))
    clock.advance(10)
    assert delete_expired(store, needed_from=places[-1]).delete
    assert path.name not in disk.list_directory(queue.directory)
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
