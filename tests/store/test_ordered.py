"""The ordered index, by both engines: what it returns, what a kill leaves of it, and what damage does to it."""

import random
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

from metaq.errors import DirectoryLocked, IndexFailed
from metaq.store.ordered import rocksdb, sqlite
from metaq.store.ordered.engine import Delete, DeleteRange, Operation, Put
from metaq.store.ordered.ordered import Covered, EngineName, Ordered, remove_ordered
from tests.store.ordered_writer import batch, covered, enter, entries, open_small

ROOT: Final = Path(__file__).parents[2]
T = TypeVar("T")
ENGINES: Final[tuple[EngineName, ...]] = ("rocksdict", "sqlite3")
OTHER: Final[dict[EngineName, EngineName]] = {"rocksdict": "sqlite3", "sqlite3": "rocksdict"}
MARKS: Final[dict[EngineName, str]] = {"rocksdict": rocksdb.MARK, "sqlite3": sqlite.MARK}
SEED: Final = 7


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> EngineName:
    name: EngineName = request.param
    return name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "timerindex"


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


def model_at(number: int, seed: int = SEED) -> dict[bytes, bytes]:
    """Return what all batches up to one come to."""
    model: dict[bytes, bytes] = {}
    for each in range(1, number + 1):
        enter(model, batch(seed, each))
    return model


# -- what it returns --------------------------------------------------------------------------------------------------

KEYS: Final = st.binary(min_size=1, max_size=3).map(lambda rest: b"T" + rest)
VALUES: Final = st.binary(max_size=5)
OPERATIONS: Final = st.one_of(st.builds(Put, KEYS, VALUES), st.builds(Delete, KEYS), st.builds(DeleteRange, KEYS, KEYS))
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
    index.apply([Put(b"T%d" % digit, b"old") for digit in range(10)], Covered(1, 0))
    with index.scan(b"T", b"U") as scan:
        found = scan.next(3)
        index.apply([DeleteRange(b"T", b"T5"), Put(b"T7", b"new"), Put(b"T77")], Covered(2, 0))
        index.flush()
        found += scan.next(100)
    assert found == [(b"T%d" % digit, b"old") for digit in range(10)]
    assert sorted(entries(index)) == [b"T5", b"T6", b"T7", b"T77", b"T8", b"T9"]


def test_the_operations_of_a_batch_count_in_their_order(index: Ordered) -> None:
    index.apply([Put(b"Ta", b"1"), DeleteRange(b"T", b"U"), Put(b"Tb", b"2"), Put(b"Tb", b"3"), Delete(b"Ta")], Covered(1, 0))
    assert entries(index) == {b"Tb": b"3"}
    index.apply([Delete(b"Tb"), Put(b"Tb"), DeleteRange(b"Tb", b"Tb"), DeleteRange(b"U", b"T")], Covered(2, 0))
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
        put: list[Operation] = [Put(b"T" + rng.randbytes(16), rng.randbytes(50)) for _ in range(200)]
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
    index.apply([Put(b"Ta")], Covered(1, 0), run)
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
    index.apply([Put(b"Ta"), Put(b"Tz")], Covered(1, 0))
    index.flush()
    run = Recorder()
    with index.scan(b"Tb", b"Tc", run) as scan:
        assert run.calls == 1, "RocksDB has one file, which overlaps; SQLite opens the scan"
        assert scan.next(1) == []
    run.calls = 0
    with index.scan(b"U", b"V", run):
        assert run.calls == {"rocksdict": 0, "sqlite3": 1}[engine]


def test_a_write_that_would_wait_for_rocksdb_is_refused_whole(folder: Path) -> None:
    """F-22: small write buffers fill faster than they are flushed."""
    index, _ = open_small(folder, "rocksdict")
    rng = random.Random(0)
    applied, refused = 0, 0
    while refused < 20:
        value = rng.randbytes(500)
        puts = [Put(b"T%08d" % (applied + 1), value), *(Put(b"U%d" % number, value) for number in range(200))]
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
    assert index.apply([Put(b"Ta")], Covered(1, 0))
    other = sqlite3.connect(folder / sqlite.MARK, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert not index.apply([Put(b"Tb")], Covered(2, 0))
    assert index.covered == Covered(1, 0) and index.find([b"Ta", b"Tb"]) == [b"", None]
    other.execute("ROLLBACK")
    other.close()
    assert index.apply([Put(b"Tb")], Covered(2, 0))
    assert index.covered == Covered(2, 0) and index.find([b"Ta", b"Tb"]) == [b"", b""]
    index.close()


# -- closing, and whose folder it is ----------------------------------------------------------------------------------


def test_closing_twice_is_harmless_and_ends_scans(index: Ordered, folder: Path, engine: EngineName) -> None:
    index.apply([Put(b"Ta"), Put(b"Tb")], Covered(1, 0))
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
    index.apply([Put(b"Ta")], Covered(1, 0))
    with pytest.raises(DirectoryLocked):
        open_small(folder, "rocksdict")
    assert entries(index) == {b"Ta": b""}
    index.close()


def test_an_index_of_the_other_engine_is_made_anew(index: Ordered, folder: Path, engine: EngineName) -> None:
    index.apply([Put(b"Ta")], Covered(1, 0))
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
    index.apply([Put(b"Ta")], Covered(1, 0))
    index.close()
    monkeypatch.setattr("metaq.store.ordered.ordered.LAYOUT_VERSION", 2)
    again, reason = open_small(folder, engine)
    assert reason is not None and reason.startswith(f"{folder} has another layout: ")
    assert again.covered is None and entries(again) == {}
    again.close()


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (Delete(b"A:v"), "has entries, but does not say what they are"),
        (Put(b"A:x", b"short"), "does not say how much of the log it covers"),
    ],
)
def test_an_index_whose_own_entries_are_wrong_is_made_anew(
    index: Ordered, folder: Path, engine: EngineName, operation: Operation, reason: str
) -> None:
    index.apply([Put(b"Ta")], Covered(1, 0))
    index._engine.write([operation])
    index.close()
    again, told = open_small(folder, engine)
    assert told == f"{folder} {reason}"
    assert again.covered is None and entries(again) == {}
    again.close()


def test_a_folder_is_removed_with_what_a_killed_removal_left(index: Ordered, folder: Path, engine: EngineName) -> None:
    index.apply([Put(b"Ta")], Covered(1, 0))
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


# -- kills ------------------------------------------------------------------------------------------------------------


def killed_writer(folder: Path, engine: EngineName, rng: random.Random) -> int:
    """Let a process apply batches, kill it, and return the number of the last batch that it has surely applied."""
    command = [sys.executable, "-m", "tests.store.ordered_writer", str(folder), engine, str(SEED)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        last = 0
        for _ in range(rng.randrange(20, 1500)):
            line = writer.stdout.readline()
            assert line.endswith("\n"), "the writer runs until it is killed"
            last = int(line)
        writer.kill()
        for line in writer.stdout:
            if line.endswith("\n"):
                last = int(line)
    return last


def check_kills(folder: Path, engine: EngineName, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    model: dict[bytes, bytes] = {}
    done = 0
    for _ in range(kills):
        last = killed_writer(folder, engine, rng)
        index, reason = open_small(folder, engine)
        assert reason is None
        number = 0 if index.covered is None else index.covered.log_offset
        assert number in (last, last + 1) if engine == "sqlite3" else done <= number <= last + 1
        assert index.covered == (covered(SEED, number) if number else None)
        for each in range(done + 1, number + 1):
            enter(model, batch(SEED, each))
        assert entries(index) == model
        done = number
        index.close()


@pytest.mark.parametrize("seed", range(2))
def test_a_kill_leaves_whole_batches_and_says_which(folder: Path, engine: EngineName, seed: int) -> None:
    """I-4."""
    check_kills(folder, engine, 2, seed)


@pytest.mark.slow
def test_many_kills_leave_whole_batches_and_say_which(folder: Path, engine: EngineName) -> None:
    """I-4."""
    check_kills(folder, engine, 20, random.randrange(1 << 30))


# -- damage -----------------------------------------------------------------------------------------------------------

BATCHES: Final = 600


def as_killed(place: Path, engine: EngineName, seed: int = SEED) -> Path:
    """Make an index of several files, and return a copy of its folder as a kill leaves it."""
    index, _ = open_small(place / "timerindex", engine)
    for number in range(1, BATCHES + 1):
        while not index.apply(batch(seed, number), covered(seed, number)):
            pass
        if number % 120 == 0:
            index.flush()
    while True:
        try:
            shutil.copytree(place / "timerindex", place / "killed")
        except shutil.Error:  # RocksDB has removed a file meanwhile
            shutil.rmtree(place / "killed")
        else:
            break
    index.close()
    return place / "killed"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[EngineName, Path]:
    return {engine: as_killed(tmp_path_factory.mktemp(engine), engine) for engine in ENGINES}


@pytest.fixture(scope="module")
def models() -> list[dict[bytes, bytes]]:
    """The entries after each batch."""
    model: dict[bytes, bytes] = {}
    found: list[dict[bytes, bytes]] = [{}]
    for number in range(1, BATCHES + 1):
        enter(model, batch(SEED, number))
        found.append(dict(model))
    return found


def damage(folder: Path, other: Path, rng: random.Random) -> str:
    """Damage one file of an index; return what was done."""
    path = rng.choice(sorted(path for path in folder.iterdir()))
    data = bytearray(path.read_bytes())
    match rng.randrange(5):
        case 0:
            path.unlink()
            return f"{path.name} deleted"
        case 1:
            size = rng.randrange(len(data) + 1)
            path.write_bytes(data[:size])
            return f"{path.name} cut from {len(data)} to {size} bytes"
        case 2 if data:
            flipped = [rng.randrange(len(data) * 8) for _ in range(rng.choice((1, 1, 20)))]
            for bit in flipped:
                data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            return f"{path.name} of {len(data)} bytes: bits {flipped} flipped"
        case 3:
            begin = rng.randrange(len(data) + 1)
            end = min(len(data), begin + rng.choice((1, 100, 4096, 100_000)))
            data[begin:end] = bytes(end - begin)
            path.write_bytes(data)
            return f"{path.name} of {len(data)} bytes: zeros from {begin} to {end}"
        case _:
            others = sorted(each for each in other.iterdir() if each.suffix == path.suffix)
            theirs = next((each for each in others if each.name == path.name), rng.choice(others))
            path.write_bytes(theirs.read_bytes())
            return f"{path.name} is that of another folder, {theirs.name}"


def check_damaged(folder: Path, engine: EngineName, models: list[dict[bytes, bytes]], done: str) -> str:
    """Open a damaged index; what it says must be right, or be said to be damaged. Return what came of it."""
    index, reason = open_small(folder, engine)
    try:
        if reason is not None:
            assert index.covered is None and entries(index) == {}, done
            return "made anew"
        if index.covered is None:
            assert entries(index) == {}, done
            return "empty"
        number = index.covered.log_offset
        if index.covered == covered(SEED + 1, number):
            return "another broker's"
        assert index.covered == covered(SEED, number), done
        keys = sorted(models[-1])
        try:
            found = entries(index)
            values = index.find(keys)
        except IndexFailed:
            return "noticed"
        assert found == models[number], done
        assert values == [models[number].get(key) for key in keys], done
        return "right"
    finally:
        try:
            index.close()
        except IndexFailed:
            assert reason is None
        again, _ = open_small(folder, engine)
        again.close()


def check_damages(
    count: int, seed: int, engine: EngineName, place: Path, originals: dict[EngineName, Path], models: list[dict[bytes, bytes]]
) -> None:
    rng = random.Random(seed)
    (place / "other").mkdir()
    other = as_killed(place / "other", engine, SEED + 1)
    for number in range(count):
        folder = place / f"damaged{number}"
        shutil.copytree(originals[engine], folder)
        done = damage(folder, other, rng)
        check_damaged(folder, engine, models, done)
        shutil.rmtree(folder)


def test_damage_is_noticed_or_does_no_harm(
    tmp_path: Path, engine: EngineName, originals: dict[EngineName, Path], models: list[dict[bytes, bytes]]
) -> None:
    """F-13."""
    check_damages(20, random.randrange(1 << 30), engine, tmp_path, originals, models)
