"""The benchmark of backlogs: its checks, and its bound on the disk."""

from collections import namedtuple
from pathlib import Path

import pytest

from benchmarks.figures import MeasurementError, Verdict
from benchmarks.suites.backlog import Private, Stage, check_room, checks

Usage = namedtuple("Usage", ["total", "used", "free"])


def test_the_larger_backlog_is_compared_with_the_smaller_one() -> None:
    """SG-007: put rates as shares of an empty broker's in the same rounds, as the machine may be slower in an hour."""
    smaller = Stage(20, rates=[100.0], empty_rates=[100.0], starts=[0.5, 9.0, 0.1], idle=[40.0], private=[30.0])
    larger = Stage(100, rates=[46.0], empty_rates=[50.0], starts=[0.56], idle=[44.0], private=[33.1])
    private = Private()
    private.drift_mb = 1.0
    found = checks([smaller, larger], private)
    assert [check.measured for check in found] == pytest.approx([1.0, 0.92, 0.92, 1.12, 1.1, 33.1 / 30, 1.0])
    verdicts = [check.must_verdict for check in found]
    assert verdicts == [*[Verdict.HELD] * 3, Verdict.MISSED, Verdict.HELD, Verdict.MISSED, Verdict.HELD]
    nothing = checks([Stage(20), Stage(100)], Private())
    assert {check.must_verdict for check in nothing} == {Verdict.NOT_MEASURED}


def test_a_backlog_that_does_not_fit_is_not_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SG-007: a full disk would end the run after many minutes."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(1 << 40, 0, 36 << 30))
    check_room(tmp_path, 100_000_000)
    with pytest.raises(MeasurementError, match="need 47 GiB of disk, and 36 GiB are free"):
        check_room(tmp_path, 160_000_000)
