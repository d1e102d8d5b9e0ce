"""Sectors of the key index that the disk cannot read: keys there are not found, all others are."""

import random
from dataclasses import replace
from typing import Final

import pytest

from metaq.protocol.keys import key_hash
from metaq.store.figures import StoreFigures
from metaq.store.files.filecache import SECTOR
from metaq.store.index.indexfile import HEADER_SIZE, ITEMS_A_READ, SLOT_SIZE
from metaq.store.recovery.recovery import open_store
from metaq.store.recovery.verify import repair, verify
from tests.store.test_key_index import SETTINGS, found, put
from tests.support.faultydisk import DATA, FaultyDisk
from tests.support.manualclock import ManualClock

WIDE: Final = replace(SETTINGS, index_slots=1024)
"""So many slots that they take several sectors."""


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(random.Random(0))


def slot_sector(key: str) -> int:
    """Return the sector of a key's slot in its file."""
    return (HEADER_SIZE + key_hash("t", key) % WIDE.index_slots * SLOT_SIZE) // SECTOR


def test_slots_that_cannot_be_read_lose_only_their_keys(disk: FaultyDisk) -> None:
    """SG-018: the file gets no more keys after the next start, and a new one is begun for them."""
    clock = ManualClock()
    store, _ = open_store(DATA, WIDE, clock, disk)
    lost, intact = (next(key for key in map(str, range(1000)) if slot_sector(key) == sector) for sector in (1, 2))
    put(store, "t", b"", keys=lost)
    offset = put(store, "t", b"", keys=intact)
    store.index_keys()
    (file,) = store.indexing.index.files
    store.close()
    disk.unreadable[file.path] = {1}
    for start in range(2):
        store, recovery = open_store(DATA, WIDE, clock, disk)
        assert recovery.problems == []
        again = put(store, "t", b"", keys=f"{lost} again{start}")
        store.sync()
        store.index_keys()
        assert found(store, "t", intact) == [offset]
        assert found(store, "t", f"again{start}") == [again]
        assert found(store, "t", lost)[0] == again
        assert StoreFigures.of(store).index_damaged > 0
        assert len(store.indexing.index.files) == 2
        store.close()


def test_after_an_item_that_cannot_be_read_the_search_goes_on_in_older_files(disk: FaultyDisk) -> None:
    """SG-018: as it does where a chain breaks."""
    store, _ = open_store(DATA, replace(WIDE, index_entries=3), ManualClock(), disk)
    offsets = [put(store, "t", b"", keys="k") for _ in range(3)]
    store.sync()
    store.index_keys()
    newest = store.indexing.index.files[-1]
    assert len(store.indexing.index.files) == 2
    disk.unreadable[newest.path] = {newest.item_at(1) // SECTOR}
    assert found(store, "t", "k") == offsets[1::-1]
    assert StoreFigures.of(store).index_damaged == 1


@pytest.mark.parametrize("part", ["header", "slots", "items"])
def test_repair_has_an_index_that_cannot_be_read_made_anew(disk: FaultyDisk, part: str) -> None:
    """SG-018: the damage is listed, and nothing else is."""
    store, _ = open_store(DATA, WIDE, ManualClock(), disk)
    offset = put(store, "t", b"", keys="k")
    store.index_keys()
    (file,) = store.indexing.index.files
    store.close()
    disk.unreadable[file.path] = {{"header": 0, "slots": 1, "items": file.item_at(1) // SECTOR}[part]}
    (damage,) = verify(DATA, disk).damages
    assert damage == (file.path, 0, f"cannot read {file.path}: input/output error")
    assert not repair(DATA, disk).damages
    store, _ = open_store(DATA, WIDE, ManualClock(), disk)
    assert found(store, "t", "k") == [offset]
    store.close()


def test_items_after_one_that_cannot_be_read_are_not_compared(disk: FaultyDisk) -> None:
    """SG-018: the keys of one message lie before and after the end of what is read at a time."""
    store, _ = open_store(DATA, replace(WIDE, segment_bytes=1 << 20, index_entries=5000), ManualClock(), disk)
    for _ in range(ITEMS_A_READ // 3 + 20):
        put(store, "t", b"", keys="a b c")
    store.index_keys()
    (file,) = store.indexing.index.files
    store.close()
    disk.unreadable[file.path] = {file.item_at(1 + ITEMS_A_READ) // SECTOR + 1}
    assert [damage.text for damage in verify(DATA, disk).damages] == [f"cannot read {file.path}: input/output error"]
