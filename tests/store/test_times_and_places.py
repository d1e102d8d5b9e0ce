"""Messages found by the time at which they were stored, and by a log offset from a client."""

import random
import zlib
from pathlib import Path
from typing import Final

import pytest

from metaq.message import Durability
from metaq.protocol.record import HEADER_SIZE, constant_middle, host_bytes
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.store.files.disk import File
from metaq.store.files.filecache import read_here, run_here
from metaq.store.messagestore import MessageStore
from metaq.store.recovery.recovery import open_store
from metaq.store.settings import StoreSettings
from tests.support.manualclock import ManualClock

HOST: Final = host_bytes("127.0.0.1", 10911)
SETTINGS: Final = StoreSettings(segment_bytes=16 * 1024, queue_file_bytes=256, hot_bytes=0, durability=Durability.MEMORY)


def put(store: MessageStore, topic: str, body: bytes, partition: int = 0) -> int:
    now_ms = store.clock.now_ms()
    middle = constant_middle(0, now_ms, HOST, now_ms, HOST)
    crc = zlib.crc32(body) & 0x7FFFFFFF
    offset = store.put(store.queue(topic, partition), 0, body, crc, middle, HEADER_SIZE_TEXT + len(body))
    store.append()
    return offset


def damage(store: MessageStore, offset: int) -> None:
    segment = store.log.find(offset)
    assert segment is not None
    store.log.file(segment).write(b"?", offset - segment.base + HEADER_SIZE)


@pytest.mark.parametrize("seed", range(30))
def test_the_ordinal_of_a_time(tmp_path: Path, seed: int) -> None:
    """Code 29 with both boundaries: as in a list, whatever is damaged, equal or aged out."""
    rng = random.Random(seed)
    clock = ManualClock()
    store, _ = open_store(tmp_path, SETTINGS, clock)
    queue = store.queue("t", 0)
    assert store.reader.at_time(queue, clock.now_ms(), read_here) == 0
    assert store.reader.at_time(queue, clock.now_ms(), read_here, upper=True) == 0
    times: list[int | None] = []
    for number in range(rng.choice((1, 2, 20, 60))):
        times.append(clock.now_ms())
        offset = put(store, "t", b"x" * rng.choice((10, 500)))
        put(store, "other", b"")
        clock.advance(rng.choice((0, 0, 0.001, 0.002)))
        if rng.random() < 0.2:
            damage(store, offset)
            times[number] = None
    if rng.random() < 0.5:
        while len(store.log.segments) > 1 and rng.random() < 0.7:
            store.log.remove(store.log.segments[0])
    oldest, _ = store.first(queue, read_here)
    there = [(ordinal, stored) for ordinal, stored in enumerate(times) if stored is not None and ordinal >= oldest]
    for time_ms in range(1_400_000_000_000 - 1, clock.now_ms() + 2):
        later = [ordinal for ordinal, stored in there if stored >= time_ms]
        earlier = [ordinal for ordinal, stored in there if stored <= time_ms]
        lower = store.reader.at_time(queue, time_ms, read_here)
        upper = store.reader.at_time(queue, time_ms, read_here, upper=True)
        assert lower == (later[0] if later else queue.readable), time_ms
        assert upper == (earlier[-1] if earlier else oldest), time_ms
    for ordinal, stored in there:
        assert store.reader.store_time(queue, ordinal, read_here) == stored
    store.close()


def test_a_record_by_any_log_offset(tmp_path: Path) -> None:
    """Only where a readable message begins: not inside a body that looks like a record, not behind what is durable."""
    clock = ManualClock()
    store, _ = open_store(tmp_path, SETTINGS, clock)
    store.queue("t", 0)
    first = put(store, "t", b"first", partition=3)
    whole = store.record_at_offset(first, read_here)
    assert whole is not None
    record = bytearray(whole.buffer[whole.at : whole.at + whole.size])
    # the copy claims the place at which it will stand, as a client that guesses it could
    at = store.log.end + HEADER_SIZE
    record[28:36] = at.to_bytes(8)
    record[-10:-1] = b"0" * 9
    checksum = f"{zlib.crc32(record[:-20]) & 0x7FFFFFFF:010d}"[::-1].encode()
    record[-11:-1] = checksum
    outer = put(store, "t", bytes(record), partition=3)
    assert store.log.record_at(at) is not None
    assert store.record_at_offset(at, read_here) is None
    places = [first, outer]
    places += [put(store, "t", bytes(size), partition=3) for size in (0, 100, 5000, 9000, 300)]
    for offset in range(-5, store.log.segments[-1].end + 5):
        stored = store.record_at_offset(offset, read_here)
        assert (stored is not None) == (offset in places), offset
        assert stored is None or stored.log_offset == offset
    damage(store, places[3])
    store.close()
    store, _ = open_store(tmp_path, SETTINGS, clock)
    assert [store.record_at_offset(offset, read_here) is None for offset in places] == [False] * 3 + [True] + [False] * 3
    store.close()


def test_files_that_are_dropped_while_a_reader_waits(tmp_path: Path) -> None:
    """SG-047: what a search stands on may have aged out when the disk has answered; it ends at what is there."""
    store, _ = open_store(tmp_path, SETTINGS, ManualClock())
    for _ in range(200):
        put(store, "t", b"x" * 400)
    store.sweep()
    queue = store.queue("t", 0)
    dropped: list[int] = []

    def read_late(file: File, size: int, at: int) -> bytes:
        if not dropped:
            while len(store.log.segments) > 1:
                store.log.remove(store.log.segments[0])
            dropped.append(store.reader.oldest(queue, 0, read_here))
            queue.drop_before(dropped[0], run_here)
        return read_here(file, size, at)

    assert store.reader.oldest(queue, 0, read_late) == dropped[0] >= queue.base > 0
    assert [stored is None for stored in store.records(queue, queue.base - 20, 1, read_here)][:20] == [True] * 20
    assert store.first(queue, read_late)[0] == dropped[0]
    store.close()
