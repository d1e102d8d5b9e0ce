"""Refusals and failures that last: each request gets an error that keeps nothing of the requests before."""

import random
from collections.abc import Callable
from contextlib import suppress

import pytest

from metaq.errors import DiskFailed, DiskFull, MetaqError, NotMaster
from metaq.store.messagestore import MessageStore
from metaq.store.recovery.recovery import open_store
from tests.store.test_store_features import SETTINGS, put
from tests.support.faultydisk import DATA, FaultyDisk


def frames_kept(error: BaseException | None) -> int:
    """Return how many frames an error keeps, with their variables: bodies of puts, sessions."""
    count, trace = 0, error.__traceback__ if error is not None else None
    while trace is not None:
        count, trace = count + 1, trace.tb_next
    return count


def repeat(call: Callable[[], object], kept: Callable[[], BaseException | None], kind: type[MetaqError], reason: str) -> None:
    """Expect a call to be refused time and again, and the error that stands for it to keep no more frames."""
    for _ in range(2):
        with pytest.raises(kind, match=reason):
            call()
    before = frames_kept(kept())
    for _ in range(100):
        with suppress(kind):
            call()
    assert frames_kept(kept()) == before


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(random.Random(1))


@pytest.fixture
def store(disk: FaultyDisk) -> MessageStore:
    return open_store(DATA, SETTINGS, disk=disk)[0]


@pytest.mark.parametrize("name", ["check_writable", "check_appendable", "check_master"])
def test_a_slave_keeps_nothing_of_what_it_refuses(store: MessageStore, name: str) -> None:
    """MQ-101: a client that sends puts to a slave, for as long as the slave lives."""
    refusal = store.fence.close("this replica is a slave")
    repeat(getattr(store, name), lambda: store.fence.refusal, NotMaster, "^this replica is a slave$")
    assert store.fence.refusal is refusal
    assert frames_kept(refusal) == 0


def test_a_change_of_role_is_refused_by_an_error_of_its_own(store: MessageStore) -> None:
    def closing() -> None:
        with store.fence.closing("another reason"):
            pytest.fail("it is closed already")

    store.fence.close("this replica is a slave")
    repeat(closing, lambda: store.fence.refusal, NotMaster, "^this replica is a slave$")
    assert frames_kept(store.fence.refusal) == 0


def test_a_failed_store_keeps_nothing_of_its_syncs(disk: FaultyDisk, store: MessageStore) -> None:
    put(store, "orders", b"body")
    disk.failing_sync = disk.syncs + 1
    with pytest.raises(DiskFailed):
        store.sync()
    repeat(store.sync, lambda: store.failure, DiskFailed, "cannot sync")


def test_owed_writes_keep_nothing_of_what_waits_for_them(disk: FaultyDisk, store: MessageStore) -> None:
    store.close()
    disk.fill()
    again, _ = open_store(DATA, SETTINGS, disk=disk)
    repeat(again.log.owed.check, lambda: again.log.owed.reason, DiskFull, "the disk is full")
