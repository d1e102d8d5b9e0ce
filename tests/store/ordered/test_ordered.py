"""The ordered index, by both engines: what it returns, where it waits, and whose folder it opens."""

import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from metaq.errors import DirectoryLocked, DiskFull, IndexFailed
from metaq.store.ordered import rocksdb, sqlite
from metaq.store.ordered.engine import DeleteKey, DeleteRange, Operation, SetKey
from metaq.store.ordered.ordered import Covered, EngineName, Ordered, open_ordered, remove_ordered
from tests.store.ordered.writer import ENGINES, enter, entries, open_small
from tests.support.smalldisk import needs_root, small_disk

T = TypeVar("T")
OTHER: Final[dict[EngineName, EngineName]] = {"rocksdict": "sqlite3", "sqlite3": "rocksdict"}
MARKS: Final[dict[EngineName, str]] = {"rocksdict": rocksdb.MARK, "sqlite3": sqlite.MARK}


@pytest.fixture
def index(folder: Path, engine: EngineName) -> Iterator[Ordered]:
    opened, reason = open_small(folder, engine)
    assert reason is None and opened.covered is None
    yield opened
    opened.close()


def reopened(index: Ordered, folder: Path, engine: EngineName) -> Ordered:
    index.close()
    again, reason = open_small(folder, engine)
    assert reason is None
    return again


# -- what it returns --------------------------------------------------------------------------------------------------

KEYS: Final = st.binary(min_size=1, max_size=3).map(lambda rest: b"T" + rest)
VALUES: Final = st.binary(max_size=5)
OPERATIONS: Final = st.one_of(st.builds(SetKey, KEYS, VALUES), st.builds(DeleteKey, KEYS), st.builds(DeleteRange, KEYS, KEYS))
STEPS: Final = st.lists(
    st.one_of(
        st.lists(OPERATIONS, max_size=12),
        st.sampled_from(["reopen", "flush"]),
        st.tuples(st.just("scan"), KEYS, KEYS, st.integers(1, 4)),
        st.tuples(st.just("find"), st.lists(KEYS, max_size=5)),
    ),
    max_size=12,
)
Step = list[Operation] | str | tuple[str, bytes, bytes, int] | tuple[str, list[bytes]]


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=25)
@given(STEPS)
def test_it_is_a_sorted_dictionary(engine: EngineName, steps: list[Step]) -> None:
    """Batches in their order, scans in slices and lookups, with restarts between."""
    model: dict[bytes, bytes] = {}
    applied = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "timerindex"
        index, _ = open_small(folder, engine)
        for step in steps:
            match step:
                case "reopen":
                    index = reopened(index, folder, engine)
                    assert index.covered == (Covered(applied, 1) if applied else None)
                case "flush":
                    index.flush()
                case ("scan", bytes(begin), bytes(end), int(most)):
                    expected = sorted((key, value) for key, value in model.items() if begin <= key < end)
                    assert in_slices(index, begin, end, most) == expected
                case ("find", list(keys)):
                    assert index.find(keys) == [model.get(key) for key in keys]
                case list(operations):
                    applied += 1
                    assert index.apply(operations, Covered(applied, 1))
                    enter(model, operations)
        assert entries(index) == model
        index.close()


def in_slices(index: Ordered, begin: bytes, end: bytes, most: int) -> list[tuple[bytes, bytes]]:
    """Read a range slice by slice; each but the last one is full."""
    found: list[tuple[bytes, bytes]] = []
    with index.scan(begin, end) as scan:
        while True:
            part = scan.next(most)
            assert len(part) <= most
            found += part
            if len(part) < most:
                assert scan.next(most) == []
                return found


def test_a_scan_sees_the_index_as_it_was_when_it_began(index: Ordered) -> None:
    index.apply([SetKey(b"T%d" % digit, b"old") for digit in range(10)], Covered(1, 0))
    with index.scan(b"T", b"U") as scan:
        found = scan.next(3)
        index.apply([DeleteRange(b"T", b"T5"), SetKey(b"T7", b"new"), SetKey(b"T77")], Covered(2, 0))
        index.flush()
        found += scan.next(100)
    assert found == [(b"T%d" % digit, b"old") for digit in range(10)]
    assert sorted(entries(index)) == [b"T5", b"T6", b"T7", b"T77", b"T8", b"T9"]


def test_the_operations_of_a_batch_count_in_their_order(index: Ordered) -> None:
    """ES-006: the last one on a key decides."""
    index.apply(
        [SetKey(b"Ta", b"1"), DeleteRange(b"T", b"U"), SetKey(b"Tb", b"2"), SetKey(b"Tb", b"3"), DeleteKey(b"Ta")],
        Covered(1, 0),
    )
    assert entries(index) == {b"Tb": b"3"}
    index.apply([DeleteKey(b"Tb"), SetKey(b"Tb"), DeleteRange(b"Tb", b"Tb"), DeleteRange(b"U", b"T")], Covered(2, 0))
    assert entries(index) == {b"Tb": b""}
    index.apply([DeleteRange(b"T", b"Tb\0")], Covered(3, 0))
    assert entries(index) == {}


def test_it_says_how_much_of_the_log_it_covers(index: Ordered, folder: Path, engine: EngineName) -> None:
    again = reopened(index, folder, engine)
    assert again.covered is None
    most = Covered(2**63, 2**32 - 1)
    assert again.apply([], most) and again.covered == most
    last = reopened(again, folder, engine)
    assert last.covered == most and entries(last) == {}
    last.close()


def test_its_size_grows_with_what_it_holds(index: Ordered) -> None:
    index.flush()
    empty = index.size_bytes
    rng = random.Random(0)
    for number in range(20):
        put: list[Operation] = [SetKey(b"T" + rng.randbytes(16), rng.randbytes(50)) for _ in range(200)]
        while not index.apply(put, Covered(number, 0)):
            pass
    index.flush()
    assert index.size_bytes > empty + 100_000


# -- where it waits ---------------------------------------------------------------------------------------------------


class Recorder:
    """A ``Run`` that counts what it is asked to run."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, call: Callable[[], T], /) -> T:
        self.calls += 1
        return call()


def test_what_may_wait_for_the_disk_is_given_to_run(index: Ordered, engine: EngineName) -> None:
    """RocksDB writes and scans without waiting; all else, and all that SQLite does, goes to a thread of the pool."""
    run = Recorder()
    index.apply([SetKey(b"Ta")], Covered(1, 0), run)
    scan = index.scan(b"T", b"U", run)
    assert scan.next(1) == [(b"Ta", b"")]
    assert run.calls == {"rocksdict": 0, "sqlite3": 3}[engine]
    run.calls = 0
    index.find([b"Ta"], run)
    index.flush(run)
    assert run.calls == 2
    scan.close()
    index.close(run)
    assert run.calls == 3


def test_files_of_a_scan_are_read_ahead_where_it_may_wait(index: Ordered, engine: EngineName) -> None:
    index.apply([SetKey(b"Ta"), SetKey(b"Tz")], Covered(1, 0))
    index.flush()
    run = Recorder()
    with index.scan(b"Tb", b"Tc", run) as scan:
        assert run.calls == 1, "RocksDB has one file, which overlaps; SQLite opens the scan"
        assert scan.next(1) == []
    run.calls = 0
    with index.scan(b"U", b"V", run):
        assert run.calls == {"rocksdict": 0, "sqlite3": 1}[engine]


def test_a_write_that_would_wait_for_rocksdb_is_refused_whole(folder: Path) -> None:
    """Small write buffers fill faster than they are flushed."""
    index, _ = open_small(folder, "rocksdict")
    rng = random.Random(0)
    applied, refused = 0, 0
    while refused < 20:
        value = rng.randbytes(500)
        puts = [SetKey(b"T%08d" % (applied + 1), value), *(SetKey(b"U%d" % number, value) for number in range(200))]
        if index.apply(puts, Covered(applied + 1, 0)):
            applied += 1
        else:
            refused += 1
            assert index.covered == (Covered(applied, 0) if applied else None)
            assert index.find([b"T%08d" % (applied + 1), b"T%08d" % applied])[0] is None
        assert applied < 20_000, "no write was refused"
    index = reopened(index, folder, "rocksdict")
    assert index.covered == Covered(applied, 0)
    with index.scan(b"T", b"U") as scan:
        assert len(scan.next(applied + 1)) == applied
    index.close()


def test_a_write_that_would_wait_for_sqlite_is_refused_whole(folder: Path) -> None:
    index, _ = open_small(folder, "sqlite3")
    assert index.apply([SetKey(b"Ta")], Covered(1, 0))
    other = sqlite3.connect(folder / sqlite.MARK, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert not index.apply([SetKey(b"Tb")], Covered(2, 0))
    assert index.covered == Covered(1, 0) and index.find([b"Ta", b"Tb"]) == [b"", None]
    other.execute("ROLLBACK")
    other.close()
    assert index.apply([SetKey(b"Tb")], Covered(2, 0))
    assert index.covered == Covered(2, 0) and index.find([b"Ta", b"Tb"]) == [b"", b""]
    index.close()


def test_a_full_disk_is_told_from_damage_by_sqlite(folder: Path) -> None:
    """Nothing of the batch is applied; once there is room, the index goes on."""
    index, _ = open_small(folder, "sqlite3")
    assert isinstance(index._engine, sqlite.SqliteEngine)
    writer = index._engine._writer
    (pages,) = writer.execute("PRAGMA page_count").fetchone()
    writer.execute(f"PRAGMA max_page_count={pages}")
    puts = [SetKey(b"T%d" % number, bytes(1000)) for number in range(100)]
    with pytest.raises(DiskFull, match=f"cannot write to {folder}: database or disk is full; free space"):
        index.apply(puts, Covered(1, 0))
    assert index.covered is None and entries(index) == {}
    writer.execute("PRAGMA max_page_count=1000")
    assert index.apply(puts, Covered(1, 0)) and len(entries(index)) == 100
    index.close()


def test_an_index_of_sqlite_that_a_full_disk_has_no_room_to_open_is_not_removed(folder: Path) -> None:
    """F-13: its files beside the database get no room, as the limit of a file's size has it here."""
    index = open_small(folder, "sqlite3")[0]
    index.apply([SetKey(b"Ta")], Covered(1, 0))
    index.close()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(DiskFull, match=f"cannot open {folder}: disk I/O error; free space"):
            open_ordered(folder, "sqlite3")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again, reason = open_small(folder, "sqlite3")
    assert (reason, again.covered) == (None, Covered(1, 0))
    again.close()


@needs_root
def test_an_index_of_sqlite_is_not_removed_where_no_more_files_can_be_made(tmp_path: Path) -> None:
    """F-13: SQLite says only that it cannot open one."""
    with small_disk(tmp_path / "small", "nr_inodes=5") as disk:
        folder = disk / "index"
        index = open_small(folder, "sqlite3")[0]
        index.apply([SetKey(b"Ta")], Covered(1, 0))
        index.close()
        others = [disk / "a", disk / "b"]
        for other in others:
            other.touch()
        with pytest.raises(DiskFull, match=f"cannot open {folder}: unable to open database file; free space"):
            open_ordered(folder, "sqlite3")
        for other in others:
            other.unlink()
        again, reason = open_small(folder, "sqlite3")
        assert (reason, again.covered) == (None, Covered(1, 0))
        again.close()


def test_the_errors_of_rocksdict_are_told_apart_by_their_texts() -> None:
    """rocksdict raises a plain exception for each of them."""
    for text, kind in (
        ("IO error: No space left on device: While appending to file: /x/000020.sst: No space left on device", DiskFull),
        ("IO error: While lock file: /x/LOCK: Resource temporarily unavailable", DirectoryLocked),
        ("Corruption: block checksum mismatch", IndexFailed),
    ):
        with pytest.raises(kind, match=r"^cannot read /x: "), rocksdb._translated("read", Path("/x")):
            raise Exception(text)


# -- closing, and whose folder it is ----------------------------------------------------------------------------------


def test_closing_twice_is_harmless_and_ends_scans(index: Ordered, folder: Path, engine: EngineName) -> None:
    index.apply([SetKey(b"Ta"), SetKey(b"Tb")], Covered(1, 0))
    scan = index.scan(b"T", b"U")
    assert scan.next(1) == [(b"Ta", b"")]
    index.close()
    index.close()
    assert scan.next(1) == []
    scan.close()
    again, reason = open_small(folder, engine)
    assert reason is None and entries(again) == {b"Ta": b"", b"Tb": b""}
    again.close()


def test_an_index_that_is_open_is_not_opened_again(folder: Path) -> None:
    index, _ = open_small(folder, "rocksdict")
    index.apply([SetKey(b"Ta")], Covered(1, 0))
    with pytest.raises(DirectoryLocked):
        open_small(folder, "rocksdict")
    assert entries(index) == {b"Ta": b""}
    index.close()


def test_an_index_has_the_options_that_it_was_last_opened_with(folder: Path) -> None:
    """rocksdict would go on with those of the first time."""
    for size in (1 << 17, 1 << 18):
        index, _ = open_ordered(folder, "rocksdict", cache_bytes=1 << 20, write_buffer_bytes=size)
        index.close()
        newest = max(folder.glob("OPTIONS-*"))
        assert f"\n  write_buffer_size={size}\n" in newest.read_text()


def test_an_index_of_the_other_engine_is_made_anew(index: Ordered, folder: Path, engine: EngineName) -> None:
    index.apply([SetKey(b"Ta")], Covered(1, 0))
    index.close()
    other = OTHER[engine]
    again, reason = open_small(folder, other)
    assert reason == f"{folder} is no index of {other}: it has no file {MARKS[other]}"
    assert again.covered is None and entries(again) == {}
    assert not (folder / MARKS[engine]).exists()
    again.close()


def test_an_index_of_another_layout_is_made_anew(
    index: Ordered, folder: Path, engine: EngineName, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.apply([SetKey(b"Ta")], Covered(1, 0))
    index.close()
    monkeypatch.setattr("metaq.store.ordered.ordered.LAYOUT_VERSION", 3)
    again, reason = open_small(folder, engine)
    assert reason is not None and reason.startswith(f"{folder} has another layout: ")
    assert again.covered is None and entries(again) == {}
    again.close()


def test_an_index_of_the_first_layout_is_taken_over(folder: Path, engine: EngineName, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is marked at once: an older version, which knows no packs, must not take it back."""
    with monkeypatch.context() as older:
        older.setattr("metaq.store.ordered.ordered.LAYOUT_VERSION", 1)
        first, _ = open_small(folder, engine)
        first.apply([SetKey(b"Ta")], Covered(1, 0))
        first.close()
    again, reason = open_small(folder, engine)
    assert (reason, again.covered, entries(again)) == (None, Covered(1, 0), {b"Ta": b""})
    again.close()
    monkeypatch.setattr("metaq.store.ordered.ordered.LAYOUT_VERSION", 1)
    _, reason = open_small(folder, engine)
    assert reason is not None and "another layout" in reason


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (DeleteKey(b"A:v"), "has entries, but does not say what they are"),
        (SetKey(b"A:x", b"short"), "does not say how much of the log it covers"),
    ],
)
def test_an_index_whose_own_entries_are_wrong_is_made_anew(
    index: Ordered, folder: Path, engine: EngineName, operation: Operation, reason: str
) -> None:
    index.apply([SetKey(b"Ta")], Covered(1, 0))
    index._engine.write([operation])
    index.close()
    again, told = open_small(folder, engine)
    assert told == f"{folder} {reason}"
    assert again.covered is None and entries(again) == {}
    again.close()


def test_a_folder_is_removed_with_what_a_killed_removal_left(index: Ordered, folder: Path, engine: EngineName) -> None:
    index.apply([SetKey(b"Ta")], Covered(1, 0))
    index.close()
    shutil.copytree(folder, folder.with_name("timerindex.removed"))
    remove_ordered(folder)
    assert list(folder.parent.iterdir()) == []
    remove_ordered(folder)
    folder.with_name("timerindex.removed").mkdir()
    again, reason = open_small(folder, engine)
    assert reason is None and again.covered is None
    assert list(folder.parent.iterdir()) == [folder]
    again.close()


def test_a_missing_package_is_named_with_its_extra(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
sys.modules["rocksdict"] = None
from metaq.errors import ConfigError
from metaq.store.ordered.ordered import open_ordered
try:
    open_ordered(Path({str(tmp_path / "timerindex")!r}), "rocksdict")
except ConfigError as error:
    print(error)
index, _ = open_ordered(Path({str(tmp_path / "timerindex")!r}), "sqlite3")
index.close()
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == (
        "the engine rocksdict needs the package rocksdict; pip install 'metaq-broker[timers]', or choose the engine sqlite3\n"
    )


def test_sqlite_needs_no_package(tmp_path: Path) -> None:
    script = f"""
import sys
from pathlib import Path
from metaq.store.ordered.ordered import open_ordered
open_ordered(Path({str(tmp_path / "timerindex")!r}), "sqlite3")[0].close()
assert "rocksdict" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)
