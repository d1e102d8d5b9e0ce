"""SIGKILL in mid-stream: every message that was acknowledged is found by its keys."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from metaq.store.files.filecache import read_here
from metaq.store.recovery.recovery import open_store
from metaq.store.recovery.verify import verify
from tests.store.keyed_writer import SETTINGS

ROOT = Path(__file__).parents[2]
KILLS = 5


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_what_was_acknowledged_is_found_by_key_after_kills(tmp_path: Path, seed: int) -> None:
    """SG-030, RD-107."""
    rng = random.Random(seed)
    folder = tmp_path / "data"
    offsets: dict[int, int] = {}
    for _ in range(KILLS):
        kill_writer(folder, offsets, rng)
        report = verify(folder)
        assert not report.damages
        store, _ = open_store(folder, SETTINGS)
        newest = sorted(offsets)[-500:]
        for number in {*newest, *rng.sample(sorted(offsets), min(500, len(offsets)))}:
            found = [stored.log_offset for stored in store.query("t", f"u{number}", 0, 1 << 62, 64, read_here)]
            assert found == [offsets[number]], number
        shared = [offset for number, offset in sorted(offsets.items()) if number % 1000 == 7]
        found = [stored.log_offset for stored in store.query("t", "k7", 0, 1 << 62, 64, read_here)]
        assert set(shared[-60:]) <= set(found)
        assert store.lock is not None
        store.lock.close()  # and no more, as if this process were killed too


def kill_writer(folder: Path, offsets: dict[int, int], rng: random.Random) -> None:
    """Let a process put some messages, kill it, and take note of what it acknowledged."""
    first = max(offsets, default=-1) + 1000
    command = [sys.executable, "-m", "tests.store.keyed_writer", str(folder), str(first), str(rng.randrange(1000))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(rng.randrange(200, 3000)):
            line = writer.stdout.readline()
            assert line.endswith("\n"), "the writer runs until it is killed"
            number, offset = map(int, line.split())
            offsets[number] = offset
        writer.kill()
        for line in writer.stdout:
            if line.endswith("\n"):
                number, offset = map(int, line.split())
                offsets[number] = offset
