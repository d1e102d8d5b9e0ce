"""Entering the keys of messages into the key index: of new messages from memory, of older ones by walking the log.

::

    log   ├───────── entered ─────────┤──── behind ────┤──── pending ────┤
          begin                       walk_at          walk_until        end

``append`` hands over the keys of new messages. They are entered at once. While no file has room, or other keys wait before
them, they wait too (*pending*) until ``work`` enters them in slices, alongside all other work. Keys that are not in memory
(*behind*) are read from the log again: at the opening of the folder those that the last checkpoint does not cover, and later
those of messages put while there was no room for an index file, or faster than keys could be entered. A message is never
refused for the sake of the index.
"""

import logging
from collections.abc import Iterator
from typing import Final, NamedTuple

from metaq.clock import Clock
from metaq.errors import DiskFull, Overloaded
from metaq.protocol.keys import keys_of
from metaq.protocol.record import decode_record
from metaq.store.files.disk import Disk, Usage
from metaq.store.files.filecache import ColdRead, Read, Run, read_around, read_cached, read_through, run_here
from metaq.store.index.indexfile import Captured, Entry
from metaq.store.index.keyindex import IndexMark, KeyIndex
from metaq.store.log.commitlog import CommitLog
from metaq.store.log.retention import RetentionRules, room_refusal
from metaq.store.log.window import Window

logger = logging.getLogger(__name__)

PENDING_MOST: Final = 100_000
"""Messages whose keys are kept in memory, about 40 MB. With more, all of them are read from the log again."""
SLICE: Final = 1024
"""Messages entered without a pause: about 3 ms with one key each, 10 ms with two on a slow processor.

Twice as many as arrived since the last slice are added, so that fewer and fewer are pending at any rate of puts.
"""
CAME_MOST: Final = 4096
"""Arrivals that a slice takes into account. More arrive during a slice's write only when the disk is slow."""
SLICES_A_ROUND: Final = 128
"""Slices in one round: enough for ``PENDING_MOST``."""
WINDOW: Final = 256 * 1024
"""Bytes of the log that are read at a time while walking, about 5 ms of work when messages are small."""
WINDOWS_A_ROUND: Final = 8
WINDOWS_A_QUERY: Final = 256
"""Windows that a query walks, 64 MiB: more than is put between two checkpoints unless the log grows faster than 12 MB/s."""
RETRY_MS: Final = 1000


class IndexSnapshot(NamedTuple):
    """The state of the index that a flush makes durable."""

    mark: IndexMark
    files: list[Captured]


class Indexing:
    """The key index of one store, and the keys still to be entered. All calls that wait take a ``Run`` or a ``Read``."""

    def __init__(self, index: KeyIndex, log: CommitLog, disk: Disk, clock: Clock, rules: RetentionRules, spare: int) -> None:
        """Keep ``spare`` bytes free for the log whenever an index file is made."""
        self.index = index
        self.rules = rules
        """Those by which an index file is made only where puts would not be refused then."""
        self.paused: str | None = None
        """Why no keys are entered for now; ``None`` when they are."""
        self._log = log
        self._disk = disk
        self._clock = clock
        self._spare = spare
        self._pending: list[Entry] = []
        self._came = 0  # how many of them arrived since the last slice
        self._walk_at = self._walk_until = 0
        self._window = WINDOW
        self._flushing = False

    # -- opening ------------------------------------------------------------------------------------------------------

    def load(self, mark: IndexMark) -> None:
        """Open the index as the checkpoint counts it. Raises ``CorruptRecord`` when the files do not match."""
        self.index.load(mark, self._store_ms)
        self._walk_until = self._log.end
        self._walk_at = min(max(mark.log_offset, self._log.begin), self._walk_until)

    def begin_anew(self) -> None:
        """Delete all index files, so that the keys of the whole log are entered again."""
        self.index.clear()
        self._pending.clear()
        self._walk_at, self._walk_until = self._log.begin, self._log.end

    def _store_ms(self, log_offset: int) -> int | None:
        stored = self._log.record_at(log_offset)
        return None if stored is None else decode_record(stored.buffer).store_ms

    # -- new messages -------------------------------------------------------------------------------------------------

    def appended(self, entries: list[Entry]) -> None:
        """Take the keys of messages that are now in the log, and enter them at once unless others wait before them.

        There is no limit on how many are entered at once: putting that many messages took ten times as long.
        """
        entered = 0
        if not self._pending and self.index.is_open and not self.behind and self.paused is None:
            entered = self.index.enter(entries)
        self._pending += entries[entered:]
        self._came += len(entries) - entered
        if len(self._pending) > PENDING_MOST:
            if not self.behind:
                self._walk_at = self._pending[0][0]
            self._walk_until = self._log.end
            self._pending.clear()

    # -- progress -----------------------------------------------------------------------------------------------------

    @property
    def behind(self) -> int:
        """The bytes of the log that are still to be walked."""
        return max(0, self._walk_until - max(self._walk_at, self._log.begin))

    @property
    def log_offset(self) -> int:
        """The log offset before which all messages are entered."""
        if self.behind:
            return self._walk_at
        return self._pending[0][0] if self._pending else self._log.end

    @property
    def mark(self) -> IndexMark:
        """The mark that a flush beginning now would make durable."""
        return self.index.mark(self.log_offset)

    # -- entering -----------------------------------------------------------------------------------------------------

    def work(self, run: Run) -> None:
        """Do one round: walk a part of the log that is behind, then enter pending keys. Raises ``DiskFailed``.

        Keys that find no room wait for a later round.
        """
        read = read_through(run)
        if self.behind or self._pending:
            self.index.open(read)
        for _ in range(WINDOWS_A_ROUND):
            if not self.behind or not self._walk(read, run):
                break
        self._came = 0
        for _ in range(SLICES_A_ROUND):
            if self.behind or not self._pending or not self._enter_pending(run):
                break
        if not self.behind and not self._pending:
            self._write(run)

    def _enter_pending(self, run: Run) -> bool:
        """Enter one slice of the pending keys; return false when nothing more can be done now."""
        part = self._pending[: SLICE + 2 * min(self._came, CAME_MOST)]
        entered = self.index.enter(part)
        del self._pending[:entered]
        if entered < len(part) and not self._grow(run):
            return False
        self._came = 0
        return self._write(run)

    def _write(self, run: Run) -> bool:
        """Write the items that were entered; return false when the disk is full although their space was allocated."""
        try:
            self.index.write(run)
        except DiskFull as error:
            self._pause(str(error))
            return False
        if self.paused is not None:
            self.paused = None
            logger.info("keys are indexed again behind_bytes=%d", self.behind)
        return True

    def _grow(self, run: Run) -> bool:
        """Begin a new index file if the disk has room for it and for the log; return false when it cannot be begun now."""
        usage = self._disk.usage(self._log.directory)
        size = self.index.file_size
        left = Usage(usage.used + size, usage.available - size)
        reason = room_refusal(left, self.rules)
        if reason is None and left.available < self._spare:
            reason = f"{left.available} bytes are free, the next segment of the log needs {self._spare}"
        if reason is not None:
            self._pause(f"there is no room for an index file of {size} bytes: with it, {reason}")
            return False
        try:
            return self.index.grow(self._clock.now_ms(), run)
        except DiskFull as error:
            self._pause(str(error))
            return False

    def _pause(self, reason: str) -> None:
        if self.paused is None:
            logger.error("keys are not indexed for now, messages are not concerned reason=%s", reason)
        self.paused = reason

    # -- catching up --------------------------------------------------------------------------------------------------

    def catch_up(self, read: Read) -> None:
        """Enter the keys that are behind, before a query.

        Raises ``Overloaded`` when they are too many to wait for, and ``ColdRead`` when ``read`` may not wait. While the disk
        has no room for the index, it stays as it is, and the query goes on.
        """
        if self.behind and read is read_cached:
            raise ColdRead
        if self.behind:
            self.index.open(read)
        for _ in range(WINDOWS_A_QUERY):
            if not self.behind or not self._walk(read, run_here):
                break
        if self.behind and self.paused is None:
            reason = f"the key index is being rebuilt, {self.behind} bytes of the log are still to be read"
            raise Overloaded(reason, retry_after_ms=RETRY_MS)

    def _walk(self, read: Read, run: Run) -> bool:
        """Enter the keys in the next window of the log; return false when that is not possible now."""
        began = self._walk_at
        at = max(began, self._log.begin)
        segment = self._log.find(at)
        if segment is None:
            self._walk_at = self._walk_until
            return True
        end = min(segment.end, self._walk_until)
        size = min(self._window, end - at)
        data = read_around(read, self._log.file(segment), size, at - segment.base).ljust(size, b"\0")  # a file cut from outside
        if self._walk_at != began:  # another call walked this window while this one waited
            return True
        window = Window(memoryview(data), at, end, segment.end)
        entries = [entry for record, offset in window.records() if (entry := entry_of(record, offset)) is not None]
        entered = self.index.enter(entries)
        if entered < len(entries):
            self._walk_at = entries[entered][0]
            return self._grow(run)
        self._walk_at = window.at
        self._window = max(WINDOW, window.wanted)
        return self._write(run)

    # -- making it durable --------------------------------------------------------------------------------------------

    def capture(self) -> IndexSnapshot | None:
        """Return the present state, with all that is entered, for ``flush``; ``None`` while a flush is in progress."""
        return None if self._flushing else IndexSnapshot(self.mark, self.index.capture())

    def flush(self, snapshot: IndexSnapshot, run: Run) -> bool:
        """Make a snapshot durable. Raises ``DiskFailed``.

        Return false when another flush is in progress, or the disk is full although the space was allocated.
        """
        if self._flushing:
            return False
        self._flushing = True
        try:
            self.index.flush(snapshot.files, run)
        except DiskFull as error:
            self._pause(str(error))
            return False
        finally:
            self._flushing = False
        return True

    # -- reading ------------------------------------------------------------------------------------------------------

    def find(self, topic: str, key: str, begin_ms: int, end_ms: int, read: Read) -> Iterator[int]:
        """Yield log offsets of records that may have a key, newest first; one may come twice. See ``KeyIndex.find``."""
        yield from [entry[0] for entry in reversed(self._pending) if entry[1] == topic and key in entry[2]]
        yield from self.index.find(topic, key, begin_ms, end_ms, read)


def entry_of(data: memoryview, log_offset: int) -> Entry | None:
    """Return the entry of an intact record; ``None`` when it has no keys."""
    record = decode_record(data)
    keys = keys_of(record.topic, record.sys_flag, record.properties)
    return (log_offset, record.topic, keys, record.store_ms) if keys else None
