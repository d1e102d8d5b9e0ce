"""The key index: its bytes on the disk, what is found through it, and what it does without room or after damage."""

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metaq.clock import ManualClock
from metaq.message import INTERNAL_TOPICS
from metaq.protocol.keys import KEYS, UNIQ_KEY, KeyHasher, key_hash, keys_of
from metaq.protocol.record import constant_middle, encode_properties, host_bytes, java_hash, record_tail
from metaq.protocol.textmessage import HEADER_SIZE_TEXT
from metaq.store.disk import RealDisk
from metaq.store.files import FileCache, read_here, run_here
from metaq.store.keyindex import HEADER, Entry, KeyIndex, file_size
from metaq.store.messagestore import MessageStore, StoreSettings
from metaq.store.recovery import open_store

HOST: Final = host_bytes("127.0.0.1", 10911)
SETTINGS: Final = StoreSettings(segment_bytes=16 * 1024, queue_file_bytes=256, index_slots=7, index_entries=100)
ALWAYS: Final = (0, 1 << 62)


def put(store: MessageStore, topic: str, body: bytes, *, uniq: str = "", keys: str = "", sys_flag: int = 0) -> int:
    """Store one message with keys; returns its log offset."""
    now_ms = store.clock.now_ms()
    pairs = [(name, value) for name, value in ((KEYS, keys), (UNIQ_KEY, uniq)) if value]
    properties = encode_properties(pairs)
    middle = constant_middle(sys_flag, now_ms, HOST, now_ms, HOST)
    offset = store.put(
        *(store.queue(topic, 0), 0, body, zlib.crc32(body) & 0x7FFFFFFF, middle, HEADER_SIZE_TEXT + len(body)),
        record_tail(topic, properties),
        keys=keys_of(topic, sys_flag, properties),
    )
    store.append()
    return offset


def found(store: MessageStore, topic: str, key: str, times: tuple[int, int] = ALWAYS, most: int = 64) -> list[int]:
    """Log offsets of the messages that a query finds."""
    return [stored.log_offset for stored in store.query(topic, key, *times, most, read_here)]


def index_files(folder: Path) -> list[Path]:
    return sorted((folder / "index").glob("*"))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_795_257_343_457)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def store(folder: Path, clock: ManualClock) -> Iterator[MessageStore]:
    opened, _ = open_store(folder, SETTINGS, clock)
    yield opened
    opened.close()


# -- bytes ------------------------------------------------------------------------------------------------------------


def test_golden_header_slot_and_item(tmp_path: Path) -> None:
    """G22, G23; SG-031, SG-032, SG-033, RD-003: bytes as they stand in a file of RocketMQ 4.9.8."""
    slots = 5_000_000
    index = KeyIndex(tmp_path, FileCache(RealDisk(), 4), slots, 100)
    assert index.grow(1_795_257_343_457, run_here)
    assert index.enter([Entry(1612, "TopicA", ("k3",), 1_795_257_343_457)]) == 1
    index.flush(index.capture(), run_here)
    (path,) = tmp_path.glob("*")
    assert path.name == "20261121103543457"
    data = path.read_bytes()
    header = "000001a1fdad1de1000001a1fdad1de1000000000000064c000000000000064c0000000100000002"
    assert data[:40].hex() == header
    assert key_hash("TopicA", "k3") == 1_903_240_647
    assert data[12_962_628 : 12_962_628 + 4].hex() == "00000001"
    assert data[20_000_060 : 20_000_060 + 20].hex() == "717125c7000000000000064c0000000000000000"
    assert data.count(0) > len(data) - 60
    assert file_size(slots, 20_000_000) == 420_000_040


# -- what is found ----------------------------------------------------------------------------------------------------


def test_messages_are_found_by_key_and_time(store: MessageStore, clock: ManualClock, folder: Path) -> None:
    """SG-030, RD-003, RD-107: newest first, by unique key and by each word of KEYS, in the topic and the time asked for."""
    put(store, "orders", b"no key")
    store.index_keys()
    assert index_files(folder) == []
    times, offsets = [], []
    for number in range(5):
        times.append(clock.now_ms())
        offsets.append(put(store, "orders", b"%d" % number, uniq=f"U{number}", keys=f"paid  o{number}"))
        clock.advance(0.7)
    other = put(store, "other", b"", keys="paid")
    store.sync()
    for entered in (False, True):
        assert found(store, "orders", "paid") == offsets[::-1]
        assert found(store, "orders", "paid", most=2) == offsets[:2:-1]
        assert found(store, "orders", "U3") == found(store, "orders", "o3") == [offsets[3]]
        assert found(store, "other", "paid") == [other]
        assert found(store, "orders", "") == found(store, "orders", "paid  o3") == found(store, "orders", "U9") == []
        for first in range(5):
            for last in range(first, 5):
                assert found(store, "orders", "paid", (times[first], times[last])) == offsets[first : last + 1][::-1]
        assert found(store, "orders", "paid", (times[2] + 1, times[3] - 1)) == []
        if not entered:
            assert index_files(folder) == []
            store.index_keys()
    assert len(index_files(folder)) == 1
    assert index_files(folder)[0].stat().st_size == 40 + 7 * 4 + 100 * 20


def test_an_answer_has_at_most_64_messages(store: MessageStore) -> None:
    offsets = [put(store, "t", b"", keys="k") for _ in range(70)]
    store.sync()
    assert found(store, "t", "k", most=1000) == offsets[:5:-1]


def test_readers_find_only_what_they_may_see(store: MessageStore) -> None:
    """At level disk a message is found when it is synced."""
    offset = put(store, "t", b"", keys="k")
    store.index_keys()
    assert found(store, "t", "k") == []
    assert store.record_at_offset(offset, read_here) is None
    store.sync()
    assert found(store, "t", "k") == [offset]


def test_what_has_no_keys_of_its_own(store: MessageStore, folder: Path) -> None:
    """Rolled back messages and topics of the broker itself are not indexed, live or walked."""
    for topic in sorted(INTERNAL_TOPICS):
        put(store, topic, b"", keys="k", uniq="u")
    properties = encode_properties([(KEYS, "k")])
    assert keys_of("t", 12, properties) == ()
    assert keys_of("t", 8, properties) == ("k",)
    now_ms = store.clock.now_ms()
    rolled_back = constant_middle(12, now_ms, HOST, now_ms, HOST)
    store.put(store.queue("t", 0), 0, b"", 0, rolled_back, HEADER_SIZE_TEXT, record_tail("t", properties), keys=("k",))
    store.append()
    store.index_keys()
    store.indexing.begin_anew()
    store.index_keys()
    assert index_files(folder) == []


def test_each_key_is_entered_once() -> None:
    """UNIQ_KEY first, then every part of KEYS that is not empty."""
    pairs = [(KEYS, " a b  a u c "), ("OTHER", "KEYS"), (UNIQ_KEY, "u")]
    assert keys_of("t", 0, encode_properties(pairs)) == ("u", "a", "b", "c")
    assert keys_of("t", 0, encode_properties([(KEYS, " ")])) == ()
    assert keys_of("t", 0, encode_properties([("MY_KEYS", "a")])) == ()


def test_files_roll_when_full(store: MessageStore, folder: Path, clock: ManualClock) -> None:
    """SG-033: a new file, with a later name even when the clock goes back; what has aged out goes with its file."""
    offsets = {}
    for number in range(150):
        clock.jump(-1000)
        offsets[f"u{number}"] = put(store, "t", b"", uniq=f"u{number}", keys="k")
    store.sync()
    store.index_keys()
    files = index_files(folder)
    assert len(files) == 4  # 49 messages of two keys each: number 0 is not used
    assert [found(store, "t", key) for key in offsets] == [[offset] for offset in offsets.values()]
    assert found(store, "t", "k") == list(offsets.values())[: -64 - 1 : -1]
    assert [HEADER.unpack_from(path.read_bytes())[5] for path in files[:3]] == [0, 0, 0]
    store.checkpoint()
    assert [HEADER.unpack_from(path.read_bytes())[5] for path in files] == [99, 99, 99, 7]
    store.indexing.index.drop_before(offsets["u60"], run_here)
    assert index_files(folder) == files[1:]
    assert found(store, "t", "u10") == []
    assert found(store, "t", "u60") == [offsets["u60"]]
    store.indexing.index.drop_before(1 << 60, run_here)
    assert index_files(folder) == files[3:]


# -- hashes -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["t", "TopicA"]), st.text(max_size=300)), max_size=20))
def test_hashes_put_together_are_hashes(pairs: list[tuple[str, str]]) -> None:
    hasher = KeyHasher()
    for topic, key in pairs:
        assert hasher.hash(topic, key) == key_hash(topic, key)
        assert hasher.hash(topic, f"0A0000092A9F18B4AAC2{key}") == key_hash(topic, f"0A0000092A9F18B4AAC2{key}")


def test_the_hash_without_absolute_value() -> None:
    """A text with Java's hash −2³¹ is entered under 0."""
    text = "t#qolyi7H"
    assert java_hash(text) == -(1 << 31)
    assert key_hash("t", text[2:]) == KeyHasher().hash("t", text[2:]) == 0
