"""Runs of records that are read from the file and verified, many at once."""

import random
import zlib
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.protocol.record import add_closed, checksum_property
from metaq.store.files.filecache import read_here
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import UNIT
from metaq.store.recovery.recovery import open_store
from tests.store.test_store_features import SETTINGS, put
from tests.support.faultydisk import DATA, FaultyDisk
from tests.support.manualclock import ManualClock

COUNT: Final = 120
TOPICS: Final = ("t", "others")
Seen = list[tuple[int, bytes]]


@pytest.fixture
def store() -> MessageStore:
    """Return a store of some segments, in which two partitions alternate, sometimes far from each other."""
    opened, _ = open_store(DATA, SETTINGS, ManualClock(), FaultyDisk(random.Random(1)))
    chosen = random.Random(2)
    for _ in range(COUNT):
        put(opened, "t", chosen.randbytes(chosen.choice([0, 10, 300, 2000])))
        for _ in range(chosen.choice([0, 0, 1, 12])):
            put(opened, "others", bytes(1500))
    opened.sync()
    assert len(opened.log.segments) > 3
    return opened


def checked(store: MessageStore, topic: str, most: int, most_bytes: int) -> tuple[Seen, list[int]]:
    """Return all records that runs bring, by log offset, and the ordinals where there was none."""
    queue = store.queue(topic, 0)
    ordinal, seen, missing = 0, Seen(), list[int]()
    while ordinal < queue.readable:
        run = store.reader.checked_run(queue, ordinal, most, most_bytes, read_here)
        if run is None:
            missing.append(ordinal)
            ordinal += 1
            continue
        units = list(UNIT.iter_unpack(run.units))
        assert 0 < len(units) <= most
        seen += [(offset, bytes(run.view[offset - run.base : offset - run.base + size])) for offset, size, _ in units]
        ordinal += len(units)
    return seen, missing


def one_by_one(store: MessageStore, topic: str) -> tuple[Seen, list[int]]:
    """Return the same by ``records``."""
    queue = store.queue(topic, 0)
    found = list(store.records(queue, 0, 1 << 20, read_here))
    seen = [(each.log_offset, bytes(each.buffer[each.at : each.at + each.size])) for each in found if each]
    return seen, [ordinal for ordinal, each in enumerate(found) if each is None]


@pytest.mark.parametrize(("most", "most_bytes"), [(1, 1), (7, 1 << 20), (COUNT, 3000), (1000, 1 << 20)])
def test_runs_bring_what_records_bring(store: MessageStore, most: int, most_bytes: int) -> None:
    """SG-043, SG-044: of a partition with others in between, in segments of which records are larger and smaller."""
    for topic in TOPICS:
        assert checked(store, topic, most, most_bytes) == one_by_one(store, topic)
    assert store.reader.damaged == 0


@pytest.mark.parametrize("number", range(40))
def test_a_run_ends_before_a_damaged_record(store: MessageStore, number: int) -> None:
    """SG-018, F-FLIP: whichever bit of it was flipped; it is reported, and the messages around it are read."""
    store.log._hot_bytes = 0
    chosen = random.Random(number)
    queue = store.queue("t", 0)
    hit = chosen.randrange(queue.readable)
    offset, size, _ = queue.unit(hit, read_here)
    segment = store.log.find(offset)
    assert segment is not None
    file, at = store.log.file(segment), offset - segment.base + chosen.randrange(size)
    file.write(bytes([file.read(1, at)[0] ^ 1 << chosen.randrange(8)]), at)
    seen, missing = checked(store, "t", COUNT, 1 << 20)
    assert (missing, store.reader.damaged) == ([hit], 1)
    assert (seen, missing) == one_by_one(store, "t")


def test_a_record_of_another_message_is_none_of_a_run(store: MessageStore) -> None:
    """MQ-031: intact, but of another partition, or another message of this one."""
    store.log._hot_bytes = 0
    queue, others = store.queue("t", 0), store.queue("others", 0)
    store.sweep()
    for ordinal, leads_to in ((10, queue.unit(11, read_here)), (20, others.unit(3, read_here))):
        name = max(int(name) for name in store.disk.list_directory(queue.directory) if int(name) <= ordinal * 16)
        store.disk.open(queue.directory / f"{name:020}").write(UNIT.pack(*leads_to), ordinal * 16 - name)
    seen, missing = checked(store, "t", COUNT, 1 << 20)
    assert missing == [10, 20]
    assert (seen, missing) == one_by_one(store, "t")


@given(st.lists(st.binary(max_size=50) | st.sampled_from([4096, 4097, 70_000]).map(bytes), max_size=12))
def test_records_are_closed_together_as_each_alone(records: list[bytes]) -> None:
    """SG-018: small and large ones, with checksums of up to ten digits."""
    parts = [b"before"]
    add_closed(records, parts)
    assert b"".join(parts) == b"before" + b"".join([record + checksum_property(record) for record in records])


@given(st.binary(max_size=300))
def test_the_digits_of_a_checksum(data: bytes) -> None:
    """SG-018: ten of them, the least significant first."""
    digits = f"{zlib.crc32(data) & 0x7FFFFFFF:010}"[::-1]
    assert checksum_property(data) == f"__CRC32#\x01{digits}\x02".encode()
