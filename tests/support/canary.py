"""A measure of how late a healthy process is on this machine: the only excuse for what takes longer than promised.

A canary is a process beside the test that does what every participant does: over and over, one thread sleeps for a moment, one
writes a few bytes and syncs them, and one computes for a moment. It records from when until when it was late, by the monotonic
clock that all processes share, and where nothing was late, how far it has got::

    timer 8123.504 8123.911     it should have woken at the first, and did at the second
    sync 8123.950 8123.950      until then, all that it has not recorded was in time
    work 8124.031 8124.190      with a processor of its own it would have been done at the first, and was at the second
"""

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container
from pathlib import Path
from typing import Final

from tests.support.broker import wait_until

TIMER: Final = "timer"
SYNC: Final = "sync"
WORK: Final = "work"
BEAT_S: Final = 0.01
SYNC_PAUSE_S: Final = 0.1
WORK_PAUSE_S: Final = 0.5
WORK_S: Final = 0.03
"""Of processor time: several slices of the scheduler, which lets go first who has slept, for one slice. A start of a
broker needs ten times as much."""
BLOCK: Final = bytes(1 << 18)
"""Hashed without Python's lock, which the timer needs."""
LATE_S: Final = {TIMER: 0.02, SYNC: 0.1, WORK: 0.03}
"""From this lateness on; below, it is what every timer, disk and processor is."""
TOLD_S: Final = 0.5
DEADLINE_S: Final = 120.0
MOST_EXCUSED: Final = 0.05
"""Of the cases of a run: on a machine that needs more it proves nothing."""


class Canary(contextlib.ExitStack):
    """The process, from entering the ``with`` block until leaving it. Its files are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._told = folder / "canary"
        self.pid = 0

    def __enter__(self) -> "Canary":
        self._told.touch()
        process = self.enter_context(subprocess.Popen([sys.executable, "-m", "tests.support.canary", str(self._told)]))
        self.callback(process.kill)
        self.pid = process.pid
        wait_until(lambda: len(self._last()) == len(LATE_S), DEADLINE_S, f"the canary lives; see {self._told}")
        return self

    def late_s(self, start: float, end: float, kinds: Container[str] = LATE_S) -> float:
        """For how long, of the time from ``start`` to ``end``, a thread of these kinds was late."""
        wait_until(lambda: min(self._last().values()) >= end, DEADLINE_S, f"the canary tells of that time; see {self._told}")
        total, until = 0.0, start
        for begin, done in sorted((begin, done) for kind, begin, done in self._lines() if kind in kinds):
            if until < done and begin < end:
                total += min(done, end) - max(begin, until)
                until = min(done, end)
        return total

    def _last(self) -> dict[str, float]:
        """Until when each thread has told."""
        return {kind: done for kind, _, done in self._lines()}

    def _lines(self) -> list[tuple[str, float, float]]:
        lines = map(str.split, self._told.read_text().splitlines())
        return [(kind, float(begin), float(done)) for kind, begin, done in lines]


def _beat(kind: str, told: int, wait: Callable[[], float]) -> None:
    """``wait`` returns when it should have been done."""
    before = 0.0
    while True:
        due, done = wait(), time.monotonic()
        late = done - due > LATE_S[kind]
        if late or done - before > TOLD_S:
            os.write(told, f"{kind} {due if late else done:.3f} {done:.3f}\n".encode())
            before = done


def _sleep() -> float:
    due = time.monotonic() + BEAT_S
    time.sleep(BEAT_S)
    return due


def _work() -> float:
    time.sleep(WORK_PAUSE_S)
    start, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < WORK_S:
        hashlib.sha256(BLOCK)
    return start + time.thread_time() - used


def main(told: str) -> None:
    output = os.open(told, os.O_WRONLY | os.O_APPEND)
    file = os.open(f"{told}.synced", os.O_WRONLY | os.O_CREAT)

    def sync() -> float:
        time.sleep(SYNC_PAUSE_S)
        due = time.monotonic()
        os.pwrite(file, bytes(512), 0)
        os.fdatasync(file)
        return due

    threading.Thread(target=_beat, args=(SYNC, output, sync), daemon=True).start()
    threading.Thread(target=_beat, args=(WORK, output, _work), daemon=True).start()
    _beat(TIMER, output, _sleep)


if __name__ == "__main__":
    main(sys.argv[1])
