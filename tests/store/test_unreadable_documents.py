"""Derived files and documents that the disk cannot read: they count as damaged, and neither a start nor puts need them."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from metaq.errors import DiskFailed
from metaq.store.checkpoint import LIVE_NAME, NAME
from metaq.store.files.documents import BACKUP
from metaq.store.files.ending import ABORT, SUSPECT, Ending
from metaq.store.messagestore import INDEX, QUEUES, MessageStore
from metaq.store.recovery.recovery import IDENTITY, Recovery, open_store
from metaq.store.recovery.verify import repair, verify
from tests.store.test_key_index import put as put_keyed
from tests.store.test_store_features import SETTINGS, bodies, put
from tests.support.faultydisk import DATA, SECTOR, FaultyDisk
from tests.support.manualclock import ManualClock

SENT: Final = [b"%d" % number for number in range(100)]
PROBLEM: Final = "input/output error"


class Folder:
    """A folder with messages, whose checkpoint has a backup."""

    def __init__(self) -> None:
        self.clock, self.disk, self.settings = ManualClock(), FaultyDisk(random.Random(1)), SETTINGS
        store, _ = self.open()
        for body in SENT:
            put(store, "orders", body)
        store.checkpoint()
        store.checkpoint()
        store.close()

    def open(self) -> tuple[MessageStore, Recovery]:
        return open_store(DATA, self.settings, self.clock, self.disk)

    def hit(self, path: Path, sector: int = 0) -> None:
        """Make a sector unreadable."""
        assert self.disk.content(path)[sector * SECTOR :]
        self.disk.unreadable[path] = {sector}

    def check(self, store: MessageStore) -> None:
        """Expect a store to have everything, to take more and to end well."""
        assert bodies(store, "orders") == SENT
        put(store, "orders", b"more")
        store.sync()
        store.sweep()
        store.checkpoint()
        store.checkpoint()
        assert store.failure is None
        assert store.checkpointing.covered == store.log.end
        store.close()
        again, recovery = self.open()
        assert (recovery.problems, bodies(again, "orders")) == ([], [*SENT, b"more"])
        again.close()


@pytest.fixture
def folder() -> Folder:
    return Folder()


@pytest.mark.parametrize("name", [NAME, IDENTITY])
def test_a_start_takes_the_backup(folder: Folder, name: str) -> None:
    """SG-010: what was wrong is listed."""
    folder.hit(DATA / name)
    store, recovery = folder.open()
    assert [PROBLEM in problem for problem in recovery.problems] == [True]
    folder.check(store)


def test_a_start_does_not_need_the_backup(folder: Folder) -> None:
    """SG-010: until it is written again, it does not count for what retention may delete."""
    folder.hit(DATA / (NAME + BACKUP))
    store, recovery = folder.open()
    assert (recovery.problems, store.checkpointing.covered) == ([], -1)
    folder.check(store)


def test_a_checkpoint_keeps_the_backup_of_one_that_cannot_be_read(folder: Folder) -> None:
    """SG-043: and puts go on."""
    store, _ = folder.open()
    put(store, "more", b"body")
    backup = bytes(folder.disk.content(DATA / (NAME + BACKUP)))
    folder.hit(DATA / NAME)
    store.checkpoint()
    assert store.failure is None
    assert folder.disk.content(DATA / (NAME + BACKUP)) == backup
    folder.check(store)


def test_a_live_mark_that_cannot_be_read_is_made_anew(folder: Folder) -> None:
    """SG-010: it may have said that a sync failed, so what only the page cache has is written again."""
    disk = folder.disk
    store, _ = folder.open()
    put(store, "other", b"of the failed sync")
    disk.failing_sync = disk.syncs + 1
    with pytest.raises(DiskFailed):
        store.sync()
    store.release()
    folder.hit(DATA / LIVE_NAME)
    again, recovery = folder.open()
    assert [PROBLEM in problem for problem in recovery.problems] == [True]
    folder.disk = disk.power_cut(random.Random(1))
    after_cut, _ = folder.open()
    assert bodies(after_cut, "other") == [b"of the failed sync"]
    after_cut.close()
    folder.disk = disk
    folder.check(again)


def test_the_mark_of_a_running_broker_counts_as_that_of_a_power_cut(folder: Folder) -> None:
    store, _ = folder.open()
    store.release()
    folder.hit(DATA / ABORT)
    again, recovery = folder.open()
    assert recovery.ending is Ending.POWER_CUT
    folder.check(again)


def test_a_suspicion_stays_when_its_reason_cannot_be_read(folder: Folder) -> None:
    store, _ = folder.open()
    store.suspicion.rise("a test says so")
    store.close()
    folder.hit(DATA / SUSPECT)
    again, _ = folder.open()
    assert again.suspicion.reason is not None
    assert PROBLEM in again.suspicion.reason
    again.suspicion.clear()
    folder.check(again)


@pytest.mark.parametrize("is_killed", [True, False])
def test_units_at_the_end_of_a_queue_are_made_anew(folder: Folder, *, is_killed: bool) -> None:
    """SG-043: from the log."""
    store, _ = folder.open()
    if is_killed:
        store.sweep()
        store.release()
    else:
        store.close()
    queue = DATA / QUEUES / "orders" / "0"
    last = queue / folder.disk.list_directory(queue)[-1]
    folder.hit(last)
    again, _ = folder.open()
    assert last.name
    folder.check(again)


def test_verify_names_them_and_restores_what_it_can(folder: Folder) -> None:
    """E-10."""
    names = [NAME, LIVE_NAME]
    for name in names:
        folder.hit(DATA / name)
    damages = verify(DATA, folder.disk).damages
    assert sorted(damage.path.name for damage in damages if PROBLEM in damage.text) == sorted(names)
    repair(DATA, disk=folder.disk)
    assert verify(DATA, folder.disk).damages == []


def test_an_index_of_keys_that_cannot_be_read_is_made_anew(folder: Folder) -> None:
    """SG-018: the start lists it."""
    folder.settings = replace(SETTINGS, index_slots=5, index_entries=100)
    store, _ = folder.open()
    put_keyed(store, "keyed", b"body", keys="key")
    store.index_keys()
    store.checkpoint()
    store.checkpoint()
    store.close()
    (name,) = folder.disk.list_directory(DATA / INDEX)
    folder.hit(DATA / INDEX / name)
    again, recovery = folder.open()
    assert ["the key index is made anew" in problem for problem in recovery.problems] == [True]
    again.index_keys()
    folder.check(again)
