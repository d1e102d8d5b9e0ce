"""The reading of the log that an index has not seen yet goes on after a read that failed, without sockets."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import gevent
import pytest

from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.timers.timers import Timers
from metaq.engine.writing import Draft, stage
from metaq.errors import DiskFailed
from metaq.protocol.properties import UNIQUE_KEY
from metaq.store.files.filecache import run_here
from tests.support.broker import wait_until
from tests.support.inprocess import Parts

T = TypeVar("T")
DEADLINE_S: Final = 30.0
TOPIC: Final = "once"
REASON: Final = "cannot open a segment: too many open files"


class Disk:
    """A way to read that fails for a while."""

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def run(self, call: Callable[[], T]) -> T:
        if self.failures:
            self.failures -= 1
            raise DiskFailed(REASON)
        return call()


def opened(tmp_path: Path) -> Parts:
    return Parts(tmp_path / "data", topics={TOPIC: {"partitions": 1, "dedupe_window_ms": 60_000}})


def said(caplog: pytest.LogCaptureFixture) -> int:
    """How often the log has the reason."""
    return sum(REASON in record.getMessage() for record in caplog.records)


def test_the_ids_of_before_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D-2: they are known once the disk can be asked; until then messages with ids wait."""
    parts = opened(tmp_path)
    stage(parts.context, Draft(TOPIC, 0, b"body", {UNIQUE_KEY: "a"}, 0, 0, 5, bytes(8)))
    parts.store.append()
    disk, timers = Disk(2), Timers(parts.context, parts.turns, run_here)
    dedupe = Dedupe(parts.context, parts.turns, timers.parked_handle, disk.run)
    dedupe.start()

    def has_read() -> bool:
        gevent.sleep(0.001)
        return dedupe.numbers()["dedupe_index"] == "yes"

    wait_until(has_read, DEADLINE_S, "the log is read")
    now_ms = parts.clock.now_ms()
    assert [dedupe.look(TOPIC, ident, now_ms).first is not None for ident in ("a", "b")] == [True, False]
    assert said(caplog) == 1
    dedupe.stop()
    dedupe.close()
    parts.close()


def test_the_timers_of_before_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """T-1: they are delivered once the disk can be asked."""
    parts = opened(tmp_path)
    before = Timers(parts.context, parts.turns, run_here)
    before.park(Draft(TOPIC, 0, b"body", {}, 0, 0, 5, bytes(8)), parts.clock.now_ms() + 1000)
    parts.end_turn()
    before.close()
    parts.close()
    parts = opened(tmp_path)
    timers = Timers(parts.context, parts.turns, Disk(2).run)
    timers.start()

    def has_read() -> bool:
        gevent.sleep(0.001)
        return not timers.is_reading

    wait_until(has_read, DEADLINE_S, "the log is read")
    assert timers.pending == 1
    assert said(caplog) == 1
    timers.stop()
    timers.close()
    parts.close()
