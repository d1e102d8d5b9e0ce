"""Features of the store by their IDs (docs/features.md): bytes on a real disk, taken apart by hand."""

import gc
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from metaq.config import load
from metaq.errors import WrongBroker
from metaq.message import Durability, TopicPartition
from metaq.protocol.properties import UNIQUE_KEY
from metaq.protocol.record import (
    FIXED_SIZE,
    TAGS,
    constant_middle,
    encode_properties,
    host_bytes,
    java_hash,
    record_tail,
)
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.store.expiry import delete_expired
from metaq.store.files.disk import File, RealDisk, RealFile, Usage
from metaq.store.files.ending import Ending
from metaq.store.files.filecache import read_cached, read_here, run_here
from metaq.store.log.retention import RetentionRules
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import FILLER_SIZE
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from tests.store.test_key_index import found as found_by_key
from tests.store.test_key_index import put as put_keyed
from tests.support.faultydisk import DATA, FaultyDisk
from tests.support.manualclock import ManualClock

SEGMENT: Final = 16 * 1024
SETTINGS: Final = StoreSettings(
    segment_bytes=SEGMENT,
    queue_file_bytes=256,
    retention=RetentionRules(keep_ms=1000, hour=4, clean_ratio=0, force_ratio=1, refuse_ratio=1, ample_free_bytes=1 << 62),
)
CLIENT: Final = host_bytes("10.1.2.3", 45678)
BROKER: Final = host_bytes("127.0.0.1", 8123)
CHECKSUM: Final = 20


def put(
    store: MessageStore, topic: str, body: bytes, partition: int = 0, flag: int = 0, tag: str | None = None, ident: str = ""
) -> int:
    """Store one message; returns its log offset."""
    offset = stage(store, topic, body, partition, flag, tag, ident)
    store.append()
    return offset


def stage(
    store: MessageStore, topic: str, body: bytes, partition: int = 0, flag: int = 0, tag: str | None = None, ident: str = ""
) -> int:
    """Stage one message; returns its log offset."""
    queue = store.queue(topic, partition)
    now_ms = store.clock.now_ms()
    middle = constant_middle(0, now_ms - 5, CLIENT, now_ms, BROKER)
    crc, size = zlib.crc32(body) & 0x7FFFFFFF, HEADER_SIZE_TEXT + len(body)
    if ident:
        return store.put(queue, flag, body, crc, middle, size, record_tail(topic, encode_properties([(UNIQUE_KEY, ident)])))
    if tag is None:
        return store.put(queue, flag, body, crc, middle, size)
    tail = record_tail(topic, encode_properties([(TAGS, tag)]))
    return store.put(queue, flag, body, crc, middle, size + 4 + len(tag.encode()), tail, java_hash(tag))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def store(folder: Path, clock: ManualClock) -> Iterator[MessageStore]:
    opened, _ = open_store(folder, SETTINGS, clock)
    yield opened
    opened.close()


def segments(folder: Path) -> list[Path]:
    return sorted((folder / "commitlog").iterdir())


def bodies(store: MessageStore, topic: str, partition: int = 0) -> list[bytes | None]:
    """Return the bodies that readers get, ``None`` where a message is lost."""
    queue = store.queue(topic, partition)
    first, _ = store.first(queue, read_here)
    found: list[bytes | None] = []
    for stored in store.records(queue, first, 1 << 20, read_here):
        if stored is None:
            found.append(None)
        else:
            record = stored.buffer[stored.at : stored.at + stored.size]
            (length,) = struct.unpack_from(">i", record, 84)
            found.append(bytes(record[88 : 88 + length]))
    return found


# -- commit log -------------------------------------------------------------------------------------------------------


def test_a_record_field_by_field(folder: Path, store: MessageStore, clock: ManualClock) -> None:
    """SG-016, SG-017, SG-018, SG-019, SG-020, RD-001: the twenty fields in their order, each with its value."""
    for count in range(3):
        put(store, "orders", b"before", partition=7)
        if count == 1:
            clock.advance(1)
    body = "grün".encode()
    at = put(store, "orders", body, partition=7, flag=6, tag="TagA")
    data = segments(folder)[0].read_bytes()[at:]
    names = "size magic crc partition flag ordinal place system born_ms born store_ms store reconsume position length"
    layout = ">i4siiiqqiq8sq8siqi"
    found = dict(zip(names.split(), struct.unpack_from(layout, data), strict=True))
    tail = b"\x06orders" + struct.pack(">h", 10 + CHECKSUM) + b"TAGS\x01TagA\x02"
    size = 88 + len(body) + len(tail) + CHECKSUM
    assert found == {
        "size": size,
        "magic": b"\xda\xa3\x20\xa7",
        "crc": zlib.crc32(body) & 0x7FFFFFFF,
        "partition": 7,
        "flag": 6,
        "ordinal": 3,
        "place": at,
        "system": 0,
        "born_ms": clock.now_ms() - 5,
        "born": bytes((10, 1, 2, 3)) + struct.pack(">i", 45678),
        "store_ms": clock.now_ms(),
        "store": bytes((127, 0, 0, 1)) + struct.pack(">i", 8123),
        "reconsume": 0,
        "position": 3 * (20 + 6),
        "length": len(body),
    }
    assert data[88 : size - CHECKSUM] == body + tail
    digits = f"{zlib.crc32(data[: size - CHECKSUM]) & 0x7FFFFFFF:010d}"[::-1]
    assert data[size - CHECKSUM : size] == b"__CRC32#\x01" + digits.encode() + b"\x02"
    assert not any(data[size:])


def test_a_full_segment_ends_with_a_blank_record(folder: Path, store: MessageStore) -> None:
    """SG-013, SG-014, SG-017, SG-021, MQ-013: the next one is named by its first byte, in 20 digits; no record crosses."""
    size = FIXED_SIZE + 1000 + 1 + CHECKSUM
    offsets = [put(store, "t", b"x" * 1000) for _ in range(40)]
    fit = (SEGMENT - 8) // size
    assert offsets == [count // fit * SEGMENT + count % fit * size for count in range(40)]
    names = [path.name for path in segments(folder)]
    assert names[:3] == ["00000000000000000000", "00000000000000016384", "00000000000000032768"]
    first = segments(folder)[0].read_bytes()
    assert len(first) == SEGMENT
    assert first[fit * size :][:8] == struct.pack(">i", SEGMENT - fit * size) + b"\xcb\xd4\x31\x94"
    assert not any(first[fit * size + 8 :])
    assert StoreSettings().segment_bytes == 1 << 30


def test_segments_of_mixed_sizes(folder: Path) -> None:
    """SG-015, MQ-009: a log offset is found whatever the sizes were when its segment was made."""
    sent = []
    for segment_bytes in (8192, 32768, 4096):
        store, _ = open_store(folder, StoreSettings(segment_bytes=segment_bytes))
        for count in range(30):
            body = b"%d %d" % (segment_bytes, count) * 50
            sent.append((put(store, "t", body), body))
        store.close()
    store, recovery = open_store(folder, SETTINGS)
    assert (recovery.ending, recovery.problems) == (Ending.ORDERLY, [])
    assert len({path.stat().st_size for path in segments(folder)}) == 3
    assert bodies(store, "t") == [body for _, body in sent]
    for offset, _ in sent:
        segment = store.log.find(offset)
        assert segment is not None and segment.base <= offset < segment.end
    store.close()


def test_a_deleted_segment_goes_when_its_last_reader_does(folder: Path, store: MessageStore, clock: ManualClock) -> None:
    """MQ-028, SG-044, SG-045: the file is unlinked at once, the map when nobody holds a slice of it any more."""
    for _ in range(40):
        put(store, "t", b"x" * 1000)
    store.sync()
    second = next(store.records(store.queue("t", 0), 1, 1, read_here))
    assert second is not None
    body = second.buffer[second.at + 88 : second.at + 1088]
    path = segments(folder)[0]
    store.checkpoint()
    store.checkpoint()
    clock.advance(10)
    assert delete_expired(store).delete[0] == 0
    assert not path.exists()
    assert body == b"x" * 1000
    assert str(path) in Path("/proc/self/maps").read_text()
    del body, second
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()


# -- consume queue ----------------------------------------------------------------------------------------------------


def test_units_and_their_files(folder: Path, store: MessageStore) -> None:
    """MQ-014, MQ-015, MQ-016, SG-019, SG-023, SG-024, SG-027, RD-002, RD-004: one queue a partition, over one log."""
    placed = [
        (put(store, "a" if count % 2 else "b", b"x" * count, tag="TagA" if count % 3 else None), count) for count in range(80)
    ]
    store.sweep()
    for topic, odd in (("a", 1), ("b", 0)):
        files = sorted((folder / "consumequeue" / topic / "0").iterdir())
        assert [path.name for path in files] == [f"{base:020d}" for base in (0, 256, 512)]
        assert [path.stat().st_size for path in files] == [256, 256, 128]
        units = list(struct.iter_unpack(">qii", b"".join(path.read_bytes() for path in files)))
        assert units == [
            (offset, FIXED_SIZE + count + 1 + CHECKSUM + 10 * bool(count % 3), java_hash("TagA") if count % 3 else 0)
            for offset, count in placed
            if count % 2 == odd
        ]
    assert StoreSettings().queue_file_bytes == load(None, {}, {}).queue_file_bytes == 20 * 1024 * 1024


def test_queue_files_before_the_log_are_deleted(folder: Path, store: MessageStore, clock: ManualClock) -> None:
    """SG-049: and what is left keeps its ordinals."""
    for count in range(60):
        put(store, "t", b"%04d" % count * 250)
    store.sync()
    store.checkpoint()
    store.checkpoint()
    clock.advance(10)
    assert delete_expired(store).delete
    first, position = store.first(store.queue("t", 0), read_here)
    assert first > 16 and position == first * 1020
    assert min(int(path.name) for path in (folder / "consumequeue" / "t" / "0").iterdir()) == first // 16 * 256
    assert bodies(store, "t") == [b"%04d" % count * 250 for count in range(first, 60)]


def test_a_lost_message_keeps_its_place(folder: Path, clock: ManualClock) -> None:
    """RD-005, SG-018, SG-028: damage in the middle costs one message, and everything derived is made again."""
    store, _ = open_store(folder, SETTINGS, clock)
    offsets = [put(store, "t", b"%d" % count) for count in range(10)]
    store.close()
    log = segments(folder)[0]
    data = bytearray(log.read_bytes())
    data[offsets[4] + 88] ^= 1
    log.write_bytes(data)
    for name in ("checkpoint", "checkpoint.bak", "checkpoint.live", "store.json"):
        (folder / name).unlink(missing_ok=True)
    for path in (folder / "consumequeue" / "t" / "0").iterdir():
        path.unlink()
    store, recovery = open_store(folder, SETTINGS, clock)
    assert [tuple(gap) for gap in recovery.gaps] == [(offsets[4], offsets[5])]
    assert bodies(store, "t") == [None if count == 4 else b"%d" % count for count in range(10)]
    assert store.queue("t", 0).unit(4, read_here) == (0, FILLER_SIZE, 0)
    assert store.locate(store.queue("t", 0), 4 * 21, read_here) == (5, 5 * 21)
    store.close()


# -- what is made durable, and how ------------------------------------------------------------------------------------


class WatchedFile(RealFile):
    """A file that tells of its syncs."""

    __slots__ = ("_tell", "_watched")

    def __init__(self, path: Path, fd: int, tell: Callable[[str], None]) -> None:
        super().__init__(path, fd)
        self._watched = path
        self._tell = tell

    def datasync(self) -> None:
        super().datasync()
        self._tell(f"data {self._watched.parent.name}/{self._watched.name}")

    def sync_file_system(self) -> bool:
        done = super().sync_file_system()
        self._tell(f"everything {done}")
        return done


class WatchedDisk(RealDisk):
    """The real disk, and what was synced on it."""

    def __init__(self) -> None:
        self.synced: list[str] = []

    def open(self, path: Path) -> RealFile:
        plain = super().open(path)
        fd, plain._fd = plain._fd, -1
        return WatchedFile(path, fd, self.synced.append)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self.synced.append(f"names {path.name}")

    def usage(self, path: Path) -> Usage:
        return Usage(used=1, available=1 << 40)


def test_data_and_names_are_synced_apart(folder: Path, clock: ManualClock) -> None:
    """MQ-027, MQ-029, MQ-040, SG-041, RD-011: a put costs one fdatasync; a file's name is synced when the file is made."""
    disk = WatchedDisk()
    store, _ = open_store(folder, SETTINGS, clock, disk)
    disk.synced.clear()
    put(store, "t", b"x")
    assert store.queue("t", 0).readable == 0, "at DISK nobody reads what is not synced"
    assert disk.synced == []
    store.sync()
    assert store.queue("t", 0).readable == 1
    assert disk.synced == ["data commitlog/00000000000000000000"]
    disk.synced.clear()
    for _ in range(SEGMENT // 1000):
        put(store, "t", b"x" * 1000)
    made = disk.synced.index("data commitlog/00000000000000016384")
    assert "names commitlog" in disk.synced[made:], "before anything in it counts"
    store.close()


def test_queues_are_synced_for_a_checkpoint_only(folder: Path, clock: ManualClock) -> None:
    """SG-043: those that have changed, each once; a sweep only writes."""
    disk = WatchedDisk()
    store, _ = open_store(folder, SETTINGS, clock, disk)
    for topic in ("a", "b"):
        put(store, topic, b"x")
    disk.synced.clear()
    store.sweep()
    assert (folder / "consumequeue" / "a" / "0" / "00000000000000000000").stat().st_size == 16
    assert [call for call in disk.synced if call.startswith("data")] == []
    disk.synced.clear()
    store.checkpoint()
    queues = [f"{kind} 0{name}" for _ in ("a", "b") for kind, name in (("data", "/00000000000000000000"), ("names", ""))]
    assert [call for call in disk.synced if call in queues] == queues
    assert [disk.synced.count(f"names {name}") for name in ("a", "b", "consumequeue")] == [1, 1, 1]
    disk.synced.clear()
    put(store, "b", b"y")
    store.checkpoint()
    assert disk.synced.count("data 0/00000000000000000000") == 1
    store.close()


def test_messages_are_put_while_many_queues_are_written(clock: ManualClock) -> None:
    """SG-043: a sweep and a checkpoint vouch for what came before they began, and for nothing that came while they rested."""
    rng = random.Random(43)
    disk = FaultyDisk(rng)
    settings = replace(SETTINGS, sync_together=3, slice_ms=0)
    store, _ = open_store(DATA, settings, clock, disk)
    names = ("a", "b", "c", "d")

    def put_more() -> None:
        put(store, "new", b"later")
        put(store, "a", b"later")

    for name in names:
        put(store, name, b"first")
    store.sweep(put_more)
    disk.killed()
    store, recovery = open_store(DATA, settings, clock, disk)
    assert recovery.records == 2 * len(names)
    mark = store.log.end
    store.checkpoint(rest=put_more)
    store.sync()
    assert store.log.end > mark
    store, recovery = open_store(DATA, settings, clock, disk.power_cut(rng))
    assert recovery.walked_from == mark
    rests = recovery.records // 2
    assert [bodies(store, name) for name in names[1:]] == [[b"first"]] * 3
    assert bodies(store, "a") == [b"first"] + [b"later"] * (len(names) + rests)
    assert bodies(store, "new") == [b"later"] * (len(names) + rests)
    store.close()


def test_many_queues_are_synced_with_one_call(folder: Path, clock: ManualClock) -> None:
    """SG-043: thousands of partitions cost a checkpoint no more than a few; where there is no such call, each by itself."""
    disk = WatchedDisk()
    settings = replace(SETTINGS, sync_together=3)
    store, _ = open_store(folder, settings, clock, disk)
    for topic in ("a", "b", "c"):
        put(store, topic, b"x")
    store.sweep()
    disk.synced.clear()
    store.checkpoint()
    assert "everything True" in disk.synced
    assert "data 0/00000000000000000000" not in disk.synced
    disk.synced.clear()
    put(store, "a", b"y")
    store.checkpoint()
    assert "everything True" not in disk.synced
    assert disk.synced.count("data 0/00000000000000000000") == 1
    store.close()


def test_many_queues_without_the_one_call(folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-043: as on other systems than Linux."""
    monkeypatch.setattr("metaq.store.files.disk._syncfs", None)
    disk = WatchedDisk()
    store, _ = open_store(folder, replace(SETTINGS, sync_together=2), clock, disk)
    for topic in ("a", "b"):
        put(store, topic, b"x")
    store.checkpoint()
    assert "everything False" in disk.synced
    assert disk.synced.count("data 0/00000000000000000000") == 2
    assert disk.synced.count("names consumequeue") == 1, "the folders of all topics at once"
    store.close()


def test_what_is_in_memory_is_told_from_what_is_not(folder: Path) -> None:
    """MQ-026, MQ-027, RD-008: a file is mapped for reading only, and read without waiting when it is in the page cache."""
    disk = RealDisk()
    folder.mkdir()
    file: File = disk.open(folder / "file")
    file.write(b"hello" * 1000, 0)
    assert read_cached(file, 5, 0) == b"hello"
    view = file.view()
    assert view.readonly and bytes(view[:5]) == b"hello"
    file.write(b"world", 0)
    assert bytes(view[:5]) == b"world"
    assert file.next_data(0) == 0
    file.allocate(1 << 20)
    assert file.size() == 1 << 20


def test_a_start_does_not_read_what_was_never_written(folder: Path, clock: ManualClock) -> None:
    """F-KILL: room behind the log's end that somebody has read, and the kernel has read ahead, is not taken for data."""
    settings = StoreSettings(segment_bytes=256 << 20)
    store, _ = open_store(folder, settings, clock)
    offset = put(store, "t", bytes(3 << 20))
    store.sync()
    file = store.log.file(store.log.segments[0])
    assert file.view()[offset + (5 << 20)] == 0
    store.close()
    before = bytes_read()
    store, _ = open_store(folder, settings, clock)
    assert bytes_read() - before < 64 << 20
    assert len(bodies(store, "t", 0)) == 1
    store.close()


def bytes_read() -> int:
    """By this process, from files, until now."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_put_is_seen_at_once_in_memory(folder: Path, clock: ManualClock) -> None:
    """SG-042, RD-012, RD-007: the append and its units are one call."""
    settings = StoreSettings(segment_bytes=SEGMENT, durability=Durability.MEMORY)
    store, _ = open_store(folder, settings, clock)
    put(store, "t", b"x", partition=3)
    assert bodies(store, "t", 3) == [b"x"]
    assert list(store.queues) == [TopicPartition("t", 3)]
    store.close()


def test_another_brokers_folder_is_refused(tmp_path: Path) -> None:
    """A folder keeps the name and number of its broker: ids and positions of two brokers are never mixed."""
    store, _ = open_store(tmp_path, StoreSettings(segment_bytes=1024**2, broker_name="a", broker_number=1))
    store.close()
    with pytest.raises(WrongBroker, match="belongs to broker 'a' number 1"):
        open_store(tmp_path, StoreSettings(segment_bytes=1024**2, broker_name="a", broker_number=2))
    again, _ = open_store(tmp_path, StoreSettings(segment_bytes=1024**2, broker_name="a", broker_number=1))
    again.close()


def test_all_parts_of_a_store(folder: Path, clock: ManualClock) -> None:
    """SG-010: messages, queues and index of one log; a flush makes them readable, cleaning takes the old end of all three."""
    settings = replace(SETTINGS, index_slots=7, index_entries=20)
    store, _ = open_store(folder, settings, clock)
    offsets = [put_keyed(store, "t", b"%04d" % number * 250, keys=f"key-{number}") for number in range(60)]
    assert bodies(store, "t") == [] and found_by_key(store, "t", "key-0") == []
    store.sync()
    assert len(bodies(store, "t")) == 60
    assert [found_by_key(store, "t", f"key-{number}") for number in range(60)] == [[offset] for offset in offsets]

    def files() -> list[list[str]]:
        folders = (folder / "commitlog", folder / "consumequeue" / "t" / "0", folder / "index")
        return [sorted(path.name for path in each.iterdir()) for each in folders]

    store.index_keys(run_here)
    store.checkpoint()
    store.checkpoint()
    before = files()
    clock.advance(10)
    assert delete_expired(store).delete
    for old, left in zip(before, files(), strict=True):
        assert left and left == old[-len(left) :] != old
    first, _ = store.first(store.queue("t", 0), read_here)
    assert bodies(store, "t") == [b"%04d" % number * 250 for number in range(first, 60)]
    assert [found_by_key(store, "t", f"key-{number}") for number in range(60)] == [
        [offset] if number >= first else [] for number, offset in enumerate(offsets)
    ]
    store.close()
