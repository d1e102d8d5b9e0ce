"""The canary excuses lateness only by what it measured in that very time, and not too often."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.cluster.life import EXCUSED
from tests.cluster.lives import check_excused
from tests.crash.command import Violation
from tests.support.broker import wait_until
from tests.support.canary import WORK, Canary

STOPPED_S: Final = 0.5
COMPUTING_S: Final = 20.0
COMPUTE: Final = "import time; begin = time.monotonic()\nwhile time.monotonic() - begin <"


def test_a_canary_tells_when_it_was_late(tmp_path: Path) -> None:
    """Its lateness is that within the time asked for, and no more."""
    with Canary(tmp_path) as canary:
        before = time.monotonic()
        os.kill(canary.pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(canary.pid, signal.SIGCONT)
        middle, after = before + STOPPED_S / 2, time.monotonic()
        assert STOPPED_S / 2 < canary.late_s(before, after) <= after - before
        assert canary.late_s(before, middle) <= STOPPED_S / 2 + 0.001
        assert canary.late_s(before, before) == 0


def test_a_canary_feels_that_others_compute(tmp_path: Path) -> None:
    """Its timer may still be in time: who has slept goes first, but who computes waits for the others."""
    others = len(os.sched_getaffinity(0)) * 6
    with contextlib.ExitStack() as stack:
        canary = stack.enter_context(Canary(tmp_path))
        before = time.monotonic()
        for _ in range(others):
            stack.callback(stack.enter_context(subprocess.Popen([sys.executable, "-c", f"{COMPUTE} {COMPUTING_S}: pass"])).kill)
        wait_until(lambda: canary.late_s(before, time.monotonic(), (WORK,)) > 0, COMPUTING_S, "it was late")


def test_too_many_excuses_fail_a_run() -> None:
    """5 % of the cases are not too many."""
    check_excused(Counter({"faults": 100, EXCUSED: 5}), "faults")
    with pytest.raises(Violation, match="late too often"):
        check_excused(Counter({"faults": 100, EXCUSED: 6}), "faults")
