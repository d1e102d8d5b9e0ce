"""A sync of the log that fails is known to every sync beside it and after it: the kernel reports a failed write only once."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import pytest

from metaq.errors import DiskFailed, StoreError
from metaq.store.files.filecache import run_here
from metaq.store.messagestore import MessageStore
from metaq.store.recovery.recovery import open_store
from tests.store.test_store_features import SEGMENT, SETTINGS, put
from tests.support.faultydisk import DATA, FaultyDisk

T = TypeVar("T")


class _GivesUp(BaseException):
    """The greenlet that waits for a call is ended."""


def given_up(call: Callable[[], T]) -> T:
    """Make a call whose caller waits for it no longer."""
    with suppress(StoreError):
        call()
    raise _GivesUp


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(random.Random(1))


@pytest.fixture
def store(disk: FaultyDisk) -> MessageStore:
    opened, _ = open_store(DATA, SETTINGS, disk=disk)
    put(opened, "orders", b"first")
    opened.sync()
    put(opened, "orders", b"second")
    return opened


@contextmanager
def not_synced(store: MessageStore) -> Iterator[None]:
    """Expect a sync to fail, then and later, and nothing to count as durable."""
    durable = store.durable_end
    with pytest.raises(DiskFailed, match="cannot sync"):
        yield
    with pytest.raises(DiskFailed, match="cannot sync"):
        store.sync()
    assert store.durable_end == durable < store.log.end
    assert store.failure is not None


def test_the_failure_of_a_checkpoint_is_that_of_a_sync_beside_it(disk: FaultyDisk, store: MessageStore) -> None:
    """SG-041: puts at DISK are not acknowledged, although their own sync reports nothing."""

    def after_the_checkpoint(call: Callable[[], T]) -> T:
        disk.failing_sync = disk.syncs + 1
        with pytest.raises(DiskFailed):
            store.checkpoint()
        return call()

    with not_synced(store):
        store.sync(after_the_checkpoint)


def test_a_failure_that_nobody_waits_for_is_known(disk: FaultyDisk, store: MessageStore) -> None:
    """SG-041: the greenlet of a checkpoint was ended while the disk worked."""
    disk.failing_sync = disk.syncs + 1
    with pytest.raises(_GivesUp):
        store.checkpoint(run_sync=given_up)
    assert disk.syncs == disk.failing_sync
    with not_synced(store):
        store.sync()


def test_a_spare_segment_is_synced_apart(disk: FaultyDisk, store: MessageStore) -> None:
    """SG-041: the log goes on into a segment whose room is still being made durable; that sync takes no report from others."""

    calls: list[object] = []

    def late(call: Callable[[], T]) -> T:
        calls.append(call)
        if len(calls) == 2:  # after room was allocated
            base = store.log.segments[-1].base
            while store.log.segments[-1].base == base:
                put(store, "orders", bytes(SEGMENT // 4))
            disk.failing_sync = disk.syncs + 1
        return call()

    with suppress(DiskFailed):
        store.log.prepare(late, run_here)
    with not_synced(store):
        store.sync()


def test_syncs_of_the_log_go_one_way(disk: FaultyDisk, store: MessageStore) -> None:
    """Two at a time would each hide from the other what the kernel reports."""
    before = disk.syncs
    ways = []

    def note(call: Callable[[], T]) -> T:
        ways.append(disk.syncs - before)
        return call()

    store.checkpoint(run_sync=note)
    assert ways == [0]
