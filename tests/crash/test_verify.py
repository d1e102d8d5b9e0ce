"""`metaq.store.recovery.verify` on real files."""

import random
from pathlib import Path

import pytest

from metaq.checksum import body_crc
from metaq.errors import DirectoryLocked, DiskFailed, StoreError, UnknownVersion
from metaq.message import LogOffset
from metaq.protocol.record import constant_middle, host_bytes
from metaq.store.files.disk import RealDisk
from metaq.store.files.documents import write_document
from metaq.store.files.filecache import read_here
from metaq.store.log.segments import CHUNK
from metaq.store.messagestore import MessageStore
from metaq.store.recovery.recovery import open_store
from metaq.store.recovery.verify import repair, verify
from metaq.store.settings import StoreSettings
from tests.crash.driver import Driver, quiet
from tests.crash.model import KEYS
from tests.store.test_store_features import put
from tests.support.faultydisk import DATA, FaultyDisk

SETTINGS = StoreSettings(segment_bytes=64 * 1024, queue_file_bytes=256, index_slots=5, index_entries=100)
HOST = host_bytes("127.0.0.1", 8123)
MESSAGES = 300
LARGE_SEGMENT = 3 * CHUNK


def fill(directory: Path) -> list[LogOffset]:
    """Put messages of 1,000 bytes and stop in order; return where they are."""
    store, _ = open_store(directory, SETTINGS)
    queue = store.queue("orders", 0)
    offsets = []
    for number in range(MESSAGES):
        body = b"%04d" % number * 250
        offsets.append(
            LogOffset(store.put(queue, 0, body, body_crc(body), constant_middle(0, 1, HOST, 1, HOST), 20 + len(body)))
        )
        store.append()
    store.close()
    return offsets


def bodies(store: MessageStore) -> list[bytes | None]:
    found = store.records(store.queue("orders", 0), 0, 1000, read_here)
    return [None if stored is None else bytes(stored.buffer[stored.at + 88 : stored.at + 92]) for stored in found]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def files(directory: Path) -> dict[Path, tuple[bytes, int]]:
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.rglob("*") if path.is_file()}


def test_a_whole_folder_has_no_damage_and_is_not_written_to(tmp_path: Path) -> None:
    """E-10: everything is counted, nothing is written."""
    fill(tmp_path)
    before = files(tmp_path)
    report = verify(tmp_path)
    assert report.damages == []
    assert (report.records, report.units, report.quarantined_bytes) == (MESSAGES, MESSAGES, 0)
    assert report.documents >= 2
    assert files(tmp_path) == before


def test_progress_rises_to_the_size_of_the_log(tmp_path: Path) -> None:
    fill(tmp_path)
    calls: list[tuple[int, int]] = []
    verify(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] == sum(path.stat().st_size for path in (tmp_path / "commitlog").iterdir())


def test_a_damaged_record_is_named_with_file_and_offset(tmp_path: Path) -> None:
    """E-10: the place is where the record begins; readers get every other message."""
    offsets = fill(tmp_path)
    segment = tmp_path / "commitlog" / f"{64 * 1024:020d}"
    first = min(offset for offset in offsets if offset >= 64 * 1024)
    flip(segment, 500)
    (damage,) = verify(tmp_path).damages
    assert (damage.path, damage.offset) == (segment, first - 64 * 1024)
    with quiet():
        store, _ = open_store(tmp_path, SETTINGS)
        expected: list[bytes | None] = [b"%04d" % number for number in range(MESSAGES)]
        expected[offsets.index(first)] = None
        assert bodies(store) == expected
        store.close()


def test_repair_makes_queues_and_checkpoints_from_the_log(tmp_path: Path) -> None:
    """E-10: with every queue file and checkpoint gone, each message is found again and the log keeps its bytes."""
    fill(tmp_path)
    log = {path: content for path, (content, _) in files(tmp_path / "commitlog").items()}
    for path in [*(tmp_path / "consumequeue").rglob("0*"), *tmp_path.glob("checkpoint*")]:
        if path.is_file():
            path.unlink()
    assert repair(tmp_path).damages == []
    assert {path: content for path, (content, _) in files(tmp_path / "commitlog").items()} == log
    store, recovery = open_store(tmp_path, SETTINGS)
    assert (recovery.records, recovery.problems) == (0, [])
    assert bodies(store) == [b"%04d" % number for number in range(MESSAGES)]
    store.close()


def test_repair_leaves_a_bad_range_listed(tmp_path: Path) -> None:
    """Data that cannot be rebuilt is counted as quarantined and is no new damage."""
    offsets = fill(tmp_path)
    flip(tmp_path / "commitlog" / f"{0:020d}", offsets[3] + 200)
    with quiet():
        report = repair(tmp_path)
    assert report.damages == []
    assert report.quarantined_bytes == offsets[4] - offsets[3]
    assert report.records == MESSAGES - 1


def test_repair_restores_a_document_from_its_backup(tmp_path: Path) -> None:
    fill(tmp_path)
    path = tmp_path / "topics.json"
    write_document(RealDisk(), path, {"version": 1})
    whole = path.read_bytes()
    write_document(RealDisk(), path, {"version": 2})
    flip(path, 30)
    assert [damage.path for damage in verify(tmp_path).damages] == [path]
    assert repair(tmp_path).damages == []
    assert path.read_bytes() == whole


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path, SETTINGS)
    for check in (verify, repair):
        with pytest.raises(DirectoryLocked):
            check(tmp_path)
    store.close()
    assert verify(tmp_path).damages == []


def test_a_folder_without_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="not a data folder"):
        verify(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_format_version_is_refused(tmp_path: Path) -> None:
    fill(tmp_path)
    write_document(RealDisk(), tmp_path / "store.json", {"format": 99, "broker_name": "metaq", "broker_number": 0})
    for check in (verify, repair):
        with pytest.raises(UnknownVersion, match="99"):
            check(tmp_path)


def test_a_read_that_fails_once_costs_one_answer() -> None:
    """A failed read is raised to whoever asked; the next one works, and so do puts."""
    rng = random.Random(1)
    driver = Driver(rng, FaultyDisk(rng), StoreSettings(segment_bytes=4096, queue_file_bytes=64, hot_bytes=0))
    driver.open()
    for _ in range(20):
        driver.put()
    driver.sync()
    driver.sweep()
    driver.disk.failing_read = driver.disk.reads + 1
    with pytest.raises(DiskFailed):
        list(driver.store.records(driver.store.queue(*KEYS[0]), 0, 1000, read_here))
    for key in KEYS:
        driver.read_partition(key)
    driver.put()
    assert driver.store.failure is None


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [0, 1 << 20, CHUNK + 1])
def test_a_segment_that_is_cut_short_is_read_to_its_end(size: int) -> None:
    """E-10: also one that is larger than what is read at a time."""
    disk = FaultyDisk(random.Random(1))
    store, _ = open_store(DATA, StoreSettings(segment_bytes=LARGE_SEGMENT), disk=disk)
    kept = [put(store, "orders", bytes(LARGE_SEGMENT // 2)) for _ in range(2)]
    store.close()
    assert [segment.base for segment in store.log.segments[:2]] == [0, LARGE_SEGMENT] == kept
    del disk.content(store.log.segments[0].path)[size:]
    report = verify(DATA, disk)
    assert any("too early" in str(damage) for damage in report.damages)
    assert report.records == 1
