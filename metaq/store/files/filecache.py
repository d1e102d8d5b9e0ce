"""Open files, a bounded number of them."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from metaq.store.files.disk import Disk, File

T = TypeVar("T")


class Run(Protocol):
    """Runs one bare system call where the caller wants it: here and now, or in a thread pool while others go on."""

    def __call__(self, call: Callable[[], T], /) -> T: ...


Rest = Callable[[], None]
"""Lets others go on; comes back when no message is staged."""

Read = Callable[[File, int, int], bytes]
"""``read(file, size, offset)``: waits for the disk in the caller's way, or raises ``ColdRead``."""


class ColdRead(Exception):
    """The bytes are not in the page cache, and this reader may not wait."""


def run_here(call: Callable[[], T]) -> T:
    """The ``Run`` of tools and tests."""
    return call()


def go_on() -> None:
    """The ``Rest`` of tools and tests: nobody else is there."""


def read_here(file: File, size: int, offset: int) -> bytes:
    """The ``Read`` that waits."""
    return file.read(size, offset)


def read_cached(file: File, size: int, offset: int) -> bytes:
    """The ``Read`` that never waits."""
    data = file.read_cached(size, offset)
    if data is None:
        raise ColdRead
    return data


def read_through(run: Run) -> Read:
    """The ``Read`` that waits where ``run`` does."""
    return lambda file, size, offset: run(lambda: file.read(size, offset))


class FileCache:
    """At most ``capacity`` files kept open, the least recently used closed first.

    Closing is only dropping the reference: whoever still reads the file keeps it open.
    """

    def __init__(self, disk: Disk, capacity: int) -> None:
        self.disk = disk
        self._capacity = capacity
        self._files: OrderedDict[Path, File] = OrderedDict()

    def __len__(self) -> int:
        return len(self._files)

    def open(self, path: Path) -> File:
        """The file at ``path``, created when missing."""
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
        """Drop the file at ``path``, which is about to be removed or was replaced."""
        self._files.pop(path, None)

    def clear(self) -> None:
        """Drop all."""
        self._files.clear()
