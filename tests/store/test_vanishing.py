"""Readers of data that is deleted while they wait, and of damaged data on disk: they get answers; no process exits.

A stand-in for the disk makes the moment exact: retention runs, or a topic is deleted, while a chosen read waits.
"""

import random
from collections.abc import Callable
from typing import Final

import pytest

from metaq.protocol.text.messages import text_size
from metaq.store.bulk import BulkReader
from metaq.store.copies.applying import piece
from metaq.store.expiry import delete_expired
from metaq.store.files.disk import File
from metaq.store.files.filecache import Read, read_here
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import UNIT, UNIT_SIZE
from metaq.store.recovery.recovery import open_store
from tests.store.test_store_features import SETTINGS, put
from tests.support.faultydisk import DATA, FaultyDisk
from tests.support.manualclock import ManualClock

MESSAGES: Final = 60
TOPIC: Final = "t"
ALL: Final = 1 << 20
BULK: Final = ("hot", "raw", "cold")


def fill(store: MessageStore, clock: ManualClock) -> None:
    """Put messages into some segments of one partition; all but the last of these may go."""
    for count in range(MESSAGES):
        put(store, TOPIC, b"%04d" % count * 250)
    store.sync()
    store.sweep()
    for _ in range(2):
        store.checkpoint()
    clock.advance(10)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MessageStore:
    opened, _ = open_store(DATA, SETTINGS, clock, FaultyDisk(random.Random(1)))
    put(opened, "other", b"at log offset 0, which is not trusted")
    fill(opened, clock)
    return opened


class Waiting:
    """A ``Read`` during which something happens, the n-th time that it is asked."""

    def __init__(self, number: int, happens: Callable[[], object]) -> None:
        self._happens = happens
        self.left = number

    def __call__(self, file: File, size: int, offset: int) -> bytes:
        data = read_here(file, size, offset)
        self.left -= 1
        if not self.left:
            self._happens()
        return data


def expire(store: MessageStore) -> None:
    assert delete_expired(store).delete


def read_records(store: MessageStore, read: Read) -> None:
    queue = store.queue(TOPIC, 0)
    begin = queue.base
    assert len(list(store.records(queue, begin, ALL, read))) == queue.next - begin


def read_slices(store: MessageStore, read: Read) -> None:
    queue = store.queue(TOPIC, 0)
    ordinal = queue.base
    while ordinal < queue.readable:
        _, following = store.reader.hot_slices(queue, ordinal, MESSAGES, ALL, read)
        if following == ordinal:
            store.reader.record(queue, ordinal, read)
        ordinal = max(following, ordinal + 1)


def read_runs(store: MessageStore, read: Read) -> None:
    queue = store.queue(TOPIC, 0)
    ordinal = queue.base
    while ordinal < queue.readable:
        run = store.reader.hot_run(queue, ordinal, MESSAGES, 0, read)
        if run is None:
            store.reader.record(queue, ordinal, read)
        ordinal = max(ordinal + 1 if run is None else ordinal + len(run.units) // UNIT_SIZE, queue.base)


def read_checked_runs(store: MessageStore, read: Read) -> None:
    queue = store.queue(TOPIC, 0)
    ordinal = queue.base
    while ordinal < queue.readable:
        run = store.reader.checked_run(queue, ordinal, MESSAGES, 4096, read)
        ordinal = max(ordinal + 1 if run is None else ordinal + len(run.units) // UNIT_SIZE, queue.base)


def read_times(store: MessageStore, read: Read) -> None:
    queue = store.queue(TOPIC, 0)
    store.reader.at_time(queue, store.clock.now_ms() - 5_000, read)
    store.locate(queue, 20_000, read)


def read_places_of_text(store: MessageStore, read: Read) -> None:
    queue = store.queue(TOPIC, 0)
    ordinal, position = store.locate(queue, 20_000, read)
    stored = next(store.records(queue, ordinal, 1, read), None)
    if stored is not None:
        store.reader.remember(queue, position + text_size(stored, queue.overhead), ordinal + 1)


def read_places(store: MessageStore, read: Read) -> None:
    store.log.record_at(store.log.begin, read)
    store.record_at_offset(store.log.begin, read)


def read_pieces(store: MessageStore, read: Read) -> None:
    at = store.log.begin
    while at < store.log.end:
        begin, data = piece(store.log, at, 100, read)  # less than one record
        at = begin + len(data) if data else store.log.end


def read_bulk(store: MessageStore, read: Read) -> None:
    reader, queue = BulkReader(store.log, store.reader), store.queue(TOPIC, 0)
    for way in BULK:
        ordinal = queue.base
        while queue.base <= ordinal < queue.readable:
            found = getattr(reader, way)(queue, ordinal, MESSAGES, 4096, read)
            ordinal += 1 if found is None else len(found.units) // 16


@pytest.mark.parametrize("hot_bytes", [0, 20_000, 1 << 30])
@pytest.mark.parametrize(
    "look", [read_records, read_slices, read_runs, read_checked_runs, read_times, read_places, read_pieces, read_bulk]
)
def test_retention_while_a_reader_waits(
    store: MessageStore, clock: ManualClock, look: Callable[[MessageStore, Read], None], hot_bytes: int
) -> None:
    """SG-044, MQ-028: at many reads at which it can wait. What was deleted is not made again, no damage is reported."""
    store.log._hot_bytes = hot_bytes
    number = 0
    while True:
        number += 1 + number // 3
        wait = Waiting(number, lambda: expire(store))
        look(store, wait)
        names = sorted(map(int, store.disk.list_directory(store.log.directory)))
        assert names[0] == store.log.begin
        assert store.reader.damaged == 0
        if wait.left > 0:
            break
        fill(store, clock)


@pytest.mark.parametrize("hot_bytes", [0, 1 << 30])
@pytest.mark.parametrize("look", [read_places_of_text, read_times])
def test_a_topic_is_deleted_while_a_reader_waits(
    store: MessageStore, look: Callable[[MessageStore, Read], None], hot_bytes: int
) -> None:
    """MQ-028: whichever read it waits for, the messages are gone for later readers; those put afterwards are there."""
    store.log._hot_bytes = hot_bytes
    queue = store.queue(TOPIC, 0)
    number = 0
    while True:
        number += 1
        wait = Waiting(number, lambda: queue.hide_before(queue.next))
        position, ordinal = queue.text_end, queue.next
        look(store, wait)
        if wait.left > 0:
            break
        assert store.first(queue, read_here) == (ordinal, position)
        for offset in (0, position - 1, *queue.cursors):
            assert store.locate(queue, offset, read_here) == (ordinal, position)
        for _ in range(3):
            put(store, TOPIC, b"afterwards")
        store.sync()
        assert store.first(queue, read_here) == (ordinal, position)
        queue.hide_before(0)  # for the next round, which looks for the first message again
    assert number > 3


def test_a_unit_that_leads_nowhere(store: MessageStore) -> None:
    """F-FLIP, MQ-031: also of a message that this process has stored, and trusts: it costs that message and no other."""
    chosen = random.Random(7)
    queue, reader = store.queue(TOPIC, 0), BulkReader(store.log, store.reader)
    hit = []
    for name in store.disk.list_directory(queue.directory)[:-1]:
        file = store.disk.open(queue.directory / name)
        at = chosen.randrange(file.size() // 16)
        file.write((1 << 40 | chosen.randrange(1 << 40)).to_bytes(8), at * 16)
        hit.append(int(name) // 16 + at)
    found = list(store.records(queue, 0, ALL, read_here))
    assert [number for number, stored in enumerate(found) if stored is None] == hit
    ordinal, missed = 0, []
    while ordinal < queue.readable:
        slices, following = store.reader.hot_slices(queue, ordinal, MESSAGES, ALL, read_here)
        assert sum(map(len, slices)) == sum(stored.size for stored in found[ordinal:following] if stored)
        if following == ordinal:
            missed.append(ordinal)
        ordinal = max(following, ordinal + 1)
    assert missed == hit
    assert [
        ordinal for ordinal in range(queue.readable) if store.reader.hot_run(queue, ordinal, 1, 0, read_here) is None
    ] == hit
    for ordinal in range(queue.readable):
        run = store.reader.hot_run(queue, ordinal, MESSAGES, 0, read_here)
        for stored, (offset, size, _) in zip(
            found[ordinal:], UNIT.iter_unpack(b"" if run is None else run.units), strict=False
        ):
            assert stored is not None and (stored.log_offset, stored.size) == (offset, size)
    for ordinal in hit:
        assert reader.hot(queue, ordinal, 1, ALL, read_here) is None
        assert reader.cold(queue, ordinal, 1, ALL, read_here).size == 0
