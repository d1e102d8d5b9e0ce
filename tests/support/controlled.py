"""A broker whose syncs and clock a test controls: run as a program with the flags of ``metaq serve``.

While there is a file ``stall`` beside the data folder, no sync of a file ends; while there is a file ``fail``, each one fails;
while there is a file ``cold``, nothing that is read is in memory; while there is a file ``slow``, no read of the disk ends,
and each thread that waits for one makes a file ``reading`` with its number.
While there is a file ``hold``, a recovery stops where it reports progress.
A file ``clock`` holds the milliseconds by which the clock is fast.
"""

import os
import threading
import time
from pathlib import Path

from metaq.clock import SystemClock
from metaq.config import Settings
from metaq.errors import DiskFailed
from metaq.server.broker import Broker
from metaq.store.files.disk import RealDisk, RealFile
from metaq.store.recovery.progress import RecoveryStep, Tell
from tests.support.program import serve


class ControlledFile(RealFile):
    """A file whose syncs wait and fail, and whose reads wait, as told."""

    __slots__ = ("_control",)

    def __init__(self, path: Path, fd: int, control: Path) -> None:
        super().__init__(path, fd)
        self._control = control

    def read_cached(self, size: int, offset: int) -> bytes | None:
        return None if (self._control / "cold").exists() else super().read_cached(size, offset)

    def read(self, size: int, offset: int) -> bytes:
        while (self._control / "slow").exists():
            (self._control / f"reading{threading.get_ident()}").touch()
            time.sleep(0.005)
        return super().read(size, offset)

    def datasync(self) -> None:
        while (self._control / "stall").exists():
            time.sleep(0.005)
        if (self._control / "fail").exists():
            raise DiskFailed(f"cannot sync {self._path}: a test says so")
        super().datasync()


class ControlledDisk(RealDisk):
    """The real one with such files."""

    def __init__(self, control: Path) -> None:
        self._control = control

    def open(self, path: Path) -> RealFile:
        plain = super().open(path)  # which closes its own descriptor
        return ControlledFile(path, os.dup(plain._fd), self._control)


class ControlledClock(SystemClock):
    """The machine's, fast or slow by what the file said at the start."""

    def __init__(self, control: Path) -> None:
        file = control / "clock"
        self._fast_ms = int(file.read_text("ascii")) if file.exists() else 0

    def now_ms(self) -> int:
        return super().now_ms() + self._fast_ms


def make(settings: Settings, tell: Tell) -> Broker:
    control = settings.data.parent

    def tell_and_hold(step: RecoveryStep) -> None:
        tell(step)
        while (control / "hold").exists():
            time.sleep(0.005)

    return Broker.alone(settings, ControlledClock(control), ControlledDisk(control), tell=tell_and_hold)


if __name__ == "__main__":
    serve(make)
