"""A process that can open no more files goes on when it can again: nothing counts that was not written, and nothing is lost."""

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from metaq.errors import DiskFailed, TooManyFiles
from metaq.message import TopicPartition
from metaq.store.files.disk import RealDisk, RealFile
from metaq.store.log.segments import segment_name
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from tests.store.test_record_groups import ready
from tests.store.test_store_features import SEGMENT, SETTINGS, bodies
from tests.support.descriptors import no_descriptors
from tests.support.manualclock import ManualClock

ORDERS: Final = TopicPartition("orders", 0)
LARGE: Final = bytes(SEGMENT // 2)


class BrokenFile(RealFile):
    """A file that cannot be written to."""

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        raise DiskFailed("cannot write a segment: input/output error")


class ShortDisk(RealDisk):
    """A disk of which calls that open a file fail, as in a process with too many open files."""

    def __init__(self) -> None:
        self.broken: Path | None = None
        """The file that cannot be written to."""
        self._passing = 1 << 60
        self._failing = 0

    def fail(self, passing: int, failing: int = 1) -> None:
        """Let so many opens fail, after some that pass."""
        self._passing, self._failing = passing, failing

    def _opening(self, path: Path) -> None:
        self._passing -= 1
        if -self._failing <= self._passing < 0:
            raise TooManyFiles(f"cannot open {path}: {os.strerror(errno.EMFILE)}")

    def open(self, path: Path) -> RealFile:
        self._opening(path)
        plain = super().open(path)  # which closes its own descriptor
        return BrokenFile(path, os.dup(plain._fd)) if path == self.broken else plain

    def read_file(self, path: Path) -> bytes:
        self._opening(path)
        return super().read_file(path)

    def sync_directory(self, path: Path) -> None:
        self._opening(path)
        super().sync_directory(path)


class Bench:
    """A store, the bodies of its messages, and the files that have to be opened again."""

    def __init__(self, folder: Path, settings: StoreSettings = SETTINGS) -> None:
        self.disk = ShortDisk()
        self.store, _ = open_store(folder, settings, ManualClock(), self.disk)
        self.sent: list[bytes] = []
        self.put(b"one", b"two")
        self.store.files.clear()

    def stage(self, *new: bytes) -> None:
        for body in new:
            self.store.put(*ready(self.store, ORDERS, body))

    def put(self, *new: bytes) -> None:
        self.stage(*new)
        self.store.append()
        self.sent += new

    def check(self) -> None:
        """Expect all messages to become durable, and the store to take more."""
        store = self.store
        store.check_writable()
        self.put(b"more")
        store.sync()
        assert store.durable_end == store.log.end
        store.sweep()
        store.checkpoint()
        assert not store.queue(*ORDERS).unsynced
        directory = store.directory
        store.release()
        again, recovery = open_store(directory, SETTINGS, ManualClock())
        assert bodies(again, ORDERS.topic) == self.sent
        assert recovery.problems == []
        again.close()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "data")


def test_the_limit_of_the_system(bench: Bench) -> None:
    """SG-010: a checkpoint of a real store, and each call that opens something."""
    disk, directory = RealDisk(), bench.store.directory
    calls: list[Callable[[], object]] = [
        lambda: disk.open(directory / "new"),
        lambda: disk.read_file(directory / "abort"),
        lambda: disk.list_directory(directory),
        lambda: disk.sync_directory(directory),
        bench.store.checkpoint,
    ]
    errors = []
    with no_descriptors():
        for call in calls:
            try:
                call()
            except TooManyFiles as error:
                errors.append(str(error))
    assert [os.strerror(errno.EMFILE) in error and "LimitNOFILE" in error for error in errors] == [True] * len(calls)
    bench.check()


def test_a_checkpoint_is_made_later(tmp_path: Path) -> None:
    """SG-043: whichever of its files cannot be opened; it is made again as a whole."""
    failed, passing = True, 0
    while failed:
        bench = Bench(tmp_path / str(passing))
        bench.disk.fail(passing)
        try:
            bench.store.checkpoint()
            failed = False
        except TooManyFiles:
            passing += 1
        bench.disk.fail(0, 0)
        assert bench.store.failure is None
        bench.store.checkpoint()
        bench.check()
    assert passing > 8


def test_units_are_written_later(bench: Bench) -> None:
    """SG-043: by the next sweep; this one says why not, and puts go on."""
    queue = bench.store.queue(*ORDERS)
    bench.disk.fail(0)
    with pytest.raises(TooManyFiles):
        bench.store.sweep()
    assert bench.store.failure is None
    assert queue.pending_bytes
    bench.store.check_writable()
    bench.store.sweep()
    assert not queue.pending_bytes
    bench.check()


@pytest.mark.parametrize("failing", [1, 2])
def test_an_append_that_fails_leaves_nothing(bench: Bench, failing: int) -> None:
    """SG-010: the part that was written to one segment is zeroed, at once or before the next append."""
    bench.put(LARGE)
    bench.stage(b"first", LARGE)
    bench.store.files.clear()
    end = bench.store.log.end
    bench.disk.fail(1, failing)
    with pytest.raises(TooManyFiles):
        bench.store.append()
    assert (bench.store.failure, bench.store.log.end, bench.store.queue(*ORDERS).next) == (None, end, len(bench.sent))
    bench.put(b"later", LARGE)
    bench.check()


def test_a_write_that_failed_is_final_also_when_no_file_can_be_opened_after_it(tmp_path: Path) -> None:
    """SG-010: what was written to the segment before cannot be zeroed at once."""
    bench = Bench(tmp_path / "data", replace(SETTINGS, open_files=1))
    bench.put(LARGE)
    bench.stage(b"first", LARGE)
    bench.store.files.clear()
    bench.disk.broken = bench.store.log.directory / segment_name(SEGMENT)
    bench.disk.fail(2)
    with pytest.raises(DiskFailed, match="input/output error"):
        bench.store.append()
    assert "input/output error" in str(bench.store.failure)
    bench.store.release()


def test_a_sync_is_made_later(bench: Bench) -> None:
    """SG-041: nothing counts as durable before."""
    bench.disk.fail(0)
    with pytest.raises(TooManyFiles):
        bench.store.sync()
    assert (bench.store.failure, bench.store.durable_end) == (None, 0)
    bench.store.sync()
    bench.check()


def test_keys_are_indexed_later(bench: Bench) -> None:
    """SG-018: the next round tries again."""
    bench.disk.fail(0)
    with pytest.raises(TooManyFiles):
        bench.store.index_keys()
    assert bench.store.failure is None
    bench.store.index_keys()
    bench.check()
