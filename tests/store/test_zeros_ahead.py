"""Zeros ahead of the log: blocks that were only allocated are written once for many appends that are synced."""

import random
from dataclasses import replace
from typing import Final

import pytest

from metaq.message import Durability
from metaq.store.files.filecache import read_here
from metaq.store.log.commitlog import MOST_BEFORE_ZEROS, ZEROS_AHEAD
from metaq.store.messagestore import LOG, MessageStore
from metaq.store.recovery.recovery import open_store
from tests.store.test_store_features import SETTINGS, put
from tests.support.faultydisk import DATA, SECTOR, FaultyDisk
from tests.support.manualclock import ManualClock

SEGMENT: Final = ZEROS_AHEAD + 64 * 1024


def opened(durability: Durability = Durability.DISK) -> tuple[MessageStore, FaultyDisk]:
    disk = FaultyDisk(random.Random(1))
    return open_store(DATA, replace(SETTINGS, segment_bytes=SEGMENT, durability=durability), ManualClock(), disk)[0], disk


def unsynced(store: MessageStore, disk: FaultyDisk, body: bytes) -> int:
    """Put a message, and return how many bytes of its segment are unsynced then; sync them."""
    store.sync()
    segment = store.log.segments[-1]
    put(store, "t", body)
    count = SECTOR * len(disk._inode(DATA / LOG / segment.path.name).versions)
    store.sync()
    return count


def test_zeros_are_written_once_for_many_small_appends() -> None:
    """RD-011: with the first one, and with the first that goes beyond them; what is there is the log, then zeros."""
    store, disk = opened()
    assert ZEROS_AHEAD <= unsynced(store, disk, b"x" * 100) <= ZEROS_AHEAD + 2 * SECTOR
    end = store.log.end + ZEROS_AHEAD - 300
    while store.log.end < end - 1000:
        assert unsynced(store, disk, b"y" * 700) <= 1400 + 2 * SECTOR
    assert unsynced(store, disk, b"z" * 2000) > 30_000  # to the end of the segment
    segment = store.log.segments[0]
    assert disk.content(segment.path)[store.log.end :].count(0) == SEGMENT - store.log.end
    assert all(store.records(store.queue("t", 0), 0, 1 << 20, read_here))


@pytest.mark.parametrize(
    ("durability", "size"), [(Durability.MEMORY, 100), (Durability.REPLICA, 100), (Durability.DISK, MOST_BEFORE_ZEROS)]
)
def test_other_appends_are_written_as_they_are(durability: Durability, size: int) -> None:
    """RD-011: those that are not synced each, and those of which the disk has more to do than new blocks."""
    store, disk = opened(durability)
    assert unsynced(store, disk, bytes(size)) <= size + 300 + 2 * SECTOR


@pytest.mark.parametrize("seed", range(20))
def test_a_power_cut_keeps_what_was_synced_and_any_of_the_zeros(seed: int) -> None:
    """MQ-040: the log ends with a message that was synced, or with a later one that is whole, and goes on there."""
    store, disk = opened()
    put(store, "t", b"x" * 900)
    store.sync()
    ends = [store.log.end]
    for size in (10, 1500, 700):
        put(store, "t", b"y" * size)
        ends.append(store.log.end)
    again, _ = open_store(DATA, store.settings, ManualClock(), disk.power_cut(random.Random(seed)))
    assert again.log.end in ends
    put(again, "t", b"z")
    again.sync()
    found = list(again.records(again.queue("t", 0), 0, 1 << 20, read_here))
    assert found[0] and found[-1]
