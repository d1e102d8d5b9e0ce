"""The commit log: one sequence of records shared by all topics, in segment files named by their 20-digit base offset.

::

    commitlog/00000000000000000000      record record … record blank
              00000000001073741824      record record … zeros
              00000000002147483648      zeros (the spare, allocated ahead so that a full disk is met early)

Records are *staged* during one turn of the event loop and *appended* by one write per segment. Appending uses ``pwrite``: a
write through a map into a hole on a full disk would kill the process. Records appended lately are read through a map.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from metaq.errors import BadRequest, DiskFailed, DiskFull, Fenced, StoreError, TooManyFiles
from metaq.protocol.record import (
    BLANK,
    BLANK_MAGIC,
    BLANK_SIZE,
    CHECKSUM_SIZE,
    MAGIC,
    add_closed,
    is_intact,
    store_ms,
)
from metaq.protocol.text.messages import Stored
from metaq.store.files.disk import File
from metaq.store.files.filecache import FileCache, Read, Run, read_around, read_here, run_here
from metaq.store.files.owed import OwedCalls
from metaq.store.log.retention import SegmentAge
from metaq.store.log.segments import CHUNK, SMALLEST_RECORD, Segment, chunk_end, is_segment_name, segment_name
from metaq.store.log.walk import Gap, walk

ZEROS_AHEAD: Final = 128 * 1024
"""Bytes that are written with an append after which each append is synced, for those that follow."""
MOST_BEFORE_ZEROS: Final = 32 * 1024
"""Bytes of an append that are worth that: those of larger ones take the disk longer than the blocks that are new to it."""


class _Group(NamedTuple):
    """The staged bytes of one segment: ``parts`` begin at log offset ``start``."""

    segment: Segment
    start: int
    parts: list[bytes]


def _no_fence() -> None:
    """Do nothing: nothing is appended to this log."""


class CommitLog:
    """The log: its segments in order, the last of which is written to. There is one writer."""

    def __init__(
        self,
        directory: Path,
        files: FileCache,
        segment_bytes: int,
        hot_bytes: int,
        fence: Callable[[], None] = _no_fence,
        *,
        is_synced_often: bool = False,
    ) -> None:
        """Open the segments that exist, without checking them; ``recovery`` decides where the log ends.

        ``fence`` is called before each append, and raises ``Fenced`` when another replica may be master by now.
        """
        self._is_synced_often = is_synced_often
        self._written_to = 0  # the log offset before which the blocks of the active segment's file were written before
        self.directory = directory
        self._files = files
        self._disk = files.disk
        self._segment_bytes = segment_bytes
        self._hot_bytes = hot_bytes
        self.end = 0
        self.staged_end = 0
        self._fence = fence
        self._written_from = 0  # log offset from which on this process appended: these records need no verification
        self.owed = OwedCalls()
        self._lacks: DiskFull | None = None  # why there is no next segment, while the active one is nearly full
        self._spare: Segment | None = None
        self._sync_failure: DiskFailed | None = None  # of the first sync of a segment that failed
        self._leftover: list[tuple[Segment, int, int]] = []  # segment, log offset and size of what a failed append wrote
        self._disk.make_directories(directory)
        self.segments = self._open_segments()
        self._use(self.segments[-1], self.segments[-1].base)

    # -- opening ------------------------------------------------------------------------------------------------------

    def _open_segments(self) -> list[Segment]:
        # a killed process may have made files without syncing their names, which a power cut would then take away
        self._disk.sync_directory(self.directory)
        bases = [int(name) for name in self._disk.list_directory(self.directory) if is_segment_name(name)]
        bases = bases or [0]
        segments = []
        for base, following in zip(bases, [*bases[1:], None], strict=True):
            path = self.directory / segment_name(base)
            size = self._files.open(path).size()
            if following is not None:
                capacity = following - base
            else:
                capacity = size if size >= self._segment_bytes else self._segment_bytes
            if size < capacity:  # new, or cut short by a crash; the hole takes no disk space yet
                self._files.open(path).truncate(capacity)
                self._disk.sync_directory(self.directory)
            segments.append(Segment(base, capacity, path))
        return segments

    def _reserve(self, segment: Segment) -> None:
        """Allocate a segment's disk space, durably, unless it has it: a change of role must not wait for a needless sync."""
        file = self.file(segment)
        if file.allocate(segment.capacity):
            self._sync_file(file)

    def _create(self, base: int, run: Run) -> Segment:
        """Create a segment and make its disk space, size and name durable. Raises ``DiskFull`` or ``DiskFailed``."""
        path = self.directory / segment_name(base)
        file = self._disk.open(path)  # its own: the log may use the segment meanwhile, and its syncs need what they report
        run(lambda: file.allocate(self._segment_bytes))
        run(file.datasync)
        run(lambda: self._disk.sync_directory(self.directory))
        return Segment(base, self._segment_bytes, path)

    def _use(self, segment: Segment, end: int) -> None:
        """Make a segment the active one, with nothing staged; the log ends at ``end`` in it."""
        self._active = segment
        self._records: list[bytes] = []  # staged after the parts, still without their checksums
        self._parts: list[bytes] = []
        self._groups = [_Group(segment, end, self._parts)]
        self.room_end = segment.end - BLANK_SIZE

    def start_at(self, end: int) -> None:
        """Make ``end`` the end of the log: zero the bytes after it, durably, and allocate room there. Called once, by recovery.

        Writes that a full disk refuses are ``owed``.
        """
        while self.segments[-1].base > end:
            self.remove(self.segments[-1])
        segment = self.segments[-1]
        file = self._files.open(segment.path)
        at = file.next_data(end - segment.base)
        zeroed = False
        while at < segment.capacity:
            chunk = file.read(chunk_end(segment.base + at, segment) - segment.base - at, at)
            if chunk.count(0) != len(chunk):
                self.owed.do(partial(_zero, file, len(chunk), at))
                zeroed = True
            at = file.next_data(at + len(chunk))
        if zeroed:
            self.owed.do(partial(self._sync_file, file))
        self.owed.do(partial(self._reserve, segment))
        self._files.forget(segment.path)  # ``next_data`` has switched off readahead for this open file
        self.end = self.staged_end = self._written_from = end
        self._use(segment, end)

    def rewrite(self, start: int) -> None:
        """Write the log from ``start`` on again as it is read: after a failed sync the disk may lag behind the page cache."""
        for segment in [segment for segment in self.segments if segment.end > start]:
            at = max(start, segment.base)
            while at < segment.end:
                chunk = self.file(segment).read(chunk_end(at, segment) - at, at - segment.base)
                self.file(segment).write(chunk, at - segment.base)
                at += len(chunk)

    # -- appending ----------------------------------------------------------------------------------------------------

    def stage(self, record: bytes) -> None:
        """Stage the next record, which was made for log offset ``staged_end``; its checksum is added later."""
        self._records.append(record)
        self.staged_end += len(record) + CHECKSUM_SIZE

    def _add_checksums(self) -> None:
        """Make the staged records parts of their segment, each with its checksum: many at once cost half as much."""
        records, self._records = self._records, []
        add_closed(records, self._parts)

    def stage_copy(self, records: bytes) -> None:
        """Stage the next records as they are in another replica's log, with their checksums."""
        self._add_checksums()
        self._parts.append(records)
        self.staged_end += len(records)

    def reserve(self, size: int) -> None:
        """Make sure there is room for records of ``size`` bytes in all, at most a segment. Raises ``DiskFull`` without room."""
        if self.staged_end + size > self.room_end and self._spare is None:
            self._spare = self._following(run_here)

    def end_of(self, sizes: Iterable[int]) -> int:
        """Return the log offset after records of these sizes, which one segment could hold, if they were staged now."""
        end, room_end = self.staged_end, self.room_end
        for size in sizes:
            if end + size > room_end:
                end = self._active.end
                room_end = end + self._segment_bytes - BLANK_SIZE
            end += size
        return end

    def make_room(self, size: int) -> None:
        """Go to the next segment, because the active one has no room for ``size`` bytes and a blank record.

        Raises ``BadRequest`` for a record larger than a segment, and ``DiskFull`` when there is no next segment and no room for
        one; then nothing has changed.
        """
        if size + BLANK_SIZE > self._segment_bytes:
            raise BadRequest(f"a record of {size} bytes does not fit into a segment of {self._segment_bytes} bytes")
        following = self._spare or self._following(run_here)
        self._spare = None
        self._add_checksums()
        if self.staged_end < self._active.end:  # otherwise its file was lost, and the log goes on after it
            self._parts.append(BLANK.pack(self._active.end - self.staged_end, BLANK_MAGIC))
        self._active = following
        self._parts = []
        self._groups.append(_Group(following, following.base, self._parts))
        self.staged_end = following.base
        self.room_end = following.end - BLANK_SIZE

    def append(self) -> None:
        """Write the staged records. When it raises, none of them are in the log.

        Raises ``DiskFull``, ``TooManyFiles`` or ``Fenced``, after which appending may go on, or another ``StoreError``.
        """
        groups = self._groups
        self._add_checksums()
        try:
            self.owed.check()
            self._fence()
            self._zero_leftover()
            for segment, start, parts in groups:
                if parts:
                    data = self._with_zeros(segment, start, b"".join(parts))
                    self._leftover.append((segment, start, len(data)))
                    self._files.open(segment.path).write(data, start - segment.base)
        except Fenced:  # nothing is written: not even zeros, since the files may be another store's by now
            self._take_back(groups)
            raise
        except StoreError:
            self._take_back(groups)
            with contextlib.suppress(DiskFull, TooManyFiles):  # not even zeros can be written: the next append begins with them
                self._zero_leftover()
            raise
        self._leftover.clear()
        self.segments.extend(group.segment for group in groups[1:])
        self.end = self.staged_end
        self._use(self._active, self.end)

    def _with_zeros(self, segment: Segment, start: int, data: bytes) -> bytes:
        """Return the data of an append followed by zeros, where none were written yet and a sync comes next.

        A block that is allocated, and written for the first time, takes the file system a commit of its journal in the next
        sync: one of 6 KB takes 140 µs with it, and 66 without. Zeros in many blocks take one for all.
        """
        end = start + len(data)
        if end <= self._written_to or len(data) > MOST_BEFORE_ZEROS or not self._is_synced_often:
            return data
        zeros = min(ZEROS_AHEAD, segment.end - end)
        self._written_to = end + zeros
        return data + bytes(zeros)

    def _take_back(self, groups: list[_Group]) -> None:
        """Undo the staging of a failed append, and keep a segment it began as the spare."""
        if len(groups) > 1:
            self._spare = groups[1].segment
        self.staged_end = self.end
        self._use(groups[0].segment, self.end)

    def _zero_leftover(self) -> None:
        """Zero, durably, the bytes that a failed append may have left, so that no recovery finds them.

        Raises ``DiskFull`` or ``TooManyFiles``, after which it may be tried again, or ``DiskFailed``.
        """
        for segment, start, size in self._leftover:
            file = self._files.open(segment.path)
            file.write(bytes(size), start - segment.base)
            self._sync_file(file)
        self._leftover.clear()

    @property
    def shortage(self) -> DiskFull | None:
        """The error that says why there is no room for messages; ``None`` when there is room."""
        return self.owed.reason or self._lacks

    def prepare(self, run: Run, run_sync: Run) -> None:
        """Make the owed writes, and create the next segment before it is needed. Raises ``DiskFull`` when there is no room.

        It is called periodically, so puts are accepted again once there is room. ``run_sync`` is the one of ``sync``.
        """
        self.owed.settle(run_sync)
        if self._spare is None and len(self._groups) == 1:
            active = self._active
            spare = self._following(run)
            if self._active is active and self._spare is None:  # otherwise the log went on while this call waited
                self._spare = spare

    def _following(self, run: Run) -> Segment:
        """Create the segment after the active one. Raises ``DiskFull`` when there is no room for it.

        That becomes a ``shortage`` as soon as the active one is nearly full; otherwise large messages would be refused while
        small ones are accepted.
        """
        active = self._active
        try:
            segment = self._create(active.end, run)
        except DiskFull as error:
            nearly_full = self.staged_end + min(CHUNK, active.capacity // 8) > self.room_end
            if nearly_full and self._active is active:  # the log may have gone on while this call waited
                self._lacks = error
            raise
        self._lacks = None
        return segment

    def sync(self, since: int, run_sync: Run) -> None:
        """Make everything appended since log offset ``since`` durable. Several calls may run at a time.

        ``run_sync`` makes the syncs of all callers, one after the other. Raises ``DiskFailed``, also when another sync of
        the log has failed, before or meanwhile: the kernel reports a failed write to one sync of an open file, and not to the
        next.
        """
        # opened before the first wait: a segment that is removed meanwhile must not be made again by opening it
        for file in [self.file(segment) for segment in self.segments if segment.end > since]:
            run_sync(partial(self._sync_file, file))
        if self._sync_failure is not None:
            raise DiskFailed(str(self._sync_failure))

    def _sync_file(self, file: File) -> None:
        """Sync a segment. A failure is noted here, in the thread that syncs: its caller may have given up waiting for it."""
        try:
            file.datasync()
        except DiskFailed as error:
            self._sync_failure = error
            raise

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def begin(self) -> int:
        """The oldest log offset still kept."""
        return self.segments[0].base

    def find(self, log_offset: int) -> Segment | None:
        """Return the segment that holds a log offset; ``None`` when none does."""
        index = bisect_right(self.segments, log_offset, key=lambda segment: segment.base) - 1
        if index < 0 or log_offset >= self.segments[index].end:
            return None
        return self.segments[index]

    def count_by_segment(self, log_offsets: Iterable[int]) -> dict[int, int]:
        """Return how many of the log offsets each segment holds, by its base; those that no segment holds count nowhere."""
        counts: dict[int, int] = {}
        base = end = 0
        for offset in log_offsets:
            if not base <= offset < end:  # most are beside one another
                segment = self.find(offset)
                if segment is None:
                    continue
                base, end = segment.base, segment.end
            counts[base] = counts.get(base, 0) + 1
        return counts

    def file(self, segment: Segment) -> File:
        """Return the open file of a segment; a missing file is created."""
        return self._files.open(segment.path)

    def hot_from(self) -> int:
        """Return the log offset from which on records are read through the map and need no verification.

        This process appended them, and they are the newest ``hot_bytes`` of the log at most. It is above 0: units with the log
        offset 0 may be those of lost messages.
        """
        return max(self._written_from, self.end - self._hot_bytes, self.begin, 1)

    def view(self, segment: Segment) -> memoryview:
        """Return a map of the whole segment. It is cached; making another map drops those of all but the last two segments."""
        if segment.view is None:
            for other in self.segments[:-2]:
                other.view = None  # a reader that still holds slices keeps its map alive
            segment.view = self._files.open(segment.path).view()
        return segment.view

    def record_at(self, log_offset: int, read: Read = read_here) -> Stored | None:
        """Return the intact record that begins at a log offset; ``None`` when there is none."""
        segment = self.find(log_offset)
        if segment is None or log_offset + SMALLEST_RECORD > segment.end:
            return None
        file = self.file(segment)  # opened once: a segment that is removed meanwhile must not be made again by opening it
        size, magic = BLANK.unpack(read_around(read, file, BLANK_SIZE, log_offset - segment.base))
        if magic != MAGIC or not SMALLEST_RECORD <= size <= segment.end - log_offset:
            return None
        data = memoryview(read_around(read, file, size, log_offset - segment.base))
        return Stored(data, 0, size, log_offset) if is_intact(data, log_offset) else None

    def begun_ms(self, segment: Segment, read: Read) -> int | None:
        """Return the store time of the first record of a segment, in milliseconds; ``None`` when it is not intact."""
        if segment.begun_ms is None:
            first = self.record_at(segment.base, read)
            segment.begun_ms = None if first is None else store_ms(first.buffer)
        return segment.begun_ms

    def ages(self, now_ms: int, read: Read) -> list[SegmentAge]:
        """Return when each full segment was closed: the store time of the first record of the next segment.

        When that record is damaged, the time of a later segment counts, so that no segment is deleted too early.
        """
        closed_ms = now_ms
        ages = []
        for segment, following in reversed(list(pairwise(self.segments))):
            begun_ms = self.begun_ms(following, read)
            closed_ms = closed_ms if begun_ms is None else begun_ms
            ages.append(SegmentAge(segment.base, closed_ms))
        return ages[::-1]

    def remove(self, segment: Segment, run: Run = run_here) -> None:
        """Delete one segment at either end of the log."""
        self.segments.remove(segment)
        self._files.forget(segment.path)
        run(lambda: self._disk.unlink(segment.path))
        run(lambda: self._disk.sync_directory(self.directory))

    def walk(self, start: int) -> Iterator[Stored | Gap]:
        """Yield the intact records of this log from ``start`` on, and the gaps between them; see the function ``walk``."""
        return walk([(segment, self.file(segment)) for segment in self.segments if segment.end > start], start)


def _zero(file: File, size: int, offset: int) -> None:
    file.write(bytes(size), offset)
