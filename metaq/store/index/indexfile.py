"""One file of the key index: a hash table on the disk from ``topic#key`` to the log offsets of the records with that key.

``index/<yyyyMMddHHmmssSSS>`` is named by its time of creation (UTC) and has 420,000,040 bytes with the default settings
(specs: store format, section 6)::

    at              size  part
    0                 40  header
    40             4 × S  slots: the newest item whose hash is the slot's number modulo S, 0 without one
    40 + 4 × S    20 × N  items, in the order of the log; number 0 is never used

    header  at  size  field                    item  at  size  field
             0     8  first item's store time         0     4  hash of topic#key
             8     8  last item's store time          4     8  log offset of the record
            16     8  first item's log offset        12     4  seconds since the header's first store time
            24     8  last item's log offset         16     4  the item before in the same slot, 0 without one
            32     4  slots in use
            36     4  items and one: the next item's number

An item is in the file before anything points at it. While records are entered into a file, its slots are a table in memory,
which remembers the spans in which the file differs from it; ``flush`` makes the items durable and only then writes those spans.
So whichever slots a power cut leaves, the items that the checkpoint did not count can be taken back one by one, newest first,
and entered again (``take_back``).

The files are written with ``pwrite`` into space allocated before, and read with ``pread``.
"""

import mmap
import struct
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from librt.strings import BytesWriter, write_i32_be, write_i64_be

from metaq.errors import CorruptRecord
from metaq.protocol.keys import KeyHasher
from metaq.store.files.disk import File
from metaq.store.files.filecache import FileCache, Read, Run, read_here

HEADER: Final = struct.Struct(">qqqqii")
HEADER_SIZE: Final = 40
SLOT: Final = struct.Struct(">i")
SLOT_SIZE: Final = 4
ITEM: Final = struct.Struct(">iqii")
ITEM_SIZE: Final = 20
NAME_DIGITS: Final = 17
MOST_SECONDS: Final = 0x7FFFFFFF

SPAN_SLOTS: Final = 1024
"""Slots in a span of 4 KiB, the unit in which changes are tracked."""
SPANS_A_SYNC: Final = 512
"""Spans that a flush copies at once, 2 MiB in 1 ms, before it syncs the items that they point at."""
SPANS_A_READ: Final = 1024
ITEMS_A_READ: Final = 4096

assert HEADER.size == HEADER_SIZE
assert ITEM.size == ITEM_SIZE

Entry = tuple[int, str, tuple[str, ...], int]
"""Log offset, topic, distinct keys and store time of a record. A plain tuple, which garbage collection can leave untracked."""


class Item(NamedTuple):
    """One item of a file; ``seconds`` count from the file's first store time, ``previous`` is the item before in its slot."""

    hash: int
    log_offset: int
    seconds: int
    previous: int


def file_name(created_ms: int) -> str:
    """Return the name of a file created at a time: ``yyyyMMddHHmmssSSS`` in UTC."""
    return f"{datetime.fromtimestamp(created_ms // 1000, UTC):%Y%m%d%H%M%S}{created_ms % 1000:03d}"


def created_ms(name: str) -> int | None:
    """Return the time of creation in a file's name, in milliseconds; ``None`` when it is not the name of an index file."""
    if len(name) != NAME_DIGITS or not (name.isascii() and name.isdecimal()):
        return None
    try:
        seconds = datetime.strptime(name[:-3], "%Y%m%d%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(seconds.timestamp()) * 1000 + int(name[-3:])


def file_size(slots: int, entries: int) -> int:
    """Return the size of an index file in bytes."""
    return HEADER_SIZE + slots * SLOT_SIZE + entries * ITEM_SIZE


def swapped(data: bytes | memoryview) -> "array[int]":
    """Return slots converted from the file's byte order to the machine's, or back."""
    slots = array("i", bytes(data))
    if sys.byteorder == "little":
        slots.byteswap()
    return slots


class Captured(NamedTuple):
    """The state of one file at some moment: its count of items and its header."""

    file: "IndexFile"
    items: int
    header: bytes


class IndexFile:
    """One hash file. Its counters run ahead of it: items from ``written`` on wait in memory, changed slots in the table."""

    def __init__(self, path: Path, files: FileCache, slots: int, entries: int) -> None:
        self.path = path
        self.slots = slots
        self.entries = entries
        self._files = files
        self.begin_ms = self.end_ms = self.begin_offset = self.end_offset = 0
        self.used = 0
        self.count = self.written = 1
        self._tail = bytearray()  # the items ``written`` … ``count``
        self._table: memoryview[int] | None = None  # all slots, in the machine's byte order, while they may change
        self._changed: set[int] = set()  # spans of the table that are not written to the file
        self._sealed = False
        self._durable = 0  # the count as of the last flush; 0: not even the file is durable
        self.gone = False
        """True once the file is deleted."""

    # -- places -------------------------------------------------------------------------------------------------------

    def slot_at(self, slot: int) -> int:
        """Return the offset of a slot in the file."""
        return HEADER_SIZE + slot * SLOT_SIZE

    def item_at(self, number: int) -> int:
        """Return the offset of an item in the file."""
        return HEADER_SIZE + self.slots * SLOT_SIZE + number * ITEM_SIZE

    def seconds(self, store_ms: int) -> int:
        """Return the seconds in the item of a record stored at ``store_ms``: 0 when the clock has gone back."""
        return min(max(0, (store_ms - self.begin_ms) // 1000), MOST_SECONDS)

    def opened(self) -> File:
        """Return the open file."""
        return self._files.open(self.path)

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return file_size(self.slots, self.entries)

    @property
    def changed(self) -> bool:
        """True while a power cut could lose items of the file."""
        return self._durable != self.count

    @property
    def is_new(self) -> bool:
        """True until the first flush: the file's name may not survive a power cut."""
        return self._durable == 0

    # -- loading ------------------------------------------------------------------------------------------------------

    def read_header(self) -> None:
        """Read the header into the counters. Raises ``CorruptRecord`` when it, or the file's size, cannot be right."""
        file = self.opened()
        if file.size() != self.size:
            raise CorruptRecord(f"{self.path} has {file.size()} bytes instead of {self.size}")
        header = HEADER.unpack(file.read(HEADER_SIZE, 0))
        begin_ms, end_ms, begin_offset, end_offset, used, count = header
        if not (1 <= count <= self.entries and 0 <= used < count and 0 <= begin_offset <= end_offset):
            raise CorruptRecord(f"{self.path} has the header {header}, which cannot be right")
        self.begin_ms, self.end_ms, self.begin_offset, self.end_offset = begin_ms, end_ms, begin_offset, end_offset
        self.used, self.count, self.written, self._durable = used, count, count, count

    def take_back(self, count: int, store_ms: Callable[[int], int | None]) -> None:
        """Take back the items from ``count`` on, durably: no slot points at one of them afterwards.

        ``store_ms`` returns the store time of the record at a log offset, or ``None`` when it is not known. Raises
        ``CorruptRecord`` when the file has fewer items.
        """
        if not 1 <= count <= self.count:
            raise CorruptRecord(f"{self.path} counts {self.count - 1} items, the checkpoint {count - 1}")
        file = self.opened()
        spans: dict[int, bytearray] = {}
        for number, item in reversed(list(enumerate(self.items(count), count))):
            if item.previous == 0 and number < self.count:
                self.used -= 1
            span, slot = divmod(item.hash % self.slots, SPAN_SLOTS)
            if span not in spans:
                size = min(SPAN_SLOTS, self.slots - span * SPAN_SLOTS) * SLOT_SIZE
                spans[span] = bytearray(file.read(size, self.slot_at(span * SPAN_SLOTS)))
            if SLOT.unpack_from(spans[span], slot * SLOT_SIZE)[0] == number:
                SLOT.pack_into(spans[span], slot * SLOT_SIZE, item.previous)
        for span in sorted(spans):  # unchanged ones too: after a failed sync the disk may lag behind the page cache
            file.write(spans[span], self.slot_at(span * SPAN_SLOTS))
        if spans or count < self.count:
            if count < self.count:
                self._count_back(count, store_ms)
            file.write(self._header(), 0)
            file.datasync()

    def items(self, number: int, end: int = 0) -> Iterator[Item]:
        """Yield the items from ``number`` on and before ``end``; without ``end``, up to where nothing was ever written."""
        limit = end or self.entries
        while number < limit:
            size = min(ITEMS_A_READ, limit - number) * ITEM_SIZE
            for item in ITEM.iter_unpack(self.opened().read(size, self.item_at(number))):
                if not end and not any(item):
                    return
                yield Item._make(item)
            number += ITEMS_A_READ

    def _count_back(self, count: int, store_ms: Callable[[int], int | None]) -> None:
        self.count = self.written = self._durable = count
        if count == 1:
            self.begin_ms = self.end_ms = self.begin_offset = self.end_offset = 0
            return
        _, self.end_offset, seconds, _ = self.item(count - 1, read_here, self.opened())
        known = store_ms(self.end_offset)
        self.end_ms = self.begin_ms + seconds * 1000 if known is None else known

    # -- entering -----------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """True while records can be entered: the slots are loaded, and the file is not sealed."""
        return self._table is not None and not self._sealed

    def load_slots(self, read: Read) -> None:
        """Load the table of slots into memory, unless it is there or the file is sealed."""
        if self.is_open or self._sealed:
            return
        table = memoryview(mmap.mmap(-1, self.slots * SLOT_SIZE)).cast("i")  # pages that are never written take no memory
        file = self.opened()
        for first in range(0, self.slots if self.count > 1 else 0, SPANS_A_READ * SPAN_SLOTS):
            last = min(self.slots, first + SPANS_A_READ * SPAN_SLOTS)
            slots = swapped(read(file, (last - first) * SLOT_SIZE, self.slot_at(first)))
            for at in range(0, last - first, SPAN_SLOTS):
                span = slots[at : at + SPAN_SLOTS]
                if any(span):
                    table[first + at : first + at + len(span)] = memoryview(span)
        if self._table is None:  # another call may have loaded it meanwhile, and entered records
            self._table = table

    def enter(self, entries: Sequence[Entry], hasher: KeyHasher) -> int:
        """Add the keys of records, in the order of the log; return how many records found room. The slots are loaded."""
        table, changed, slots = self._table, self._changed, self.slots
        assert table is not None
        items = BytesWriter()
        count, done, most, seconds_of, seconds = self.count, 0, self.entries - 1, -1, 0
        for log_offset, topic, keys, store_ms in entries:
            if count == 1:
                self.begin_ms, self.begin_offset = store_ms, log_offset
            elif count + len(keys) > self.entries:
                break
            if store_ms != seconds_of:
                seconds_of, seconds = store_ms, self.seconds(store_ms)
            for key in keys if len(keys) <= most else keys[:most]:
                value = hasher.hash(topic, key)
                slot = value % slots
                previous = table[slot]
                if not previous:
                    self.used += 1
                write_i32_be(items, value)
                write_i64_be(items, log_offset)
                write_i32_be(items, seconds)
                write_i32_be(items, previous)
                table[slot] = count
                changed.add(slot // SPAN_SLOTS)
                count += 1
            self.end_ms, self.end_offset = store_ms, log_offset
            done += 1
        self._tail += items.getvalue()
        self.count = count
        return done

    def write(self, run: Run) -> None:
        """Write the items that wait in memory. On ``DiskFull`` or ``DiskFailed`` they stay there."""
        data, first = bytes(self._tail), self.written
        if not data:
            return
        file = self.opened()
        run(lambda: file.write(data, self.item_at(first)))
        if self.written == first:  # another call may have written them meanwhile
            del self._tail[: len(data)]
            self.written += len(data) // ITEM_SIZE

    def _header(self) -> bytes:
        return HEADER.pack(self.begin_ms, self.end_ms, self.begin_offset, self.end_offset, self.used, self.count)

    def seal(self) -> None:
        """Accept no more records; the table of slots is freed when all of it is durable."""
        self._sealed = True
        self._let_go()

    def _let_go(self) -> None:
        if self._sealed and not self.changed:  # otherwise it is still needed: a flush in progress may fail
            self._table = None

    # -- making it durable --------------------------------------------------------------------------------------------

    def capture(self) -> "Captured":
        """Return the present state, with all that is entered so far, for ``flush`` to make durable."""
        return Captured(self, self.count, self._header())

    def flush(self, captured: "Captured", run: Run) -> None:
        """Make the captured state durable, and perhaps later items; the module describes the order. One call at a time.

        Raises ``DiskFull`` or ``DiskFailed``; the changed slots then stay to be written.
        """
        file = self.opened()
        changed, self._changed = self._changed, set()
        try:
            spans = sorted(changed)
            for first in range(0, len(spans) or 1, SPANS_A_SYNC):
                copies = self._copies(spans[first : first + SPANS_A_SYNC])
                self.write(run)
                run(file.datasync)
                for at, data in copies:
                    run(partial(file.write, data, at))
            run(lambda: file.write(captured.header, 0))
            run(file.datasync)
            changed = set()
        finally:
            self._changed |= changed
        self._durable = captured.items
        self._let_go()

    def _copies(self, spans: Sequence[int]) -> list[tuple[int, bytes]]:
        """Return copies of the slots of ascending spans, adjacent spans in one: offset in the file, and bytes."""
        copies, first = [], 0
        for index, span in enumerate(spans, start=1):
            if index == len(spans) or spans[index] != span + 1:
                slot, end = spans[first] * SPAN_SLOTS, min(self.slots, (span + 1) * SPAN_SLOTS)
                assert self._table is not None
                copies.append((self.slot_at(slot), swapped(self._table[slot:end].tobytes()).tobytes()))
                first = index
        return copies

    # -- reading ------------------------------------------------------------------------------------------------------

    def head(self, slot: int, read: Read, file: File) -> int:
        """Return the number of the newest item in a slot, 0 without one; ``file`` is the open file."""
        if self._table is not None:
            return self._table[slot]
        number: int = SLOT.unpack(read(file, SLOT_SIZE, self.slot_at(slot)))[0]
        return number

    def item(self, number: int, read: Read, file: File) -> Item:
        """Return the item of a number below ``count``; ``file`` is the open file."""
        if number >= self.written:
            return Item(*ITEM.unpack_from(self._tail, (number - self.written) * ITEM_SIZE))
        return Item(*ITEM.unpack(read(file, ITEM_SIZE, self.item_at(number))))
