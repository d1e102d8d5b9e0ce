"""Lives that run at the same time end together, and fail together."""

import contextlib
import time
from pathlib import Path

import pytest

from tests.cluster.life import Campaign, Fault, Life
from tests.cluster.lives import run_lives
from tests.crash.command import expect
from tests.crash.driver import CaseFailed

pytestmark = pytest.mark.partner("java")

FAILS = 1


class Doomed(Life):
    """One of them has seen what must not be; the others would go on for long."""

    def __init__(self, seed: int, folder: Path, zookeeper: str, campaign: Campaign | None = None) -> None:
        super().__init__(seed, folder, zookeeper, campaign)
        self.seed = seed

    def faults(self) -> dict[Fault, int]:
        return {self.look: 1}

    def look(self) -> float:
        expect(self.seed != FAILS, "this is not the one that fails")
        self.pass_time(50.0)
        return time.monotonic()


def running_in(folder: Path) -> list[str]:
    """Return what processes have open in a folder, or name in their command lines."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # ended meanwhile, or nothing of ours
            names = [str(path.readlink()) for path in (process / "fd").iterdir()]
            names.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
            found += [f"{process.name}: {name}" for name in names if str(folder) in name]
    return found


@pytest.mark.slow
def test_a_failure_names_its_seed_and_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F-FAIL: nothing of the others is left, and everything of the one that failed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(CaseFailed, match=f"this is not the one that fails.*\n.*\n.*--seed {FAILS} ") as failure:
        run_lives(Doomed, "doomed", "look", seed=FAILS - 1, count=100, rounds=100, at_once=2)
    assert "in look" in str(failure.value)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(f"metaq-doomed-{FAILS}-") and (left / "replica1").is_dir()
    assert running_in(tmp_path) == []
