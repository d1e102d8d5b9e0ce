"""The key index: all hash files of a data folder (``indexfile``), searched from the newest to the oldest."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from metaq.errors import CorruptRecord, ReadFailed
from metaq.protocol.keys import KeyHasher, key_hash
from metaq.store.files.filecache import FileCache, Read, Run, read_here
from metaq.store.index.indexfile import Captured, Entry, IndexFile, created_ms, file_name, file_size

logger = logging.getLogger(__name__)

STEPS_A_QUERY: Final = 16_384
"""Items that one query looks at, about 30 ms. An older message after that many items is not found."""


class IndexMark(NamedTuple):
    """A position up to which the index is durable."""

    file: str
    """Name of the newest file; empty when there is none."""
    items: int
    """The number of the next item in it."""
    log_offset: int
    """All records before this log offset are entered."""
    slots: int
    entries: int


NO_INDEX: Final = IndexMark("", 0, 0, 0, 0)


class KeyIndex:
    """The index files of a data folder, oldest first; records are entered into the newest. There is one writer."""

    def __init__(self, directory: Path, files: FileCache, slots: int, entries: int) -> None:
        self.directory = directory
        self.slots = slots
        self.entries = entries
        self.damaged = 0
        """Broken chains that queries found, and places that could not be read."""
        self._files = files
        self._hasher = KeyHasher()
        self._reported = False
        self._growing = False
        self.files: list[IndexFile] = []

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, mark: IndexMark, store_ms: Callable[[int], int | None]) -> None:
        """Open the index as the checkpoint counts it; newer files are deleted. ``store_ms``: see ``IndexFile.take_back``.

        Raises ``CorruptRecord`` when the files do not match the checkpoint; then the whole index has to be rebuilt.
        """
        if mark.file and (mark.slots, mark.entries) != (self.slots, self.entries):
            raise CorruptRecord(f"{self.directory} was made with {mark.slots} slots and {mark.entries} entries a file")
        names = self._names()
        for name in names:
            if name > mark.file:
                self._files.disk.unlink(self.directory / name)
        if names:
            self._files.disk.sync_directory(self.directory)  # otherwise a power cut could bring them back
        if mark.file and mark.file not in names:
            raise CorruptRecord(f"{self.directory / mark.file} is missing")
        self.files = [self._file(name) for name in names if name <= mark.file]
        for file in self.files:
            file.read_header()
        if self.files:
            self.files[-1].take_back(mark.items, store_ms)

    def clear(self) -> None:
        """Delete all files."""
        self.files.clear()
        names = self._names()
        for name in names:
            self._files.forget(self.directory / name)
            self._files.disk.unlink(self.directory / name)
        if names:
            self._files.disk.sync_directory(self.directory)

    def _names(self) -> list[str]:
        return [name for name in self._files.disk.list_directory(self.directory) if created_ms(name) is not None]

    def _file(self, name: str) -> IndexFile:
        return IndexFile(self.directory / name, self._files, self.slots, self.entries)

    # -- entering -----------------------------------------------------------------------------------------------------

    @property
    def file_size(self) -> int:
        """The size of each index file in bytes."""
        return file_size(self.slots, self.entries)

    def grow(self, now_ms: int, run: Run) -> bool:
        """Begin a new file; return false when another call is doing so. Raises ``DiskFull`` or ``DiskFailed``."""
        if self._growing:
            return False
        self._growing = True
        try:
            disk = self._files.disk
            disk.make_directories(self.directory)
            if self.files:  # names must rise, and the clock may have gone back
                now_ms = max(now_ms, 1 + (created_ms(self.files[-1].path.name) or 0))
            file = self._file(file_name(now_ms))
            try:
                opened = self._files.open(file.path)
                run(lambda: opened.allocate(file.size))
            except BaseException:
                self._files.forget(file.path)
                disk.unlink(file.path)
                raise
            file.load_slots(read_here)
            if self.files:
                self.files[-1].seal()
            self.files.append(file)
            return True
        finally:
            self._growing = False

    def open(self, read: Read) -> None:
        """Prepare the newest file, if there is one, so that records can be entered into it.

        One whose slots cannot be read is sealed: a new one has to be begun.
        """
        if self.files:
            newest = self.files[-1]
            try:
                newest.load_slots(read)
            except ReadFailed:
                self._report(newest, 0)
                newest.seal()

    @property
    def is_open(self) -> bool:
        """True while there is a file into which records can be entered."""
        return bool(self.files) and self.files[-1].is_open

    def enter(self, entries: Sequence[Entry]) -> int:
        """Add the keys of records, in the order of the log; return how many records found room in the newest file."""
        return self.files[-1].enter(entries, self._hasher) if self.is_open else 0

    def write(self, run: Run) -> None:
        """Write the items that were entered. On ``DiskFull`` or ``DiskFailed`` they stay in memory."""
        for file in self.files[-2:]:
            file.write(run)

    # -- making it durable --------------------------------------------------------------------------------------------

    def mark(self, log_offset: int) -> IndexMark:
        """Return the mark that a flush beginning now would make durable, when all before ``log_offset`` is entered."""
        if not self.files:
            return NO_INDEX._replace(log_offset=log_offset)
        newest = self.files[-1]
        return IndexMark(newest.path.name, newest.count, log_offset, self.slots, self.entries)

    def capture(self) -> list[Captured]:
        """Return the state of all files that are not durable as they are, for ``flush``."""
        return [file.capture() for file in self.files if file.changed]

    def flush(self, captured: list[Captured], run: Run) -> None:
        """Make the captured states durable. One call at a time. Raises ``DiskFull`` or ``DiskFailed``."""
        if any(each.file.is_new for each in captured):
            run(lambda: self._files.disk.sync_directory(self.directory))
        for each in captured:
            if not each.file.gone:  # retention may have deleted it since it was captured
                each.file.flush(each, run)

    def drop_before(self, log_offset: int, named: str, run: Run) -> None:
        """Delete the files whose records all lie before a log offset, except ``named`` (by a checkpoint) and later ones."""
        while self.files and self.files[0].path.name < named and self.files[0].end_offset < log_offset:
            file = self.files.pop(0)
            file.gone = True
            self._files.forget(file.path)
            run(partial(self._files.disk.unlink, file.path))

    # -- reading ------------------------------------------------------------------------------------------------------

    def find(self, topic: str, key: str, begin_ms: int, end_ms: int, read: Read) -> Iterator[int]:
        """Yield log offsets of records that may have a key, newest first; different keys may share a hash.

        The times, both inclusive, are compared to the second, which is all that items hold. The search ends after
        ``STEPS_A_QUERY`` items; in a damaged file, it goes on to the next file where the chain breaks or cannot be read.
        """
        wanted = key_hash(topic, key)
        steps = 0
        for file in self.files[::-1]:
            if file.gone:  # deleted while this query waited; to open it would create it again
                return
            opened = file.opened()
            above, number = file.count, 0
            try:
                number = file.head(wanted % self.slots, read, opened)
                while number:
                    if not 0 < number < above:  # an intact item points at one before it
                        self._report(file, number)
                        break
                    steps += 1
                    if steps > STEPS_A_QUERY:
                        return
                    above = number
                    found, log_offset, seconds, number = file.item(number, read, opened)
                    stored_ms = file.begin_ms + seconds * 1000
                    # 0 seconds are also stored when the clock has gone back, so they match any time
                    if found == wanted and (seconds == 0 or (stored_ms <= end_ms and stored_ms + 999 >= begin_ms)):
                        yield log_offset
            except ReadFailed:
                self._report(file, number)

    def _report(self, file: IndexFile, number: int) -> None:
        self.damaged += 1
        if not self._reported:
            self._reported = True
            logger.error("index damaged file=%s item=%d hint=stop the broker and run metaq verify --repair", file.path, number)
