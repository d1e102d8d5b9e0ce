"""A broker that a test can take the room for new files from: run as a program with the flags of ``metaq serve``.

While there is a file ``full`` beside the data folder, no file gets any room.
"""

import os
from pathlib import Path

from metaq.config import Settings
from metaq.errors import DiskFull
from metaq.server.broker import Broker
from metaq.server.replica import Replica
from metaq.store.disk import RealDisk, RealFile
from metaq.store.progress import Tell
from tests.support.program import serve


class CrampedFile(RealFile):
    """A file that gets no room while a test says so."""

    __slots__ = ("_full",)

    def __init__(self, path: Path, fd: int, full: Path) -> None:
        super().__init__(path, fd)
        self._full = full

    def allocate(self, size: int) -> None:
        if self._full.exists():
            raise DiskFull(f"no room for {self._path}: a test says so")
        super().allocate(size)


class CrampedDisk(RealDisk):
    """The real one with such files."""

    def __init__(self, full: Path) -> None:
        self._full = full

    def open(self, path: Path) -> RealFile:
        plain = super().open(path)  # which closes its own descriptor
        return CrampedFile(path, os.dup(plain._fd), self._full)


def make(settings: Settings, tell: Tell) -> Broker | Replica:
    server = Broker if settings.replication_listen == "none" else Replica
    return server(settings, disk=CrampedDisk(settings.data.with_name("full")), tell=tell)


if __name__ == "__main__":
    serve(make)
