"""Records at places that the broker has noted: read in the map or from the disk, and only those that are intact."""

import random
from pathlib import Path

import pytest

from metaq.message import TopicPartition
from metaq.store.files.filecache import run_here
from metaq.store.log.noted import MOST_BYTES, TAIL, records_at
from metaq.store.messagestore import MessageStore
from metaq.store.recovery.recovery import open_store
from tests.store.test_store_features import SEGMENT, SETTINGS, put
from tests.support.manualclock import ManualClock

KEY = TopicPartition("t", 1)


def bodies(store: MessageStore, places: list[int]) -> dict[int, bytes]:
    found = records_at(store.log, KEY, places, run_here)
    data = {place: bytes(stored.buffer[stored.at : stored.at + stored.size]) for place, stored in found.items()}
    return {place: record[88 : 88 + int.from_bytes(record[84:88])] for place, record in data.items()}


@pytest.mark.parametrize("is_hot", [True, False])
def test_records_of_many_segments_and_sizes(tmp_path: Path, is_hot: bool) -> None:
    """ES-008: whatever lies between them, and also those that are longer than what is read after a place."""
    store, _ = open_store(tmp_path / "data", SETTINGS, ManualClock())
    rng, sent = random.Random(7), dict[int, bytes]()
    for number in range(60):
        body = b"%d" % number * rng.choice((1, 40, TAIL))
        sent[put(store, "t", body[: SEGMENT // 2], 1)] = body[: SEGMENT // 2]
        put(store, "other", b"x" * rng.randrange(3000))
    if not is_hot:
        store.close()
        store, _ = open_store(tmp_path / "data", SETTINGS, ManualClock())
    places = list(sent)
    rng.shuffle(places)
    assert bodies(store, places[:40]) == {place: sent[place] for place in places[:40]}
    assert len(store.log.segments) > 5
    assert MOST_BYTES > SEGMENT
    store.close()


def test_what_is_no_record_of_the_partition_is_missing(tmp_path: Path) -> None:
    store, _ = open_store(tmp_path / "data", SETTINGS, ManualClock())
    first, other, damaged, last = (put(store, topic, b"body", 1) for topic in ("t", "other", "t", "t"))
    store.close()
    segment = next((tmp_path / "data" / "commitlog").iterdir())
    data = bytearray(segment.read_bytes())
    data[damaged + 90] ^= 1
    segment.write_bytes(data)
    store, _ = open_store(tmp_path / "data", SETTINGS, ManualClock())
    assert bodies(store, [last, damaged, other, first + 1, first, 1 << 40]) == {first: b"body", last: b"body"}
    store.close()
