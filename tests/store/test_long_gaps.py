"""Long stretches of lost messages in a queue: a search passes over many at a time, since nothing else runs meanwhile."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import pytest

from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.store.copies.applying import end_before
from metaq.store.files.disk import File
from metaq.store.files.filecache import read_here
from metaq.store.log.segments import segment_name
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import UNIT, UNIT_SIZE
from metaq.store.recovery.recovery import open_store
from metaq.timers.fold import place_of
from metaq.timers.records import PARKS
from tests.store.test_store_features import SEGMENT, SETTINGS, put
from tests.support.faultydisk import DATA, FaultyDisk
from tests.support.manualclock import ManualClock

TOPIC: Final = PARKS.topic
"""One whose places are searched, too."""
LAST: Final = 200_000
MOST: Final = 500
"""Reads of one search."""


class Counting:
    """A ``Read`` that counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, file: File, size: int, offset: int) -> bytes:
        self.count += 1
        return read_here(file, size, offset)


@pytest.fixture
def read() -> Iterator[Counting]:
    counting = Counting()
    yield counting
    assert 0 < counting.count < MOST


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(random.Random(1))


@pytest.fixture
def store(disk: FaultyDisk) -> Iterator[MessageStore]:
    """Make one with a first message, a last one a second later in another segment, and lost ones between them."""
    clock = ManualClock()
    opened, _ = open_store(DATA, replace(SETTINGS, queue_file_bytes=1 << 20), clock, disk)
    put(opened, TOPIC, b"first")
    for _ in range(2):
        put(opened, "other", bytes(SEGMENT // 2))
    clock.advance(1)
    opened.queue(TOPIC, 0).fill(LAST)
    put(opened, TOPIC, b"last")
    opened.sync()
    opened.sweep()
    yield opened
    opened.close()


def test_the_place_of_a_text_position(store: MessageStore, read: Counting) -> None:
    queue = store.queue(TOPIC, 0)
    assert store.locate(queue, queue.text_end - 1, read)[0] == LAST


def test_the_message_after_a_place(store: MessageStore, read: Counting) -> None:
    assert store.reader.next_intact(store.queue(TOPIC, 0), 1, read)[0] == LAST


@pytest.mark.parametrize("upper", [False, True])
def test_the_message_of_a_time(store: MessageStore, read: Counting, *, upper: bool) -> None:
    """Code 29: between the two messages."""
    found = store.reader.at_time(store.queue(TOPIC, 0), store.clock.now_ms() - 500, read, upper=upper)
    assert found == (0 if upper else LAST)


@pytest.mark.parametrize("is_there", [True, False])
def test_the_first_message(store: MessageStore, read: Counting, *, is_there: bool) -> None:
    """SG-047: also when the one before all those that are lost has aged out."""
    if not is_there:
        store.log.remove(store.log.segments[0])
    assert store.first(store.queue(TOPIC, 0), read)[0] == (0 if is_there else LAST)


def test_the_message_at_a_place_of_the_log(store: MessageStore, read: Counting) -> None:
    """SG-018: a lost message counts as having the log offset of the next one."""
    assert place_of(store, store.log.segments[1].base, read).parks == 1


@pytest.mark.parametrize("is_between", [True, False])
def test_where_a_queue_ends_before_a_place_of_the_log(store: MessageStore, disk: FaultyDisk, *, is_between: bool) -> None:
    """Between the two messages, and after both."""
    queue, before = store.queue(TOPIC, 0), disk.reads
    position = queue.text_end - HEADER_SIZE_TEXT - len("last")
    expected = (1, position) if is_between else (LAST + 1, queue.text_end)
    assert end_before(store, queue, store.log.segments[1].base if is_between else store.log.end) == expected
    assert 0 < disk.reads - before < MOST


def test_where_a_queue_ends_of_which_a_unit_is_damaged(store: MessageStore, disk: FaultyDisk) -> None:
    """The unit of the first message seems to lead to the end of the log, and its record says nothing else."""
    queue = store.queue(TOPIC, 0)
    path = queue.directory / segment_name(0)
    content = bytearray(disk.content(path))
    content[:UNIT_SIZE] = UNIT.pack(store.log.end - 1, queue.unit(0, read_here)[1], 0)
    disk.set_content(path, bytes(content))
    before = disk.reads
    assert end_before(store, queue, store.log.end - 1) == (LAST + 1, queue.text_end)
    assert 0 < disk.reads - before < MOST
