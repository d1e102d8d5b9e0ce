"""What a kill leaves of an ordered index, and what damage does to it, by both engines."""

import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from metaq.errors import IndexFailed
from metaq.store.ordered.engine import SetKey
from metaq.store.ordered.ordered import Covered, EngineName, remove_ordered
from tests.store.ordered.writer import ENGINES, batch, covered, enter, entries, open_small
from tests.support.samples import seed_of_tree

ROOT: Final = Path(__file__).parents[3]
SEED: Final = 7
"""The seed of the batches."""

# -- kills ------------------------------------------------------------------------------------------------------------


def killed_writer(folder: Path, engine: EngineName, rng: random.Random) -> int:
    """Let a process apply batches, kill it, and return the number of the last batch that it has surely applied."""
    command = [sys.executable, "-m", "tests.store.ordered.writer", str(folder), engine, str(SEED)]
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


def test_a_kill_leaves_whole_batches_and_says_which(folder: Path, engine: EngineName) -> None:
    check_kills(folder, engine, 2, seed_of_tree())


@pytest.mark.slow
def test_many_kills_leave_whole_batches_and_say_which(folder: Path, engine: EngineName) -> None:
    check_kills(folder, engine, 20, seed_of_tree())


# -- damage -----------------------------------------------------------------------------------------------------------

BATCHES: Final = 660
"""The last ones of which are not flushed."""


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
        with suppress(IndexFailed):  # as when RocksDB meets damage while it compacts
            index.close()


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
    check_damages(20, seed_of_tree(), engine, tmp_path, originals, models)


@pytest.mark.slow
def test_much_damage_is_noticed_or_does_no_harm(
    tmp_path: Path, engine: EngineName, originals: dict[EngineName, Path], models: list[dict[bytes, bytes]]
) -> None:
    check_damages(200, seed_of_tree() + 1, engine, tmp_path, originals, models)


def test_a_damaged_entry_ends_a_scan_with_an_error(folder: Path, engine: EngineName) -> None:
    """It is not taken for the end; and the index can be made anew while the error is still at hand."""
    index, _ = open_small(folder, engine)
    values = [random.Random(number).randbytes(400) for number in range(100)]  # which no compression changes
    assert index.apply([SetKey(b"T%04d" % number, value) for number, value in enumerate(values)], Covered(1, 0))
    index.close()
    damaged = 0
    for path in folder.iterdir():
        data = path.read_bytes()
        path.write_bytes(data.replace(values[50], values[51]))
        damaged += path.read_bytes() != data
    assert damaged == 1
    index, reason = open_small(folder, engine)
    assert reason is None and index.covered == Covered(1, 0)
    scan = index.scan(b"T", b"U")
    try:
        found = scan.next(10)
        while part := scan.next(10):
            found += part
    except IndexFailed as error:
        index.close()
        remove_ordered(folder)
        again, reason = open_small(folder, engine)
        assert reason is None and again.covered is None
        again.close()
        assert str(folder) in str(error)
    else:
        pytest.fail(f"{len(found)} entries were read")
