"""A cache of open files, and the ways in which a caller waits for the disk (``Run``, ``Read``, ``Rest``)."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol, TypeVar

from metaq.errors import ReadFailed
from metaq.store.files.disk import Disk, File

T = TypeVar("T")

SECTOR: Final = 512
"""The least that a disk reads, in bytes."""


class Run(Protocol):
    """A way to run one bare system call: here and now, or in a thread pool while other work goes on."""

    def __call__(self, call: Callable[[], T], /) -> T: ...


Rest = Callable[[], None]
"""A call that lets other work go on, and returns when no message is staged."""

Read = Callable[[File, int, int], bytes]
"""``read(file, size, offset)``: waits for the disk in the caller's way, or raises ``ColdRead``."""


class ColdRead(Exception):
    """The bytes are not in the page cache, and the reader may not wait for the disk."""


def run_here(call: Callable[[], T]) -> T:
    """Make the call here and now: the ``Run`` of tools and tests."""
    return call()


def go_on() -> None:
    """Do nothing: the ``Rest`` of tools and tests, where there is no other work."""


def read_here(file: File, size: int, offset: int) -> bytes:
    """Read, and wait for the disk here: the blocking ``Read``."""
    return file.read(size, offset)


def read_cached(file: File, size: int, offset: int) -> bytes:
    """Read from the page cache: the ``Read`` that never waits. Raises ``ColdRead`` when the bytes are not there."""
    data = file.read_cached(size, offset)
    if data is None:
        raise ColdRead
    return data


def read_through(run: Run) -> Read:
    """Return the ``Read`` that waits for the disk in the way of ``run``."""
    return lambda file, size, offset: run(lambda: file.read(size, offset))


def through_cache(run: Run) -> Read:
    """Return the ``Read`` that looks into the page cache first, and waits for the disk in the way of ``run``."""

    def read(file: File, size: int, offset: int) -> bytes:
        data = file.read_cached(size, offset)
        return run(lambda: file.read(size, offset)) if data is None else data

    return read


def read_around(read: Read, file: File, size: int, offset: int) -> bytes:
    """Read, with zeros in place of the sectors that the disk cannot give: a record that has one of them is not intact.

    A read that fails is made again in halves, down to single sectors.
    """
    try:
        return read(file, size, offset)
    except ReadFailed:
        end = offset + size
        middle = max((offset + end) // 2, offset + SECTOR) // SECTOR * SECTOR
        if middle >= end:
            return bytes(size)
        first = read_around(read, file, middle - offset, offset)
        return first.ljust(middle - offset, b"\0") + read_around(read, file, end - middle, middle)


class FileCache:
    """A cache that keeps at most ``capacity`` files open and closes the least recently used one first.

    Closing means dropping the reference: a reader that still uses the file keeps it open.
    """

    def __init__(self, disk: Disk, capacity: int) -> None:
        self.disk = disk
        self._capacity = capacity
        self._files: OrderedDict[Path, File] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    def open(self, path: Path) -> File:
        """Return the file at ``path``, open; it is created when missing."""
        file = self._files.get(path)
        if file is not None:
            self._files.move_to_end(path)
            return file
        file = self.disk.open(path)
        self._files[path] = file
        if len(self._files) > self._capacity:
            self._files.popitem(last=False)
        return file

    def forget(self, path: Path) -> None:
        """Drop the file at ``path`` from the cache, because it is about to be removed or was replaced."""
        self._files.pop(path, None)

    def clear(self) -> None:
        """Drop all files from the cache."""
        self._files.clear()
