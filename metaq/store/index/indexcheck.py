"""Checking the key index against the log, record by record, as ``verify`` walks it.

Items are in the order of the log, so one pass compares both: each key of each record up to the checkpoint's mark must be the
next item. The chains that the items form determine the slots, which are compared at the end.
"""

from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from metaq.errors import CorruptRecord, ReadFailed
from metaq.protocol.keys import key_hash, keys_of
from metaq.protocol.record import decode_record
from metaq.protocol.text.messages import Stored
from metaq.store.files.disk import Disk
from metaq.store.files.filecache import FileCache
from metaq.store.index.indexfile import HEADER, HEADER_SIZE, SLOT_SIZE, IndexFile, Item, created_ms, swapped
from metaq.store.index.keyindex import IndexMark

OPEN_FILES: Final = 4
REPORTED_A_FILE: Final = 100
"""Wrong items that are reported for one file: a single missing item makes all after it wrong."""

Explained = Callable[[int], bool]
"""``explained(log_offset)``: true when there is a known reason why no intact record is at that log offset."""


class IndexCheck:
    """One verification of the files and items that a checkpoint counts; the next start deletes newer files and items."""

    def __init__(
        self, directory: Path, disk: Disk, mark: IndexMark, add: Callable[[Path, int, str], None], explained: Explained
    ) -> None:
        """Open the files that the checkpoint ``mark`` counts. ``add`` receives each fault: file, offset in the file, text."""
        self.items = 0
        """Items checked so far."""
        self._mark = mark
        self._add = add
        self._explained = explained
        names = [name for name in disk.list_directory(directory) if created_ms(name) is not None and name <= mark.file]
        if mark.file and mark.file not in names:
            add(directory / mark.file, 0, "missing, although the checkpoint counts it")
        cache = FileCache(disk, OPEN_FILES)
        self._files: list[_File] = []
        for name in names:
            file = IndexFile(directory / name, cache, mark.slots, mark.entries)
            try:
                file.read_header()
                if name == mark.file and file.count < mark.items:
                    raise CorruptRecord(f"{file.path} counts {file.count - 1} items, the checkpoint {mark.items - 1}")
            except (CorruptRecord, ReadFailed) as error:
                add(file.path, 0, str(error))
            else:
                self._files.append(_File(file, mark.items if name == mark.file else file.count, add))
        self._whole = bool(mark.file) and len(self._files) == len(names)
        self._passed: tuple[_File, int, Item] | None = None  # the last item whose record is thought to be gone
        self._stream = self._all_items()
        self._next = next(self._stream, None)

    def _all_items(self) -> Iterator[tuple["_File", int, Item]]:
        for file in list(self._files):
            try:
                for number, item in file.items():
                    yield file, number, item
            except ReadFailed as error:
                self._add(file.file.path, 0, str(error))
                self._files.remove(file)
                self._whole = False

    def record(self, stored: Stored) -> None:
        """Compare the keys of the next intact record of the log with the next items."""
        if not self._whole or stored.log_offset >= self._mark.log_offset:
            return
        record = decode_record(stored.buffer[stored.at : stored.at + stored.size])
        for key in keys_of(record.topic, record.sys_flag, record.properties):
            self._pass_lost(stored.log_offset)
            if not self._whole:  # the next items cannot be read
                return
            self._compare(key_hash(record.topic, key), stored.log_offset, record.store_ms)

    def _pass_lost(self, log_offset: int) -> None:
        """Skip the items before a log offset whose records are known to be gone."""
        self._passed = None
        while self._next is not None and self._next[2].log_offset < log_offset and self._explained(self._next[2].log_offset):
            self._passed = self._next
            self._advance()

    def _advance(self) -> None:
        self.items += 1
        self._next = next(self._stream, None)

    def _compare(self, value: int, log_offset: int, store_ms: int) -> None:
        due = self._next
        fits = due is not None and due[2][:2] == (value, log_offset)
        if not fits and self._passed is not None and self._passed[2].hash == value:
            due = self._passed  # this item is due: its log offset is wrong, so it was skipped
        if due is None:
            newest = self._files[-1]
            newest.wrong(newest.count, f"no item for the record at log offset {log_offset}")
            return
        file, number, item = due
        told = (value, log_offset, file.seconds(number, store_ms))
        if item[:3] != told:
            file.wrong(number, f"item {number} says {tuple(item[:3])}, its record {told}")
        if due is self._next:
            self._advance()

    def finish(self) -> None:
        """Check the remaining items, slots and headers after the last record."""
        while self._next is not None:
            file, number, item = self._next
            if self._whole and not self._explained(item.log_offset):
                file.wrong(number, f"item {number} leads to log offset {item.log_offset}, where no record with keys is")
            self._advance()
        for each in self._files:
            try:
                each.finish(is_newest=each.file.path.name == self._mark.file)
            except ReadFailed as error:
                self._add(each.file.path, 0, str(error))


class _File:
    """One index file, and the slots and the header that its items determine."""

    def __init__(self, file: IndexFile, count: int, add: Callable[[Path, int, str], None]) -> None:
        self.file = file
        self.count = count
        self._add = add
        self._heads = array("i", bytes(SLOT_SIZE * file.slots))
        self._used = 0
        self._first_ms: int | None = None
        self._last_ms: int | None = None
        self._first: Item | None = None
        self._last: Item | None = None
        self._reported = 0

    def wrong(self, number: int, text: str) -> None:
        """Report an item as wrong, at most ``REPORTED_A_FILE`` times."""
        self._reported += 1
        if self._reported <= REPORTED_A_FILE:
            self._add(self.file.path, self.file.item_at(number), text)

    def items(self) -> Iterator[tuple[int, Item]]:
        """Yield the items that the checkpoint counts, with their numbers; check that each names the one before in its slot."""
        for number, item in enumerate(self.file.items(1, self.count), 1):
            slot = item.hash % self.file.slots
            if item.previous != self._heads[slot]:
                self.wrong(number, f"item {number} follows {item.previous}, {self._heads[slot]} is due")
            self._used += self._heads[slot] == 0
            self._heads[slot] = number
            self._first = self._first or item
            self._last = item
            yield number, item

    def seconds(self, number: int, store_ms: int) -> int:
        """Return the seconds that item ``number``, of a record stored at ``store_ms``, must have; note the header's times."""
        if number == 1:
            self._first_ms = store_ms
        self._last_ms = store_ms if number == self.count - 1 else None
        return self.file.seconds(store_ms)

    def finish(self, *, is_newest: bool) -> None:
        """Check slots and header, after all items were read."""
        opened = self.file.opened()
        table = swapped(opened.read(SLOT_SIZE * self.file.slots, HEADER_SIZE))
        if is_newest:
            for number, item in reversed(list(enumerate(self.file.items(self.count), self.count))):
                if table[item.hash % self.file.slots] == number:
                    table[item.hash % self.file.slots] = item.previous
        if table != self._heads:
            for slot, (found, due) in enumerate(zip(table, self._heads, strict=True)):
                if found != due:
                    self._add(self.file.path, self.file.slot_at(slot), f"slot {slot} leads to item {found}, {due} is due")
        self._check_header()

    def _check_header(self) -> None:
        begin_ms, end_ms, begin, end, used, count = HEADER.unpack(self.file.opened().read(HEADER_SIZE, 0))
        for item in self.file.items(self.count, count):  # written before the header, and not counted by a checkpoint yet
            self._used += item.previous == 0
            self._first = self._first or item
            self._last, self._last_ms = item, None
        due = (self._first.log_offset, self._last.log_offset) if self._first and self._last else (0, 0)
        times = (self._first_ms, self._last_ms) if self._first else (0, 0)
        wrong = (begin, end) != due or used != self._used
        if wrong or any(known not in (None, told) for known, told in zip(times, (begin_ms, end_ms), strict=True)):
            self._add(self.file.path, 0, "the header is not that of the items behind it")
