"""A replica whose disk is slow: run as a program with the flags of ``metaq serve``. Each sync takes ``SYNC_S`` longer."""

import os
import time
from pathlib import Path
from typing import Final

from metaq.config import Settings
from metaq.server.replicas.replica import ReplicaServer
from metaq.store.files.disk import RealDisk, RealFile
from metaq.store.recovery.progress import Tell
from tests.support.program import serve

SYNC_S: Final = 1.0


class SlowFile(RealFile):
    """A file whose syncs are slow; writes reach the page cache at once, as usual."""

    __slots__ = ()

    def datasync(self) -> None:
        time.sleep(SYNC_S)
        super().datasync()

    def sync_file_system(self) -> bool:
        time.sleep(SYNC_S)
        return super().sync_file_system()


class SlowDisk(RealDisk):
    """The thread that syncs stands still, whichever that is."""

    def open(self, path: Path) -> RealFile:
        return SlowFile(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))

    def sync_directory(self, path: Path) -> None:
        time.sleep(SYNC_S)
        super().sync_directory(path)


def make(settings: Settings, tell: Tell) -> ReplicaServer:
    return ReplicaServer(settings, SlowDisk(), tell)


if __name__ == "__main__":
    serve(make)
