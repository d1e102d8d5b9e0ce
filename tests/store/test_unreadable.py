"""Sectors of the log that the disk cannot read: a message there is lost as a damaged one is, and nothing else."""

import errno
import os
import random
from pathlib import Path
from typing import Final

import pytest

from metaq.dedupe.opening import open_seen
from metaq.errors import CorruptRecord, ReadFailed
from metaq.message import TopicPartition
from metaq.store.bulk import BulkReader
from metaq.store.copies.applying import piece
from metaq.store.expiry import delete_expired
from metaq.store.files.disk import RealFile
from metaq.store.files.filecache import SECTOR, read_around, read_here, run_here
from metaq.store.log.noted import records_at
from metaq.store.messagestore import MessageStore
from metaq.store.recovery.recovery import open_store
from tests.store.test_store_features import SETTINGS, put
from tests.support.faultydisk import DATA, FaultyDisk
from tests.support.manualclock import ManualClock

COUNT: Final = 40
BODY: Final = b"x" * 3 * SECTOR
TOPIC: Final = "busy"


class Damaged:
    """A store that was opened again after the power was cut, of whose disk one message of a partition cannot be read."""

    def __init__(self, hit: int, topic: str = TOPIC) -> None:
        self.clock, self.disk = ManualClock(), FaultyDisk(random.Random(1))
        store, _ = open_store(DATA, SETTINGS, self.clock, self.disk)
        put(store, "idle", BODY)
        for number in range(COUNT):
            put(store, TOPIC, BODY, ident=str(number))
        queue = store.queue(topic, 0)
        offset, size, _ = queue.unit(hit, read_here)
        segment = store.log.find(offset)
        assert segment is not None
        store.close()
        begin, end = offset - segment.base, offset - segment.base + size
        whole = range(-(-begin // SECTOR), end // SECTOR)  # no sector of another message
        self.disk.unreadable[segment.path] = set(whole)
        self.store, self.recovery = open_store(DATA, SETTINGS, self.clock, self.disk)


def intact(store: MessageStore, first: int = 0) -> list[int]:
    """Return the ordinals of the messages that readers get."""
    found = store.records(store.queue(TOPIC, 0), first, 1 << 20, read_here)
    return [first + index for index, stored in enumerate(found) if stored is not None]


@pytest.mark.parametrize("topic", ["idle", TOPIC])
def test_a_start_does_not_need_the_last_message_of_a_partition(topic: str) -> None:
    """SG-018: its unit is kept, and so is its ordinal."""
    hit = 0 if topic == "idle" else COUNT - 1
    damaged = Damaged(hit, topic)
    store = damaged.store
    assert [store.queue(name, 0).next for name in ("idle", TOPIC)] == [1, COUNT]
    assert store.reader.record(store.queue(topic, 0), hit, read_here) is None
    put(store, TOPIC, b"more")
    store.sync()
    assert intact(store, COUNT) == [COUNT]


def test_only_the_message_there_is_lost() -> None:
    """SG-018: by every way to read, also of those whose read covers it."""
    hit = COUNT // 2
    store = Damaged(hit).store
    others = [ordinal for ordinal in range(COUNT) if ordinal != hit]
    queue = store.queue(TOPIC, 0)
    assert intact(store) == others
    run = store.reader.checked_run(queue, hit - 1, COUNT, 1 << 20, read_here)
    assert run is not None and len(run.units) == len(queue.units(hit - 1, 1, read_here))
    assert store.reader.checked_run(queue, hit, COUNT, 1 << 20, read_here) is None
    bulk = BulkReader(store.log, store.reader).cold(queue, hit - 1, 3, 1 << 20, read_here)
    assert sum(map(len, bulk.records)) == queue.unit(hit - 1, read_here)[1] + queue.unit(hit + 1, read_here)[1]
    assert store.record_at_offset(queue.unit(hit, read_here)[0], read_here) is None
    assert store.reader.damaged > 0


def test_delayed_messages_around_it_are_found() -> None:
    """SG-018: many at once, and each by itself, although what is read for it goes on into the next ones."""
    hit = COUNT // 2
    store = Damaged(hit).store
    places = [store.queue(TOPIC, 0).unit(ordinal, read_here)[0] for ordinal in range(COUNT)]
    others = [place for place in places if place != places[hit]]
    found = records_at(store.log, TopicPartition(TOPIC, 0), places, run_here)
    assert sorted(found) == others
    alone = [place for place in places if records_at(store.log, TopicPartition(TOPIC, 0), [place], run_here)]
    assert alone == others


def test_the_index_of_ids_is_made_without_the_message(tmp_path: Path) -> None:
    """SG-018: all ids but its own are known."""
    hit = COUNT // 2
    store = Damaged(hit).store
    seen, reader = open_seen(store, tmp_path / "index", "sqlite3", {TOPIC: 1000}, run_here)
    known: list[str] = []
    while reader.at < store.log.end:
        known += [each.ident for each in reader.next(store.log.end, read_here)]
    seen.index.close()
    assert known == [str(number) for number in range(COUNT) if number != hit]


def test_a_slave_is_told_of_the_record() -> None:
    store = Damaged(COUNT // 2).store
    offset = store.queue(TOPIC, 0).unit(COUNT // 2, read_here)[0]
    with pytest.raises(CorruptRecord, match=f"the record at log offset {offset} is damaged"):
        piece(store.log, offset, 1 << 20, read_here)


def test_retention_goes_on() -> None:
    """SG-045: the age of a segment whose first message cannot be read is that of the next one."""
    store = Damaged(0).store
    first = next(
        ordinal for ordinal in range(COUNT) if store.queue(TOPIC, 0).unit(ordinal, read_here)[0] == store.log.segments[1].base
    )
    store.close()
    damaged = Damaged(first)
    damaged.clock.advance(10_000)
    segments = len(damaged.store.log.segments)
    damaged.store.checkpoint()
    damaged.store.checkpoint()
    assert delete_expired(damaged.store, at_any_hour=True).delete
    assert len(damaged.store.log.segments) < segments


def test_the_key_index_is_made_without_the_message() -> None:
    """SG-018: the broker takes messages all the while."""
    store = Damaged(COUNT // 2).store
    store.indexing.begin_anew()
    while store.indexing.behind:
        store.index_keys()
    store.check_writable()


def test_an_index_file_that_cannot_be_read_does_not_refuse_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-018: nothing is lost by that; the next round tries again."""
    store = Damaged(0).store

    def fails(run: object) -> None:
        raise ReadFailed("cannot read an index file: Input/output error")

    monkeypatch.setattr(store.indexing, "work", fails)
    with pytest.raises(ReadFailed):
        store.index_keys()
    store.check_writable()


@pytest.mark.parametrize(("size", "offset"), [(1, 700), (512, 512), (3000, 100), (4096, 0), (512, 511), (100, 480)])
def test_the_sectors_around_are_read(size: int, offset: int) -> None:
    disk = FaultyDisk(random.Random(0))
    path = DATA.parent / "file"
    disk.open(path).write(bytes(range(1, 252)) * 20, 0)
    content = bytearray(disk.content(path))
    disk.unreadable[path] = {1}
    content[SECTOR : 2 * SECTOR] = bytes(SECTOR)
    assert read_around(read_here, disk.open(path), size, offset) == content[offset : offset + size]


def test_only_sectors_that_cannot_be_read_are_taken_as_damaged() -> None:
    """The first page of a process is never there: Linux reports an input error of the device, as for a bad sector."""
    memory = Path("/proc/self/mem")
    with pytest.raises(ReadFailed, match=os.strerror(errno.EIO)):
        RealFile(memory, os.open(memory, os.O_RDONLY)).read(10, 0)
