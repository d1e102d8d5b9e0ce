"""The key index: its bytes on disk, the results of queries, and its behaviour without room or after damage."""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from metaq.errors import DiskFull, Overloaded
from metaq.message import INTERNAL_TOPICS
from metaq.protocol.keys import KEYS, UNIQ_KEY, KeyHasher, key_hash, keys_of
from metaq.protocol.record import encode_properties, host_bytes, java_hash
from metaq.store import query
from metaq.store.figures import StoreFigures
from metaq.store.files.disk import RealDisk, Usage
from metaq.store.files.filecache import ColdRead, FileCache, read_cached, read_here, run_here
from metaq.store.index import indexing
from metaq.store.index.indexfile import HEADER, ITEM, SLOT, Entry, file_size
from metaq.store.index.keyindex import NO_INDEX, KeyIndex
from metaq.store.log.retention import RetentionRules
from metaq.store.messagestore import MessageStore
from metaq.store.recovery.recovery import open_store
from metaq.store.recovery.verify import repair, verify
from metaq.store.settings import StoreSettings
from tests.store.keyed_writer import stage
from tests.support.faultydisk import DATA, FaultyDisk, Stopped
from tests.support.manualclock import ManualClock

HOST: Final = host_bytes("127.0.0.1", 10911)
Waited = TypeVar("Waited")
SETTINGS: Final = StoreSettings(
    segment_bytes=16 * 1024,
    queue_file_bytes=256,
    index_slots=7,
    index_entries=100,
    retention=RetentionRules(ample_free_bytes=0),  # however full the disk is
)
ALWAYS: Final = (0, 1 << 62)


def put(store: MessageStore, topic: str, body: bytes, *, uniq: str = "", keys: str = "", sys_flag: int = 0) -> int:
    """Store one message with keys; returns its log offset."""
    pairs = [(name, value) for name, value in ((KEYS, keys), (UNIQ_KEY, uniq)) if value]
    offset = stage(store, topic, body, pairs, sys_flag=sys_flag)
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
    assert index.enter([(1612, "TopicA", ("k3",), 1_795_257_343_457)]) == 1
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
    put(store, "t", b"", keys="k", sys_flag=12)
    properties = encode_properties([(KEYS, "k")])
    assert keys_of("t", 12, properties) == ()
    assert keys_of("t", 8, properties) == ("k",)
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
    store.indexing.index.drop_before(offsets["u60"], files[3].name, run_here)
    assert index_files(folder) == files[1:]
    assert found(store, "t", "u10") == []
    assert found(store, "t", "u60") == [offsets["u60"]]
    store.indexing.index.drop_before(1 << 60, files[2].name, run_here)
    assert index_files(folder) == files[2:]


def test_a_query_lets_others_go_on(store: MessageStore, clock: ManualClock) -> None:
    """E-05: one that looks at many messages, all of the file's first second, does so where it may wait."""
    for _ in range(400):
        put(store, "t", b"", keys="k")
    store.index_keys()
    store.sync()
    later = (clock.now_ms() + 1, clock.now_ms() + 1)
    with pytest.raises(ColdRead):
        store.query("t", "k", *later, 1, read_cached)
    assert found(store, "t", "k", later) == []
    assert len(store.query("t", "k", *ALWAYS, 64, read_cached)) == 64


def test_an_answer_is_no_longer_than_clients_take(store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """E-05: the newest that fit; the first one always."""
    monkeypatch.setattr(query, "MOST_BYTES", 2500)
    offsets = [put(store, "t", bytes(size), keys="k") for size in (10, 1000, 1000, 3000, 1000, 1000)]
    store.sync()
    assert found(store, "t", "k") == [offsets[5], offsets[4]]
    assert found(store, "t", "k", most=1) == [offsets[5]]
    offsets.append(put(store, "t", bytes(3000), keys="k"))
    store.sync()
    assert found(store, "t", "k") == [offsets[6]]


# -- behind the log ---------------------------------------------------------------------------------------------------


def test_keys_are_entered_behind_the_queue(folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """SG-034: what nobody remembers is read from the log again, whatever lies between the records."""
    monkeypatch.setattr(indexing, "PENDING_MOST", 10)
    monkeypatch.setattr(indexing, "WINDOW", 700)
    store, _ = open_store(folder, SETTINGS, clock)
    offsets = [put(store, "t", bytes(number * 37 % 3000), keys=f"k{number}") for number in range(60)]
    store.sync()
    assert StoreFigures.of(store).index_behind_bytes > 0
    with pytest.raises(ColdRead):
        store.query("t", "k1", *ALWAYS, 1, read_cached)
    damaged = store.log.file(store.log.segments[0])
    damaged.write(b"\xff" * 40, offsets[3] + 2)  # its size too: the next record is found by its magic
    assert [found(store, "t", f"k{number}") for number in range(60)] == [
        [] if number == 3 else [offset] for number, offset in enumerate(offsets)
    ]
    assert StoreFigures.of(store).index_behind_bytes == 0
    store.close()


def test_the_index_keeps_up_with_any_rate(folder: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where more comes in each wait than a slice holds, fewer and fewer messages wait, and the next are entered at once."""
    monkeypatch.setattr(indexing, "SLICE", 4)
    store, _ = open_store(folder, replace(SETTINGS, index_entries=10_000), clock)
    offsets: list[int] = []

    def more(count: int) -> None:
        offsets.extend([put(store, "t", b"", keys=f"k{len(offsets) + number}") for number in range(count)])

    def load(call: Callable[[], Waited]) -> Waited:
        found = call()
        more(6)
        return found

    more(100)
    assert store.indexing.log_offset == offsets[0]  # there is no file yet
    store.index_keys(load)
    assert len(offsets) > 150
    assert store.indexing.log_offset == store.log.end
    more(6)
    assert store.indexing.log_offset == store.log.end
    store.sync()
    assert [found(store, "t", f"k{number}") for number in range(len(offsets))] == [[offset] for offset in offsets]
    store.close()


def test_a_query_does_not_wait_for_a_long_rebuild(store: MessageStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer says that it is too early, not that there is nothing."""
    offset = put(store, "t", b"", keys="k")
    store.sync()
    monkeypatch.setattr(indexing, "WINDOWS_A_QUERY", 0)
    store.indexing.begin_anew()
    with pytest.raises(Overloaded, match="rebuilt"):
        found(store, "t", "k")
    store.index_keys()
    assert found(store, "t", "k") == [offset]


def test_an_orderly_stop_and_other_sizes(folder: Path, clock: ManualClock) -> None:
    """After a stop the files are taken over as they are; with other sizes they are made anew."""
    sizes = SETTINGS
    offsets: list[int] = []
    for slots in (7, 7, 5):
        sizes = replace(sizes, index_slots=slots)
        store, recovery = open_store(folder, sizes, clock)
        assert [found(store, "t", f"k{number}") for number in range(len(offsets))] == [[offset] for offset in offsets]
        offsets += [put(store, "t", b"", keys=f"k{len(offsets) + more}") for more in range(10)]
        store.sync()
        store.index_keys()
        store.close()
        assert bool(recovery.problems) == (slots == 5)
        assert verify(folder).index_items == len(offsets)
    assert not verify(folder).damages
    (path,) = index_files(folder)
    assert path.stat().st_size == file_size(5, 100)


def test_repair_has_the_index_made_anew(folder: Path, clock: ManualClock) -> None:
    store, _ = open_store(folder, SETTINGS, clock)
    offset = put(store, "t", b"", keys="k")
    store.index_keys()
    store.close()
    (path,) = index_files(folder)
    with path.open("r+b") as file:
        file.seek(file_size(7, 1) + 3)
        file.write(b"\x55")
    report = verify(folder)
    assert report.damages[0][:2] == (path, file_size(7, 1))
    assert not repair(folder).damages
    assert index_files(folder) == []
    store, recovery = open_store(folder, SETTINGS, clock)
    assert not recovery.problems
    assert found(store, "t", "k") == [offset]
    store.close()


# -- no room ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk(random.Random(0))


def test_without_room_messages_are_taken_and_found_later(
    disk: FaultyDisk, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index file is made only where the log keeps the room for its next segment; the pause is named."""
    monkeypatch.setattr(indexing, "PENDING_MOST", 10)
    store, _ = open_store(DATA, replace(SETTINGS, retention=RetentionRules(ample_free_bytes=0)), clock, disk)
    disk.room = Usage(used=1 << 30, available=(64 << 20) + store.indexing.index.file_size - 1)
    offsets = [put(store, "t", b"", keys=f"k{number}") for number in range(30)]
    store.sync()
    store.index_keys()
    paused = StoreFigures.of(store).index_paused
    assert paused is not None
    assert "no room" in paused
    assert (found(store, "t", "k1"), found(store, "t", "k29")) == ([], offsets[29:])  # those put last are remembered
    store.checkpoint()
    store.check_writable()
    disk.room = Usage(used=1 << 30, available=disk.room.available + 1)
    store.index_keys()
    assert StoreFigures.of(store).index_paused is None
    assert [found(store, "t", f"k{number}") for number in range(30)] == [[offset] for offset in offsets]


@pytest.mark.parametrize("call", range(1, 8))
def test_a_disk_that_fills_up_at_any_call(disk: FaultyDisk, clock: ManualClock, call: int) -> None:
    """Also where even reserved room is not kept: nothing is refused, and nothing is lost."""
    store, _ = open_store(DATA, SETTINGS, clock, disk)
    offsets = [put(store, "t", b"", keys=f"k{number}") for number in range(30)]
    store.sync()
    store.sweep()
    disk.copy_on_write, disk.full_from, disk.full_for = True, disk.space_calls + call, 3
    for _ in range(4):
        store.index_keys()
        with suppress(DiskFull):
            store.checkpoint()
    disk.full_from = None
    offsets.append(put(store, "t", b"", keys="k30"))
    store.sync()
    store.index_keys()
    assert [found(store, "t", f"k{number}") for number in range(31)] == [[offset] for offset in offsets]
    store.checkpoint()
    disk.killed()
    assert not verify(DATA, disk).damages
    assert verify(DATA, disk).index_items == 31


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_queries_of_damaged_files_end_and_tell_the_truth(folder: Path, clock: ManualClock, seed: int) -> None:
    """Loops, numbers out of range, wrong offsets: nothing but messages with the key is found, and nothing is raised."""
    rng = random.Random(seed)
    store, _ = open_store(folder, SETTINGS, clock)
    offsets = [put(store, "t", rng.randbytes(10), uniq=f"u{number}", keys=f"k{number % 3}") for number in range(40)]
    store.sync()
    store.index_keys()
    store.checkpoint()
    (path,) = index_files(folder)
    with path.open("r+b") as file:
        for _ in range(rng.randrange(1, 40)):
            file.seek(rng.choice((rng.randrange(40, 68), rng.randrange(88, 68 + 81 * 20))))
            file.write(rng.choice((b"\0", b"\xff", b"\0\0\0\x01", rng.randbytes(4))))
    for number in range(3):
        assert set(found(store, "t", f"k{number}")) <= set(offsets[number::3])
    for number, offset in enumerate(offsets):
        assert found(store, "t", f"u{number}") in ([], [offset])
    store.close()


def test_a_broken_chain_is_reported_once(store: MessageStore, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        put(store, "t", b"", keys="k")
    store.sync()
    store.index_keys()
    store.checkpoint()
    (path,) = index_files(folder)
    data = bytearray(path.read_bytes())
    at = file_size(7, 2)
    assert ITEM.unpack_from(data, at)[3] == 1
    data[at + 16 : at + 20] = SLOT.pack(2)  # item 2 leads to itself
    path.write_bytes(data)
    for _ in range(2):
        assert len(found(store, "t", "k")) == 2
    assert StoreFigures.of(store).index_damaged == 2
    assert len([record for record in caplog.records if "index damaged" in record.message]) == 1


# -- against a dictionary ---------------------------------------------------------------------------------------------

WORDS: Final = ("a", "b", "order-7", "0A0000092A9F18B4AAC27F5D3C2A0001", "ключ")


class IndexMachine(RuleBasedStateMachine):
    """Entered, written, flushed, and ended at any moment: each key leads to its records and to no others."""

    @initialize(seed=st.integers(0, 1 << 32))
    def start(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = FaultyDisk(self.rng)
        self.entered: list[Entry] = []
        self.mark, self.durable = NO_INDEX, 0
        self.disk.make_directories(DATA)
        self._open()

    def _open(self) -> None:
        self.index = KeyIndex(DATA / "index", FileCache(self.disk, 2), 3, 12)
        self.index.load(self.mark, {entry[0]: entry[3] for entry in self.entered}.get)
        self.index.open(read_here)
        del self.entered[self.durable :]

    @rule(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=4, unique=True), later_ms=st.integers(-900, 9000))
    def enter(self, words: list[str], later_ms: int) -> None:
        before = self.entered[-1] if self.entered else (-1, "t", (), 1_000_000)
        entry = before[0] + 1, "t", tuple(words), before[3] + later_ms
        while not self.index.enter([entry]):
            assert self.index.grow(0, run_here)
        self.entered.append(entry)

    @rule()
    def write(self) -> None:
        self.index.write(run_here)

    @rule(calls=st.integers(0, 12))
    def flush(self, calls: int) -> None:
        """Perhaps the disk is full at some call of it."""
        self.disk.copy_on_write, self.disk.full_from, self.disk.full_for = True, self.disk.space_calls + calls, 1
        mark, captured, count = self.index.mark(0), self.index.capture(), len(self.entered)
        with suppress(DiskFull):
            self.index.flush(captured, run_here)
            self.mark, self.durable = mark, count
        self.disk.full_from = None

    @rule(calls=st.integers(1, 12), power=st.booleans())
    def end(self, calls: int, power: bool) -> None:
        """In the middle of a flush, or behind it; perhaps once more while opening."""
        self.disk.stop_at = self.disk.calls + calls
        with suppress(Stopped):
            self.flush(0)
            self._open()
        self.disk.stopped, self.disk.stop_at = False, None
        if power:
            self.disk = self.disk.power_cut(self.rng)
        self._open()

    @invariant()
    def each_key_leads_to_its_records(self) -> None:
        for word in WORDS if hasattr(self, "index") else ():
            offsets = [entry[0] for entry in self.entered if word in entry[2]]
            assert list(self.index.find("t", word, -(1 << 62), 1 << 62, read_here)) == offsets[::-1]


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=50, stateful_step_count=30)


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
