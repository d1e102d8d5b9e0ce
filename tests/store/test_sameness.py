"""A slave proves that its log equals its master's, and copies the parts again that differ."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from metaq.errors import CorruptRecord
from metaq.replication import sameness
from metaq.replication.sameness import MOST_RANGES, are_ranges, first_difference, ranges
from metaq.store.copies.discarding import cut_at_next_opening
from metaq.store.files.filecache import read_here
from metaq.store.log.commitlog import CommitLog
from metaq.store.messagestore import LOG, MessageStore
from metaq.store.recovery.recovery import open_store
from tests.store.test_copying import MASTER, SLAVE, fill, same, send

RANGE: Final = 500


@pytest.fixture(autouse=True)
def short_ranges(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sameness, "RANGE_BYTES", RANGE)
    monkeypatch.setattr(sameness, "AT_ONCE", 333)
    yield


def compared(master: MessageStore, slave: CommitLog, start: int, *damaged: tuple[int, int]) -> int | None:
    proof = ranges(slave, start, read_here)
    assert are_ranges(proof, start, slave.end)
    return first_difference(master.log, start, proof, min(slave.end, master.log.end), damaged, read_here, lambda: None)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_behind_what_is_proved_is_copied_again(tmp_path: Path, seed: int) -> None:
    """F-FAIL: any bytes, zeroed or altered, in logs of several segments; nothing before the range is given up."""
    rng = random.Random(seed)
    master, _ = open_store(tmp_path / "master", MASTER)
    slave, _ = open_store(tmp_path / "slave", SLAVE)
    fill(master, rng, rng.randrange(1, 10))
    send(master, slave, rng)
    slave.sweep()
    slave.checkpoint()
    proved = slave.log.end
    fill(master, rng, rng.randrange(5, 30))
    send(master, slave, rng)
    assert compared(master, slave.log, proved) is None
    slave.sweep()
    slave.release()
    at = rng.randrange(proved, slave.log.end)
    size = min(rng.randrange(1, 1500), slave.log.end - at)
    damage(tmp_path / "slave", at, bytes(size) if rng.random() < 0.7 else rng.randbytes(size))
    slave, recovery = open_store(tmp_path / "slave", SLAVE)
    assert recovery.right_end <= proved
    different = compared(master, slave.log, recovery.right_end)
    if different is not None:
        assert at - RANGE < different < at + size  # bytes may be what they were
        cut_at_next_opening(slave, different, recovery.right_end)
        slave.release()
        slave, recovery = open_store(tmp_path / "slave", SLAVE)
        assert slave.log.end <= different
    assert compared(master, slave.log, recovery.right_end) is None
    send(master, slave, rng)
    same(master, slave)


def damage(folder: Path, at: int, data: bytes) -> None:
    """Write over bytes of a log, file by file."""
    for path in sorted((folder / LOG).iterdir()):
        content, low = bytearray(path.read_bytes()), at - int(path.name)
        for number, byte in enumerate(data):
            if 0 <= low + number < len(content):
                content[low + number] = byte
        path.write_bytes(content)


def test_a_hello_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F-FAIL: ranges grow with what there is to prove, as far as a stranger may have a master read."""
    rng = random.Random(0)
    store, _ = open_store(tmp_path, MASTER)
    fill(store, rng, 60)
    monkeypatch.setattr(sameness, "MOST_RANGES", 5)
    proof = ranges(store.log, 0, read_here)
    assert 1 < len(proof) <= 5
    assert are_ranges(proof, 0, store.log.end)
    monkeypatch.setattr(sameness, "MOST_RANGE_BYTES", RANGE)
    assert not are_ranges(proof, 0, store.log.end)
    with pytest.raises(CorruptRecord, match="empty the data folder"):
        ranges(store.log, 0, read_here)
    assert ranges(store.log, store.log.end, read_here) == []


def test_what_a_master_knows_to_be_damaged_it_does_not_compare(tmp_path: Path) -> None:
    """F-FAIL: what the slave has there may be right."""
    rng = random.Random(0)
    master, _ = open_store(tmp_path / "master", MASTER)
    slave, _ = open_store(tmp_path / "slave", SLAVE)
    fill(master, rng, 30)
    send(master, slave, rng)
    damage(tmp_path / "master", 700, bytes(10))
    assert compared(master, slave.log, 0) == RANGE
    assert compared(master, slave.log, 0, (690, 720)) is None
    assert compared(master, slave.log, 0, (0, 500), (1000, 1500)) == RANGE


@pytest.mark.parametrize(
    "wrong",
    [None, 1, {}, [1], [[1]], [[1, 2, 3]], [["1", 2]], [[True, 2]], [[0, 1]], [[50, 1], [40, 1], [100, 1]], [[99, 1]], []],
)
def test_what_is_no_proof(wrong: Any) -> None:
    """F-FAIL: nothing is read for it."""
    assert not are_ranges(wrong, 0, 100)
    assert are_ranges([[100, 1]], 0, 100)
    assert not are_ranges([[at + 1, 0] for at in range(MOST_RANGES + 1)], 0, MOST_RANGES + 1)
