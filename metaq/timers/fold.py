"""Parks and marks read from the log, in its order: at a start, and on a slave."""

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Final, NamedTuple

from metaq.errors import CorruptRecord
from metaq.message import TopicPartition
from metaq.protocol.text.messages import Stored
from metaq.store.copies.snapshots import offset_from
from metaq.store.files.filecache import Read
from metaq.store.messagestore import MessageStore
from metaq.timers.records import (
    MARKS,
    PARKS,
    Parks,
    TimerEvent,
    due_of_first,
    event_of_mark,
    event_of_park,
    key_of,
)

logger = logging.getLogger(__name__)

READ_BYTES: Final = 256 * 1024


class Ordinals(NamedTuple):
    """A place in both partitions: how many of their records lie before it."""

    parks: int
    marks: int


def readable(store: MessageStore) -> Ordinals:
    """Return the place up to which readers see both partitions, at one moment."""
    queues = store.queues
    return Ordinals(*(queues[key].readable if key in queues else 0 for key in (PARKS, MARKS)))


def ends(store: MessageStore) -> Ordinals:
    """Return the place of the next records."""
    queues = store.queues
    return Ordinals(*(queues[key].next if key in queues else 0 for key in (PARKS, MARKS)))


def place_of(store: MessageStore, log_offset: int, read: Read) -> Ordinals:
    """Return the place of the first records at or after a log offset that are still kept."""
    return Ordinals(*(_first_at(store, key, log_offset, read) for key in (PARKS, MARKS)))


def _first_at(store: MessageStore, key: TopicPartition, log_offset: int, read: Read) -> int:
    queue = store.queues.get(key)
    if queue is None:
        return 0
    low, high = store.first(queue, read)[0], queue.next
    while low < high:
        middle = (low + high) // 2
        if offset_from(queue, middle, high, read) < log_offset:
            low = middle + 1
        else:
            high = middle
    return low


class _Mark(NamedTuple):
    """A mark that was read."""

    ordinal: int
    log_offset: int
    """Its place; that of the mark before it when it is lost."""
    event: TimerEvent | None
    """Its meaning; ``None`` when it is damaged or lost."""


class _Found:
    """The events of one portion, in the order of the log."""

    def __init__(self) -> None:
        self.events: list[TimerEvent] = []
        self.parks = self.marks = 0
        """Records, lost ones among them."""
        self._place = 0  # of the last park
        self._run: Parks | None = None  # the last of the events, when more parks may join it

    @property
    def size(self) -> int:
        """The number of records."""
        return self.parks + self.marks

    def add_park(self, stored: Stored | None) -> None:
        self.parks += 1
        if stored is None:
            _report_lost(self._place)
            return
        buffer, at, size, place = stored
        self._place = place
        due_ms = due_of_first(bytes(buffer[at : at + size]))
        if due_ms is None:
            self._add(_read(event_of_park, stored))
            return
        run = self._run
        if run is None or run.is_full:
            run = Parks()
            self._add(run)
            self._run = run
        run.add(key_of(due_ms, place), place, place + size)

    def add_mark(self, mark: _Mark) -> None:
        self.marks += 1
        self._add(mark.event)

    def _add(self, event: TimerEvent | None) -> None:
        if event is not None:
            self.events.append(event)
            self._run = None


def _read(read: Callable[[Stored], TimerEvent], stored: Stored) -> TimerEvent | None:
    """Return what a record means; ``None`` for one that cannot be read, which is reported."""
    try:
        return read(stored)
    except CorruptRecord as error:
        logger.error("record of timers cannot be read log_offset=%d reason=%s", stored.log_offset, error)
        _report_lost(stored.log_offset)
        return None


def _report_lost(place: int) -> None:
    logger.error("record of timers lost after_log_offset=%d", place)


class Fold:
    """A reader of both partitions from a place on."""

    def __init__(self, store: MessageStore, place: Ordinals) -> None:
        self._store = store
        self.place = place
        self._ahead: _Mark | None = None  # the next mark, when it was read already

    def next(self, end: Ordinals, most: int, read: Read) -> list[TimerEvent]:
        """Return the events of the next records before ``end``, of at most so many, and move on after them.

        A record that is damaged or lost means nothing; it is reported.
        """
        found = _Found()
        marks = self._marks(end.marks, read)
        mark = next(marks, None)
        for park in islice(self._stored(PARKS, self.place.parks, end.parks, read), most):
            while park is not None and mark is not None and mark.log_offset < park.log_offset and found.size < most:
                found.add_mark(mark)
                mark = next(marks, None)
            if found.size == most:
                break
            found.add_park(park)
        while mark is not None and found.size < most:
            found.add_mark(mark)
            mark = next(marks, None)
        self._ahead = mark
        self.place = Ordinals(self.place.parks + found.parks, self.place.marks + found.marks)
        return found.events

    def _marks(self, end: int, read: Read) -> Iterator[_Mark]:
        """Yield the next marks before an ordinal; the first one is kept from one portion to the next."""
        ordinal, log_offset = self.place.marks, 0
        if self._ahead is not None and self._ahead.ordinal == ordinal < end:
            ordinal, log_offset = ordinal + 1, self._ahead.log_offset
            yield self._ahead
        for stored in self._stored(MARKS, ordinal, end, read):
            event: TimerEvent | None = None
            if stored is None:
                _report_lost(log_offset)
            else:
                log_offset, event = stored.log_offset, _read(event_of_mark, stored)
            yield _Mark(ordinal, log_offset, event)
            ordinal += 1

    def _stored(self, key: TopicPartition, begin: int, end: int, read: Read) -> Iterator[Stored | None]:
        """Return the records of a partition from one ordinal on and before another one."""
        if begin >= end:
            return iter(())
        return islice(self._store.records(self._store.queues[key], begin, READ_BYTES, read), end - begin)
