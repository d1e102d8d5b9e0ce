"""A broker that a test can take the room on its disk from: run as a program with the flags of ``metaq serve``.

While there is a file ``full`` beside the data folder, no segment gets any room. With ``full to the brim`` in it nothing
does: no file grows, and none is made.
"""

import os
from pathlib import Path
from typing import Final

from metaq.config import Settings
from metaq.errors import DiskFull
from metaq.server.broker import Broker
from metaq.server.replicas.replica import ReplicaServer
from metaq.store.files.disk import MAKE_ROOM, RealDisk, RealFile
from metaq.store.recovery.progress import Tell
from tests.support.program import serve

BRIM: Final = "full to the brim"
BLOCK_BYTES: Final = 512


class CrampedFile(RealFile):
    """A file that gets no room while a test says so."""

    __slots__ = ("_full",)

    def __init__(self, path: Path, fd: int, full: Path) -> None:
        super().__init__(path, fd)
        self._full = full

    def allocate(self, size: int) -> bool:
        if self._full.exists() and size > self._room():
            raise DiskFull(f"no room for {self._path}: a test says so; {MAKE_ROOM}")
        return super().allocate(size)

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        if offset + len(data) > self._room() and is_brimful(self._full):
            raise DiskFull(f"no room for {self._path}: a test says so; {MAKE_ROOM}")
        super().write(data, offset)

    def _room(self) -> int:
        return os.fstat(self._fd).st_blocks * BLOCK_BYTES


class CrampedDisk(RealDisk):
    """The real one with such files."""

    def __init__(self, full: Path) -> None:
        self._full = full

    def open(self, path: Path) -> RealFile:
        if not path.exists() and is_brimful(self._full):
            raise DiskFull(f"no room for {path}: a test says so; {MAKE_ROOM}")
        plain = super().open(path)  # which closes its own descriptor
        return CrampedFile(path, os.dup(plain._fd), self._full)


def is_brimful(full: Path) -> bool:
    return full.exists() and full.read_text("ascii") == BRIM


def make(settings: Settings, tell: Tell) -> Broker | ReplicaServer:
    server = Broker.alone if settings.replication_listen == "none" else ReplicaServer
    return server(settings, disk=CrampedDisk(settings.data.with_name("full")), tell=tell)


if __name__ == "__main__":
    serve(make)
