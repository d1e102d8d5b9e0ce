"""Copying the log of another replica: the same records at the same log offsets.

Received records are staged one by one, like puts, and one append adds them to the log and the queues. A group
(``metaq.store.recordgroups``) waits until all of it has arrived: only whole groups are appended.
"""

import struct
from itertools import islice
from typing import Final

from metaq.errors import CorruptRecord
from metaq.protocol.record import (
    BLANK,
    BLANK_MAGIC,
    BLANK_SIZE,
    CHECKSUM_SIZE,
    HEADER_SIZE,
    MAGIC,
    checksum_property,
    identity,
    is_intact,
)
from metaq.protocol.text.messages import HEADER_SIZE_TEXT, Stored
from metaq.store.files.filecache import Read, read_around, read_here
from metaq.store.log.commitlog import CommitLog
from metaq.store.log.segments import SMALLEST_RECORD, Segment
from metaq.store.messagestore import Ends, MessageStore
from metaq.store.queues.consumequeue import ConsumeQueue
from metaq.store.queues.dispatch import enter
from metaq.store.recordgroups import group_end
from metaq.store.runs import kept_back, kept_from, offsets_of

_HEAD: Final = struct.Struct(">ii4xi4xqq40xqi")
"""Fields of a record's header: size, magic, partition, queue offset, log offset, text position, body length."""

assert _HEAD.size == HEADER_SIZE


class Copier:
    """A receiver of another replica's log, from the end of this log on; it stages the records it is sent."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self._begun = b""
        """The first bytes of a record whose end has not arrived."""
        self._begun_at = 0
        self._group: list[Stored] = []
        self._group_end = 0
        self._queues: dict[tuple[bytes, int], ConsumeQueue] = {}
        """By the bytes after the body of a record without properties, which name the topic, and by partition."""

    def take(self, log_offset: int, data: bytes) -> None:
        """Stage the next bytes of the log. The caller has called ``store.check_writable``.

        They must begin where the bytes before ended, or at the next segment when this one has no more records. Raises
        ``CorruptRecord`` when they do not, or were altered on their way, and ``DiskFull`` when the log cannot grow; after that,
        begin again at the log's end with a new ``Copier``.
        """
        if self._begun:
            if log_offset != self._begun_at + len(self._begun):
                raise CorruptRecord(f"the log continues at {log_offset}, in the middle of the record at {self._begun_at}")
            log_offset, data = self._begun_at, self._begun + data
        view, most = memoryview(data), self._store.settings.segment_bytes
        at = self._take_plain(data, 0, log_offset)
        while len(data) - at >= BLANK_SIZE:
            size, magic = BLANK.unpack_from(view, at)
            if magic != MAGIC or not SMALLEST_RECORD <= size <= most:
                raise CorruptRecord(f"the data sent for log offset {log_offset + at} is not a record")
            if at + size > len(data):
                break
            if not is_intact(view[at : at + size], log_offset + at):
                raise CorruptRecord(f"the record sent as log offset {log_offset + at} was changed on the way")
            self._take_record(Stored(view, at, size, log_offset + at))
            at = self._take_plain(data, at + size, log_offset)
        self._begun, self._begun_at = bytes(view[at:]), log_offset + at

    def _take_plain(self, data: bytes, start: int, log_offset: int) -> int:
        """Stage the records from ``start`` on that are next in known queues and have no properties, so no keys.

        Return where they end in ``data``. Most records are like that, and here one costs a third of ``stage_copy``. The first
        record that does not fit ends the run; the caller finds out what is wrong with it, if anything.
        """
        if log_offset + start != self._store.log.staged_end:  # also while a group waits for its end
            return start
        queues, touched, at, last = self._queues, self._store.touch, start, len(data) - HEADER_SIZE
        before: ConsumeQueue | None = None
        while at <= last:
            size, magic, partition, ordinal, offset, position, length = _HEAD.unpack_from(data, at)
            end = at + size - CHECKSUM_SIZE
            queue = queues.get((data[at + HEADER_SIZE + length : end], partition))
            if queue is None or length < 0 or magic != MAGIC or (ordinal, position) != (queue.next, queue.text_end):
                break
            if offset != log_offset + at or data[end : at + size] != checksum_property(data[at:end]):
                break
            if queue is not before:
                touched(queue)
                before = queue
            queue.add(offset, size, 0, HEADER_SIZE_TEXT + length)
            at += size
        if at > start:
            self._store.log.stage_copy(data[start:at])
        return at

    def _take_record(self, stored: Stored) -> None:
        """Stage an intact record, or hold it back until its group is whole."""
        if self._group:
            self._group.append(stored)
            if stored.log_offset + stored.size >= self._group_end:
                for member in self._group:
                    self._stage(member)
                self._group = []
            return
        end = group_end(stored)
        if end is None or end <= stored.log_offset + stored.size:
            self._stage(stored)
        else:
            self._group, self._group_end = [stored], end

    def _stage(self, stored: Stored) -> None:
        queue = stage_copy(self._store, stored)
        self._queues[queue.tail, queue.partition] = queue


def stage_copy(store: MessageStore, stored: Stored) -> ConsumeQueue:
    """Stage an intact record that already has its log offset, and return its queue.

    Raises ``CorruptRecord`` when its log offset is not where the log ends, and ``DiskFull`` when the log cannot grow.
    """
    log, offset, size = store.log, stored.log_offset, stored.size
    if offset == log.room_end + BLANK_SIZE != log.staged_end:
        log.make_room(size)
    if offset != log.staged_end:
        raise CorruptRecord(f"a record of log offset {offset} was sent, but this log continues at {log.staged_end}")
    view = stored.buffer[stored.at : stored.at + size]
    whose = identity(view)
    queue = store.queue(whose.topic, whose.partition)
    store.touch(queue)
    log.stage_copy(bytes(view))
    enter(queue, stored, whose)
    store.copied(view, offset)
    return queue


def piece(log: CommitLog, at: int, most: int, read: Read) -> tuple[int, bytes | memoryview]:
    """Return the next bytes of a log for a ``Copier``, and the log offset at which they begin: ``at``, or the next segment.

    They are about ``most`` bytes, none at the log's end. The part that this process appended lately is trusted, the rest is
    verified. Raises ``CorruptRecord`` for a damaged record.
    """
    segment = log.find(at)
    if at >= log.end or segment is None:
        return at, b""
    file = log.file(segment)  # opened once: a segment that is removed meanwhile must not be made again by opening it
    start, size = at - segment.base, min(max(most, SMALLEST_RECORD), log.end - at, segment.end - at)
    if at >= log.hot_from():
        data: bytes | memoryview = log.view(segment)[start : start + size]
        if log.end <= segment.end:
            return at, data
    else:
        data = read_around(read, file, size, start)
    whole = _whole_records(memoryview(data), at, segment)
    if whole < 0:
        return piece(log, segment.end, most, read)
    if whole:
        return at, data[:whole]
    wanted: int = BLANK.unpack_from(data)[0]
    if wanted <= size or segment.end - at < wanted or not is_intact(memoryview(read_around(read, file, wanted, start)), at):
        raise CorruptRecord(f"the record at log offset {at} is damaged, and nothing after it can be copied: run metaq verify")
    return at, read(file, wanted, start)


def _whole_records(data: memoryview, log_offset: int, segment: Segment) -> int:
    """Return how many bytes from the begin of ``data`` are intact records; −1 when the segment has no more records."""
    at = 0
    while at + BLANK_SIZE <= len(data):
        size, magic = BLANK.unpack_from(data, at)
        if magic == BLANK_MAGIC and size == segment.end - log_offset - at:
            return at or -1
        if at + size > len(data) or not is_intact(data[at : at + size], log_offset + at):
            break
        at += size
    return at


def hide_from(store: MessageStore, log_offset: int) -> None:
    """Hide messages from a log offset on from the readers of a store just opened, until ``MessageStore.publish``."""
    hidden: Ends = {}
    for queue in store.queues.values():
        count, position = end_before(store, queue, log_offset)
        if count < queue.next:
            hidden[queue] = (queue.next, queue.text_end)
            queue.publish(count, position)
    store.published_end = min(store.published_end, log_offset)
    store.hide(hidden)


def end_before(store: MessageStore, queue: ConsumeQueue, log_offset: int) -> tuple[int, int]:
    """Return ordinal and text position of the first message of a queue whose record begins at or after a log offset."""
    count = _count_before(store.log, queue, log_offset)
    for _, offset in offsets_of(
        queue, kept_from(queue, count, queue.next, read_here), read_here
    ):  # the first intact one has its position
        stored = store.log.record_at(offset)
        if stored is not None:  # the first intact one has its text position
            return count, identity(stored.buffer[stored.at :]).text_position
    return count, queue.text_end


def _count_before(log: CommitLog, queue: ConsumeQueue, log_offset: int) -> int:
    """Return the ordinal after the last message of a queue whose record begins before a log offset."""
    count = _search(queue, log_offset)
    before = islice(offsets_of(queue, kept_back(queue, count - 1, queue.base, read_here), read_here), 2)
    after = islice(offsets_of(queue, kept_from(queue, count, queue.next, read_here), read_here), 2)
    if all(offset < log_offset for _, offset in before) and all(offset >= log_offset for _, offset in after):
        return count
    # a damaged unit has led the search astray: walk back to the first one that its record confirms
    for ordinal, offset in offsets_of(queue, kept_back(queue, queue.next - 1, queue.base, read_here), read_here):
        stored = log.record_at(offset) if offset < log_offset else None
        if stored is not None and identity(stored.buffer)[:3] == (queue.topic, queue.partition, ordinal):
            return ordinal + 1
    return queue.base


def _search(queue: ConsumeQueue, log_offset: int) -> int:
    """Return what ``_count_before`` does, if all units are right."""
    low = count = queue.base
    high = queue.next
    while low < high:
        middle = (low + high) // 2
        # a lost message has no log offset: the unit before it decides
        place, offset = next(offsets_of(queue, kept_back(queue, middle, low, read_here), read_here), (low - 1, -1))
        if offset >= log_offset:
            high = place
            continue
        if place >= low:
            count = place + 1
        low = middle + 1
    return count
