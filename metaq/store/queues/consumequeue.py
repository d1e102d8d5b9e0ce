"""The consume queue of one partition: where each of its messages is in the commit log.

One unit of 16 bytes a message. Its index is the message's ordinal (queue offset)::

    at  size  field
     0  8     log offset of the record
     8  4     size of the record
    12  4     tag hash: Java's String.hashCode of the TAGS property, 0 without one

    consumequeue/<topic>/<partition>/00000000000000000000     20 MiB = 1,310,720 units
                                     00000000000020971520     named by the first unit's byte offset, 16 × ordinal

The unit of a lost message is a *filler*: log offset 0, size 7FFFFFFF, tag 0. The files are derived from the log: they are
written after it, never preallocated, and synced only for a checkpoint. New units wait in memory to be written.
"""

import struct
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from librt.strings import BytesWriter, write_i32_be, write_i64_be

from metaq.errors import ReadFailed
from metaq.store.files.disk import File
from metaq.store.files.filecache import FileCache, Read, Run, read_around
from metaq.store.log.segments import SMALLEST_RECORD, is_segment_name, segment_name

UNIT: Final = struct.Struct(">qii")
UNIT_SIZE: Final = 16
FILLER_SIZE: Final = 0x7FFFFFFF
FILLER: Final = UNIT.pack(0, FILLER_SIZE, 0)
LEVELS_ABOVE: Final = 3
"""Folders above that of a new queue whose entries may be new too: topic, ``consumequeue``, data."""
WRITE_AT: Final = 64 * 1024
"""From this many pending bytes on, units are written before the next sweep."""

assert UNIT.size == UNIT_SIZE


def has_record(size: int) -> bool:
    """Return whether a unit with this size leads to a record: not that of a lost message, nor one that cannot be read."""
    return SMALLEST_RECORD <= size < FILLER_SIZE


assert 20 * 1024 * 1024 % UNIT_SIZE == 0


class Unsynced(NamedTuple):
    """The files of a queue that a checkpoint has to sync."""

    files: set[int]
    """The base ordinals of the files."""
    new_folder: bool
    """The names of the queue's folder and of those above it are not durable yet."""


class ConsumeQueue:
    """The queue of one partition. Its counters run ahead of the files; readers see the messages before ``readable``.

    ``next`` and ``text_end`` are the ordinal and the text position of the next message. ``base`` is the ordinal of the first
    unit that is kept, ``first`` that of the first message whose record is still in the log.
    """

    __slots__ = (
        "_bases",
        "_files",
        "_last",
        "_new_folder",
        "_paths",
        "_pending",
        "_units_per_file",
        "base",
        "cursors",
        "directory",
        "first",
        "first_for",
        "first_position",
        "live_from",
        "next",
        "overhead",
        "partition",
        "readable",
        "readable_text_end",
        "tail",
        "text_end",
        "topic",
        "turn",
        "unsynced",
        "written",
    )

    def __init__(
        self, topic: str, partition: int, directory: Path, files: FileCache, file_bytes: int, tail: bytes, overhead: int
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.directory = directory
        self.tail = tail
        """The bytes after the body of a record without properties: topic and empty properties (``record_tail``)."""
        self.overhead = overhead
        self._files = files
        self._units_per_file = file_bytes // UNIT_SIZE
        self._bases: list[int] = []  # first ordinal of each file, rising
        self._paths: dict[int, Path] = {}  # of these files, once they were opened: to make a path takes longer than to read
        self.base = self.next = self.written = self.readable = 0
        self.text_end = self.readable_text_end = 0
        self._pending: BytesWriter | None = None  # the units written … next, if there are any: most queues have none
        self.unsynced: set[int] = set()  # bases of files written since the last sync
        self._new_folder = False  # its name, and those of the folders above, are not durable
        self._last = b""  # the last written unit, or empty when it is not cached
        self.first = self.first_position = 0
        self.first_for = -1  # the log's begin that ``first`` was found for
        self.cursors: dict[int, int] = {}  # text position → ordinal, where sequential readers go on
        self.turn = -1
        self.live_from = 0  # the first ordinal whose unit this process made: it needs no verification

    def __repr__(self) -> str:
        return f"<ConsumeQueue {self.topic}-{self.partition} {self.base}…{self.next} readable {self.readable}>"

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """Open the files as they are, up to the last whole unit or the first hole; the files after a hole are deleted."""
        disk = self._files.disk
        bases = [int(name) for name in disk.list_directory(self.directory) if is_segment_name(name)]
        self._bases = [base // UNIT_SIZE for base in bases]
        if not self._bases:
            return
        self.base = end = self._bases[0]
        for index, base in enumerate(self._bases):
            if base != end:
                self._drop_files(index)
                break
            file = self._open(base)
            count = file.size() // UNIT_SIZE
            end = base + count
            if index + 1 == len(self._bases) and count:  # recovery needs it soon, and the file is open now
                with suppress(ReadFailed):  # recovery finds that it does not agree with the log
                    self._last = file.read(UNIT_SIZE, (count - 1) * UNIT_SIZE)
        self.next = self.written = self.live_from = end

    def trust(self, synced: int, text_end: int) -> None:
        """Keep all units; those from ordinal ``synced`` on are still to be synced. The next message is at ``text_end``."""
        ends = (*self._bases[1:], self.written)
        self.unsynced.update(base for base, end in zip(self._bases, ends, strict=False) if end > synced)
        self._new_folder = synced == 0  # no checkpoint ever saw it
        self.text_end = text_end

    def reset(self, count: int, text_end: int) -> None:
        """Cut the queue to the units before ``count``; missing ones become fillers. The next message is at ``text_end``."""
        self._last = b""
        if count < self.base or (count > self.written and not self._bases):
            self._drop_files(0)
            self.base = self.written = self.next = count
        while self.written > count:  # later files are deleted, and the last one kept is cut
            base = self._bases[-1]
            if base >= count and len(self._bases) > 1:
                self._drop_files(len(self._bases) - 1)
                self.written = base
                continue
            self._open(base).truncate((count - base) * UNIT_SIZE)
            self.unsynced.add(base)
            self.written = count
        self.next = self.written
        self._pending = None
        self.fill(count)
        self.text_end = text_end

    def _drop_files(self, index: int) -> None:
        """Delete the files from ``index`` on."""
        if index == len(self._bases):
            return  # the folder may not exist
        disk = self._files.disk
        for base in reversed(self._bases[index:]):  # newest first: a kill in between leaves a shorter queue, which is noticed
            self._files.forget(self._path(base))
            disk.unlink(self._paths.pop(base))
            self.unsynced.discard(base)
        del self._bases[index:]
        disk.sync_directory(self.directory)

    # -- adding -------------------------------------------------------------------------------------------------------

    @property
    def pending_bytes(self) -> int:
        """The size of the units that wait in memory to be written."""
        return 0 if self._pending is None else len(self._pending)

    def add(self, log_offset: int, size: int, tag: int, text_size: int) -> None:
        """Add the unit of the next message. Every message passes here: live, recovered or replicated."""
        pending = self._pending
        if pending is None:
            pending = self._pending = BytesWriter()
        write_i64_be(pending, log_offset)
        write_i32_be(pending, size)
        write_i32_be(pending, tag)
        self.next += 1
        self.text_end += text_size

    def fill(self, ordinal: int) -> None:
        """Add filler units up to ``ordinal``, for messages whose records are lost."""
        if ordinal > self.next:
            self._pending = self._pending or BytesWriter()
            self._pending.write(FILLER * (ordinal - self.next))
            self.next = ordinal

    def take_back(self, ordinal: int, text_end: int, pending: int) -> None:
        """Undo additions whose append to the log failed."""
        self.next = ordinal
        self.text_end = text_end
        if self._pending is not None:
            self._pending.truncate(pending)

    def publish(self, ordinal: int, text_end: int) -> None:
        """Let readers see the messages before ``ordinal``, which end at ``text_end``."""
        self.readable = ordinal
        self.readable_text_end = text_end

    def hide_before(self, ordinal: int) -> None:
        """Hide the messages before ``ordinal`` from readers, and no others: they belong to a deleted topic.

        It may be beyond ``next`` on a slave, which will have the others, too.
        """
        self.first = ordinal
        self.first_for = -1  # its position has to be looked up
        self.cursors.clear()

    # -- files --------------------------------------------------------------------------------------------------------

    def _path(self, base: int) -> Path:
        path = self._paths.get(base)
        if path is None:
            path = self._paths[base] = self.directory / segment_name(base * UNIT_SIZE)
        return path

    def _open(self, base: int) -> File:
        return self._files.open(self._path(base))

    def write(self) -> None:
        """Write the pending units. On an error (``DiskFull``, ``DiskFailed``) the unwritten ones stay pending."""
        self._last = b""
        while self._pending is not None and len(self._pending):
            if not self._bases:
                self._files.disk.make_directories(self.directory, durable=False)
                self._new_folder = True
                self._bases.append(self.written)
            base = self._bases[-1]
            room = base + self._units_per_file - self.written
            if room <= 0:
                self._bases.append(self.written)
                continue
            units = self._pending.getvalue()
            data = units[: room * UNIT_SIZE]
            self._open(base).write(data, (self.written - base) * UNIT_SIZE)
            self.unsynced.add(base)
            self.written += len(data) // UNIT_SIZE
            self._pending = None
            if len(data) < len(units):
                self._pending = BytesWriter()
                self._pending.write(units[len(data) :])

    def sync(self, run: Run, above: set[Path]) -> None:
        """Make the written units durable, and the names of their files and folders. Raises ``DiskFailed``.

        ``above`` are folders of other queues that were synced after this queue was written: their names are durable, and they
        are not synced again. It receives those that this call syncs.
        """
        unsynced = self.take_unsynced()
        try:
            # opened before the first wait: a file that is dropped meanwhile must not be made again by opening it
            for file in [self._open(base) for base in sorted(unsynced.files)]:
                run(file.datasync)
            parents = self.directory.parents[:LEVELS_ABOVE] if unsynced.new_folder else ()
            new = [folder for folder in parents if folder not in above]
            if unsynced.files:
                for folder in (self.directory, *new):
                    run(lambda folder=folder: self._files.disk.sync_directory(folder))  # type: ignore[misc]
                above.update(new)
        except BaseException:
            self.give_back(unsynced)
            raise

    def take_unsynced(self) -> Unsynced:
        """Return the files that have to be synced, and forget them; the caller syncs them or gives them back."""
        unsynced = Unsynced(self.unsynced, self._new_folder)
        self.unsynced, self._new_folder = set(), False
        return unsynced

    def give_back(self, unsynced: Unsynced) -> None:
        """Remember again the files that were taken and not synced."""
        self.unsynced |= unsynced.files.intersection(self._bases)
        self._new_folder |= unsynced.new_folder

    def drop_before(self, ordinal: int, run: Run) -> None:
        """Delete the files whose units all lie before ``ordinal``, never the last file."""
        disk = self._files.disk
        while len(self._bases) > 1 and self._bases[1] <= ordinal:
            base = self._bases.pop(0)
            self.base = self._bases[0]  # before the first wait, during which others read
            self.unsynced.discard(base)
            path = self._path(base)
            del self._paths[base]
            self._files.forget(path)
            run(lambda path=path: disk.unlink(path))  # type: ignore[misc]
            run(lambda: disk.sync_directory(self.directory))  # one sync a file, so that a power cut leaves no hole

    # -- reading ------------------------------------------------------------------------------------------------------

    def units(self, ordinal: int, count: int, read: Read) -> bytes:
        """Return the units from ``ordinal`` on: at most ``count``, at least one; ``ordinal`` < ``next``.

        Before ``base`` they are fillers: a reader that waited for the disk may ask for units that were dropped meanwhile. Those
        that the disk cannot give are zeros, which lead to no record.
        """
        if ordinal < self.base:
            return FILLER * min(count, self.base - ordinal)
        if ordinal == self.written - 1 and self._last:
            return self._last
        if ordinal >= self.written:
            start = (ordinal - self.written) * UNIT_SIZE
            units = b"" if self._pending is None else self._pending.getvalue()
            return units[start : start + count * UNIT_SIZE]
        index = bisect_right(self._bases, ordinal) - 1
        base = self._bases[index]
        end = min(self.written, ordinal + count)
        if index + 1 < len(self._bases):
            end = min(end, self._bases[index + 1])
        size = (end - ordinal) * UNIT_SIZE
        units = read_around(read, self._open(base), size, (ordinal - base) * UNIT_SIZE)
        return units.ljust(size, b"\0")  # a file cut from outside

    def unit(self, ordinal: int, read: Read) -> tuple[int, int, int]:
        """Return log offset, record size and tag hash of one message."""
        return UNIT.unpack(self.units(ordinal, 1, read)[:UNIT_SIZE])


def sync_together(queues: Iterable[ConsumeQueue], file: File, run: Run) -> bool:
    """Make the units written by all queues durable with one sync of the file system of ``file``.

    Return false when the system has no such call; then, and on ``DiskFailed``, everything stays to be synced.
    """
    taken = []
    done = False
    try:
        for queue in queues:
            taken.append((queue, queue.take_unsynced()))  # noqa: PERF401 - given back if the caller ends in between
        done = run(file.sync_file_system)
    finally:
        for queue, unsynced in () if done else taken:
            queue.give_back(unsynced)
    return done
