"""The key index: all hash files of a data folder (``indexfile``), searched newest first."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from metaq.errors import CorruptRecord
from metaq.protocol.keys import KeyHasher, key_hash
from metaq.store.files.filecache import FileCache, Read, Run, read_here
from metaq.store.index.indexfile import Captured, Entry, IndexFile, created_ms, file_name, file_size

logger = logging.getLogger(__name__)

STEPS_A_QUERY: Final = 16_384
"""Items that one query looks at. Behind more of them an older message is not found: some 30 ms are enough for one question."""


class IndexMark(NamedTuple):
    """How far the index is durable."""

    file: str
    """Name of the newest file; empty when there is none."""
    items: int
    """The number that comes next in it."""
    log_offset: int
    """All records before this log offset are entered."""
    slots: int
    entries: int


NO_INDEX: Final = IndexMark("", 0, 0, 0, 0)


class KeyIndex:
    """The index files of a data folder, oldest first; records are entered into the newest. One writer."""

    def __init__(self, directory: Path, files: FileCache, slots: int, entries: int) -> None:
        self.directory = directory
        self.slots = slots
        self.entries = entries
        self.damaged = 0
        """Chains that queries found broken."""
        self._files = files
        self._hasher = KeyHasher()
        self._reported = False
        self._growing = False
        self.files: list[IndexFile] = []

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, mark: IndexMark, store_ms: Callable[[int], int | None]) -> None:
        """Take over what the checkpoint counts and delete newer files. ``store_ms``: see ``IndexFile.take_back``.

        Raises ``CorruptRecord`` when the files cannot be what the checkpoint counts: then all of them are to be made anew.
        """
        if mark.file and (mark.slots, mark.entries) != (self.slots, self.entries):
            raise CorruptRecord(f"{self.directory} was made with {mark.slots} slots and {mark.entries} entries a file")
        names = self._names()
        for name in names:
            if name > mark.file:
                self._files.disk.unlink(self.directory / name)
        if names:
            self._files.disk.sync_directory(self.directory)  # else a power cut could bring them back
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
        return file_size(self.slots, self.entries)

    def grow(self, now_ms: int, run: Run) -> bool:
        """Begin a new file; false when somebody else is about to. Raises ``DiskFull``."""
        if self._growing:
            return False
        self._growing = True
        try:
            disk = self._files.disk
            disk.make_directories(self.directory)
            if self.files:  # the clock may have gone back
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
        """Have the newest file, if there is one, ready to be entered into."""
        if self.files:
            self.files[-1].load_slots(read)

    @property
    def is_open(self) -> bool:
        """Whether there is a file that records can be entered into."""
        return bool(self.files) and self.files[-1].is_open

    def enter(self, entries: Sequence[Entry]) -> int:
        """Add the keys of records, in the order of the log; return how many records found room in the newest file."""
        return self.files[-1].enter(entries, self._hasher) if self.files else 0

    def write(self, run: Run) -> None:
        """Write what was entered; on ``DiskFull`` it stays in memory."""
        for file in self.files[-2:]:
            file.write(run)

    # -- making it durable --------------------------------------------------------------------------------------------

    def mark(self, log_offset: int) -> IndexMark:
        """What a flush that begins now would make durable."""
        if not self.files:
            return NO_INDEX._replace(log_offset=log_offset)
        newest = self.files[-1]
        return IndexMark(newest.path.name, newest.count, log_offset, self.slots, self.entries)

    def capture(self) -> list[Captured]:
        """All that is entered so far, for ``flush`` to make durable."""
        return [file.capture() for file in self.files if file.changed]

    def flush(self, captured: list[Captured], run: Run) -> None:
        """Make what was captured durable. One call at a time. Raises ``DiskFull`` or ``DiskFailed``."""
        if any(each.file.is_new for each in captured):
            run(lambda: self._files.disk.sync_directory(self.directory))
        for each in captured:
            if not each.file.gone:  # another flush came first, and then retention
                each.file.flush(each, run)

    def drop_before(self, log_offset: int, named: str, run: Run) -> None:
        """Delete the files whose records all lie before a log offset, except ``named``, which a checkpoint names, and later."""
        while self.files and self.files[0].path.name < named and self.files[0].end_offset < log_offset:
            file = self.files.pop(0)
            file.gone = True
            self._files.forget(file.path)
            run(partial(self._files.disk.unlink, file.path))

    # -- reading ------------------------------------------------------------------------------------------------------

    def find(self, topic: str, key: str, begin_ms: int, end_ms: int, read: Read) -> Iterator[int]:
        """Log offsets of records that may carry a key, newest first: hashes may be equal by chance.

        The times, inclusive, are compared as far as items know them: to the second. Ends behind ``STEPS_A_QUERY`` items and,
        in a file that is damaged, where its chain breaks.
        """
        wanted = key_hash(topic, key)
        steps = 0
        for file in self.files[::-1]:
            if file.gone:  # while this query waited; a file that is opened now would be made again
                return
            opened = file.opened()
            above, number = file.count, file.head(wanted % self.slots, read, opened)
            while number:
                if not 0 < number < above:  # each item leads to one before it
                    self._report(file, number)
                    break
                steps += 1
                if steps > STEPS_A_QUERY:
                    return
                above = number
                found, log_offset, seconds, number = file.item(number, read, opened)
                stored_ms = file.begin_ms + seconds * 1000
                # 0 seconds are also those of a clock that has gone back
                if found == wanted and (seconds == 0 or (stored_ms <= end_ms and stored_ms + 999 >= begin_ms)):
                    yield log_offset

    def _report(self, file: IndexFile, number: int) -> None:
        self.damaged += 1
        if not self._reported:
            self._reported = True
            logger.error("index damaged file=%s item=%d hint=stop the broker and run metaq verify --repair", file.path, number)
