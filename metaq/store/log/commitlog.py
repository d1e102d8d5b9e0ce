"""The commit log: one sequence of records shared by all topics, in segment files named by their 20-digit base offset.

::

    commitlog/00000000000000000000      record record … record blank
              00000000001073741824      record record … zeros
              00000000002147483648      zeros (the spare, allocated ahead so that a full disk is met early)

Records are *staged* during one turn of the loop and *appended* by one write per segment. Appending goes through ``pwrite``:
a write through a map into a hole on a full disk would kill the process. Reading what was appended lately goes through a map.
"""

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from metaq.errors import BadRequest, DiskFull, StoreError
from metaq.protocol.record import (
    BLANK,
    BLANK_MAGIC,
    BLANK_SIZE,
    CHECKSUM_SIZE,
    FIXED_SIZE,
    HEADER_SIZE,
    MAGIC,
    MAGIC_BYTES,
    checksum_properties,
    checksum_property,
    is_intact,
    store_ms,
)
from metaq.protocol.text.messages import Stored
from metaq.store.files.disk import File
from metaq.store.files.filecache import FileCache, Read, Run, read_here, run_here
from metaq.store.files.owed import Owed
from metaq.store.log.retention import SegmentAge

NAME_DIGITS: Final = 20
CHUNK: Final = 4 * 1024 * 1024
SMALLEST_RECORD: Final = FIXED_SIZE + CHECKSUM_SIZE


class Segment:
    """One file of the log: bytes ``base`` … ``base + capacity``."""

    __slots__ = ("base", "begun_ms", "capacity", "path", "view")

    def __init__(self, base: int, capacity: int, path: Path) -> None:
        self.base = base
        self.capacity = capacity
        self.path = path
        self.view: memoryview | None = None
        self.begun_ms: int | None = None
        """Store time of the first record, as far as it is known: see ``CommitLog.begun_ms``."""

    @property
    def end(self) -> int:
        return self.base + self.capacity


class Gap(NamedTuple):
    """A range of the log that holds no record to keep, mostly no intact one, although such a record stands behind it."""

    start: int
    end: int


class _Group(NamedTuple):
    """What is staged for one segment: ``parts`` begin at log offset ``start``."""

    segment: Segment
    start: int
    parts: list[bytes]


def _no_fence() -> None:
    """Where there is no other replica."""


def segment_name(base: int) -> str:
    """20 decimal digits, so that names sort like numbers."""
    return f"{base:0{NAME_DIGITS}d}"


def is_segment_name(name: str) -> bool:
    return len(name) == NAME_DIGITS and name.isascii() and name.isdecimal()


class CommitLog:
    """The segments in order, the last of which is written to. One writer."""

    def __init__(self, directory: Path, files: FileCache, segment_bytes: int, hot_bytes: int) -> None:
        """Open what is there without judging it; ``recovery`` decides where the log ends."""
        self.directory = directory
        self._files = files
        self._disk = files.disk
        self._segment_bytes = segment_bytes
        self._hot_bytes = hot_bytes
        self.end = 0
        self.staged_end = 0
        self.fence: Callable[[], None] = _no_fence
        """Raises ``Fenced`` when another replica may be master by now."""
        self._written_from = 0  # what this process appended begins here: it needs no verification
        self.owed = Owed()
        self._lacks: DiskFull | None = None  # why there is no next segment, while the active one is as good as full
        self._spare: Segment | None = None
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
            if size < capacity:  # new, or cut short by a crash: zeros take no room yet
                self._files.open(path).truncate(capacity)
                self._disk.sync_directory(self.directory)
            segments.append(Segment(base, capacity, path))
        return segments

    def _reserve(self, segment: Segment) -> None:
        """Give a segment its room, durably, if it has not got it: a change of role waits for no sync that changes nothing."""
        file = self.file(segment)
        if file.allocate(segment.capacity):
            file.datasync()

    def _create(self, base: int, run: Run) -> Segment:
        """A new segment whose room, size and name are durable."""
        path = self.directory / segment_name(base)
        file = self._files.open(path)
        run(lambda: file.allocate(self._segment_bytes))
        run(file.datasync)
        run(lambda: self._disk.sync_directory(self.directory))
        return Segment(base, self._segment_bytes, path)

    def _use(self, segment: Segment, end: int) -> None:
        self._active = segment
        self._parts: list[bytes] = []
        self._groups = [_Group(segment, end, self._parts)]
        self.room_end = segment.end - BLANK_SIZE

    def start_at(self, end: int) -> None:
        """Take ``end`` as the end of the log: zero what is behind it, durably, and have room there. Called once, by recovery.

        What a full disk does not take is ``owed``.
        """
        while self.segments[-1].base > end:
            self.remove(self.segments[-1])
        segment = self.segments[-1]
        file = self._files.open(segment.path)
        at = file.next_data(end - segment.base)
        zeroed = False
        while at < segment.capacity:
            chunk = file.read(_chunk_end(segment.base + at, segment) - segment.base - at, at)
            if chunk.count(0) != len(chunk):
                self.owed.do(partial(_zero, file, len(chunk), at))
                zeroed = True
            at = file.next_data(at + len(chunk))
        if zeroed:
            self.owed.do(file.datasync)
        self.owed.do(partial(self._reserve, segment))
        self._files.forget(segment.path)  # the search for data has switched its readahead off
        self.end = self.staged_end = self._written_from = end
        self._use(segment, end)

    def rewrite(self, start: int) -> None:
        """Write the log from ``start`` on as it is read: after a failed sync the disk may have older bytes than the cache."""
        for segment in [segment for segment in self.segments if segment.end > start]:
            at = max(start, segment.base)
            while at < segment.end:
                chunk = self.file(segment).read(_chunk_end(at, segment) - at, at - segment.base)
                self.file(segment).write(chunk, at - segment.base)
                at += len(chunk)

    # -- appending ----------------------------------------------------------------------------------------------------

    def stage(self, record: bytes) -> None:
        """Take the next record, still without checksum, which was made for log offset ``staged_end``."""
        parts = self._parts
        parts.append(record)
        parts.append(checksum_property(record))
        self.staged_end += len(record) + CHECKSUM_SIZE

    def stage_all(self, records: Sequence[bytes]) -> None:
        """The same for many records, for which the segment has room."""
        checksums = checksum_properties(records)
        parts = self._parts
        for at, record in enumerate(records):
            parts.append(record)
            parts.append(checksums[at * CHECKSUM_SIZE : (at + 1) * CHECKSUM_SIZE])
        self.staged_end += sum(map(len, records)) + len(checksums)

    def stage_copy(self, records: bytes) -> None:
        """Take the next records as another replica's log has them, with their checksums."""
        self._parts.append(records)
        self.staged_end += len(records)

    def reserve(self, size: int) -> None:
        """Have room for records of so many bytes in all, which one segment could hold; ``DiskFull`` before any is staged."""
        if self.staged_end + size > self.room_end and self._spare is None:
            self._spare = self._following(run_here)

    def end_of(self, sizes: Iterable[int]) -> int:
        """Log offset behind records of these sizes, which one segment could hold, if they were staged now."""
        end, room_end = self.staged_end, self.room_end
        for size in sizes:
            if end + size > room_end:
                end = self._active.end
                room_end = end + self._segment_bytes - BLANK_SIZE
            end += size
        return end

    def make_room(self, size: int) -> None:
        """Go to the next segment: the active one has no room for ``size`` bytes and a blank record.

        Raises ``DiskFull`` when there is no next segment and no room for one; nothing has changed then.
        """
        if size + BLANK_SIZE > self._segment_bytes:
            raise BadRequest(f"a record of {size} bytes does not fit into a segment of {self._segment_bytes} bytes")
        following = self._spare or self._following(run_here)
        self._spare = None
        if self.staged_end < self._active.end:  # else its file was lost, and the log goes on behind it
            self._parts.append(BLANK.pack(self._active.end - self.staged_end, BLANK_MAGIC))
        self._active = following
        self._parts = []
        self._groups.append(_Group(following, following.base, self._parts))
        self.staged_end = following.base
        self.room_end = following.end - BLANK_SIZE

    def append(self) -> None:
        """Write what is staged. On failure nothing of it is in the log, and the error says whether one may go on."""
        groups = self._groups
        try:
            self.owed.check()
            self.fence()
            self._zero_leftover()
            for segment, start, parts in groups:
                if parts:
                    data = b"".join(parts)
                    self._leftover.append((segment, start, len(data)))
                    self._files.open(segment.path).write(data, start - segment.base)
        except StoreError:
            self._take_back(groups)
            raise
        self._leftover.clear()
        self.segments.extend(group.segment for group in groups[1:])
        self.end = self.staged_end
        self._use(self._active, self.end)

    def _take_back(self, groups: list[_Group]) -> None:
        """Forget a failed append: zero what it may have left and give a new segment back."""
        if len(groups) > 1:
            self._spare = groups[1].segment
        self.staged_end = self.end
        self._use(groups[0].segment, self.end)
        with contextlib.suppress(DiskFull):  # no room even for zeros: the next append begins with them
            self._zero_leftover()

    def _zero_leftover(self) -> None:
        """Zero, durably, what a failed append may have left, so that no recovery finds it. ``DiskFull`` may be tried again."""
        for segment, start, size in self._leftover:
            file = self._files.open(segment.path)
            file.write(bytes(size), start - segment.base)
            file.datasync()
        self._leftover.clear()

    @property
    def shortage(self) -> DiskFull | None:
        """Why nothing more is to be staged: there is no room for it."""
        return self.owed.reason or self._lacks

    def prepare(self, run: Run) -> None:
        """Have room for what comes, and the next segment before it is needed; ``DiskFull`` when there is none.

        It is called again and again: when there is room again, messages are taken again.
        """
        self.owed.settle(run)
        if self._spare is None and len(self._groups) == 1:
            active = self._active
            spare = self._following(run)
            if self._active is active and self._spare is None:  # others went on while this one waited
                self._spare = spare

    def _following(self, run: Run) -> Segment:
        """Make the segment behind the active one; ``DiskFull`` when there is no room for it.

        That is a ``shortage`` as soon as the active one is nearly full: large messages would be refused, small ones taken.
        """
        active = self._active
        try:
            segment = self._create(active.end, run)
        except DiskFull as error:
            nearly_full = self.staged_end + min(CHUNK, active.capacity // 8) > self.room_end
            if nearly_full and self._active is active:  # others went on while this one waited
                self._lacks = error
            raise
        self._lacks = None
        return segment

    def sync(self, since: int, run: Run) -> None:
        """Make everything appended since log offset ``since`` durable."""
        # opened before the first wait: a segment that is removed meanwhile must not be made again by opening it
        for file in [self.file(segment) for segment in self.segments if segment.end > since]:
            run(file.datasync)

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def begin(self) -> int:
        """The oldest log offset still kept."""
        return self.segments[0].base

    def find(self, log_offset: int) -> Segment | None:
        """The segment that holds a log offset."""
        index = bisect_right(self.segments, log_offset, key=lambda segment: segment.base) - 1
        if index < 0 or log_offset >= self.segments[index].end:
            return None
        return self.segments[index]

    def file(self, segment: Segment) -> File:
        return self._files.open(segment.path)

    def hot_from(self) -> int:
        """What this process appended from here on is read through the map and needs no verification."""
        return max(self._written_from, self.end - self._hot_bytes, self.begin)

    def view(self, segment: Segment) -> memoryview:
        """The whole segment, mapped."""
        if segment.view is None:
            for other in self.segments[:-2]:
                other.view = None  # a reader that still holds slices keeps its map alive
            segment.view = self._files.open(segment.path).view()
        return segment.view

    def record_at(self, log_offset: int, read: Read = read_here) -> Stored | None:
        """The intact record that begins at a log offset, if there is one."""
        segment = self.find(log_offset)
        if segment is None or log_offset + SMALLEST_RECORD > segment.end:
            return None
        file = self.file(segment)  # opened once: a segment that is removed meanwhile must not be made again by opening it
        size, magic = BLANK.unpack(read(file, BLANK_SIZE, log_offset - segment.base))
        if magic != MAGIC or not SMALLEST_RECORD <= size <= segment.end - log_offset:
            return None
        data = memoryview(read(file, size, log_offset - segment.base))
        return Stored(data, 0, size, log_offset) if is_intact(data, log_offset) else None

    def begun_ms(self, segment: Segment, read: Read) -> int | None:
        """When the first record of a segment was stored; ``None`` without an intact one."""
        if segment.begun_ms is None:
            first = self.record_at(segment.base, read)
            segment.begun_ms = None if first is None else store_ms(first.buffer)
        return segment.begun_ms

    def ages(self, now_ms: int, read: Read) -> list[SegmentAge]:
        """When each full segment was closed: the store time of the first record behind it.

        Of a later one when that record is damaged, so that no segment goes too early.
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
        """``walk`` through this log."""
        return walk([(segment, self.file(segment)) for segment in self.segments if segment.end > start], start)


def walk(segments: list[tuple[Segment, File]], start: int) -> Iterator[Stored | Gap]:
    """All intact records from log offset ``start`` on, and the gaps between them.

    What stands behind the last record is not reported: the caller knows where that one ended.
    """
    bad: int | None = None
    for segment, file in segments:
        steps = _SegmentWalk(segment, file)
        for stored in steps.records(max(start, segment.base)):
            if bad is None and stored.log_offset > steps.expected:
                bad = steps.expected
            if bad is not None:
                yield Gap(bad, stored.log_offset)
                bad = None
            steps.expected = stored.log_offset + stored.size
            yield stored
        if bad is None and steps.expected < segment.end:
            bad = steps.expected


def _zero(file: File, size: int, offset: int) -> None:
    file.write(bytes(size), offset)


def _chunk_end(log_offset: int, segment: Segment) -> int:
    """Where a read from ``log_offset`` on should end: at a multiple of ``CHUNK`` in the file.

    A page that is read although nothing was ever written to it counts as data from then on, so a search for data must not
    go on in the middle of a page (or of a larger folio) that it has just read.
    """
    at = log_offset - segment.base
    return segment.base + min(segment.capacity, (at // CHUNK + 1) * CHUNK)


class _SegmentWalk:
    """Finds the intact records of one segment, through a window of the file that moves on."""

    def __init__(self, segment: Segment, file: File) -> None:
        self._segment = segment
        self._file = file
        self._window = memoryview(b"")
        self._window_at = 0
        self.expected = segment.base
        """Where the next record should begin."""

    def records(self, start: int) -> Iterator[Stored]:
        """Records in order. ``expected`` becomes the segment's end when a blank record closes it."""
        segment = self._segment
        at = self.expected = start
        while at + BLANK_SIZE <= segment.end:
            window = self._bytes(at, SMALLEST_RECORD)
            size, magic = BLANK.unpack_from(window)
            if magic == MAGIC and SMALLEST_RECORD <= size <= segment.end - at:
                window = self._bytes(at, size)
                if is_intact(window[:size], at):
                    yield Stored(window, 0, size, at)
                    at += size
                    continue
            if magic == BLANK_MAGIC and size == segment.end - at:
                self.expected = segment.end
                return
            at = self._next_candidate(at)

    def _bytes(self, at: int, size: int) -> memoryview:
        """At least ``size`` bytes from log offset ``at`` on, zeros behind the segment's end."""
        low = at - self._window_at
        if low < 0 or low + size > len(self._window):
            data = self._file.read(max(size, min(CHUNK, self._segment.end - at)), at - self._segment.base)
            self._window = memoryview(data.ljust(size, b"\0"))
            self._window_at = at
            low = 0
        return self._window[low:]

    def _next_candidate(self, at: int) -> int:
        """The next place after ``at`` where a record may begin: the magic, and behind it the place's own offset."""
        segment = self._segment
        frontier = at + 1
        while frontier < segment.end:
            data_at = segment.base + self._file.next_data(frontier - segment.base)
            # a header across the border of two chunks is seen whole in the second
            place = max(at + 1, data_at - HEADER_SIZE)
            frontier = _chunk_end(data_at, segment)
            data = self._file.read(frontier - place, place - segment.base)
            found = data.find(MAGIC_BYTES, 4)
            while found >= 0:
                begin = place + found - 4
                if data[found + 24 : found + 32] == begin.to_bytes(8):
                    return begin
                found = data.find(MAGIC_BYTES, found + 1)
        return segment.end
