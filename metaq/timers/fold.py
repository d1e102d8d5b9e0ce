"""Parks and marks read from the log, in its order: at a start, and on a slave."""

import heapq
import logging
from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from metaq.errors import CorruptRecord
from metaq.message import TopicPartition
from metaq.store.files.filecache import Read
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import FILLER_SIZE, ConsumeQueue
from metaq.timers.records import MARKS, PARKS, TimerEvent, event_of_mark, event_of_park

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
        if _offset_from(queue, middle, high, read) < log_offset:
            low = middle + 1
        else:
            high = middle
    return low


def _offset_from(queue: ConsumeQueue, ordinal: int, end: int, read: Read) -> int:
    """Return the log offset of the first unit from an ordinal on that is no filler; a very high one when there is none."""
    while ordinal < end:
        offset, size, _ = queue.unit(ordinal, read)
        if size != FILLER_SIZE:
            return offset
        ordinal += 1
    return 1 << 62


class Fold:
    """A reader of both partitions from a place on."""

    def __init__(self, store: MessageStore, place: Ordinals) -> None:
        self._store = store
        self.place = place

    def next(self, end: Ordinals, most: int, read: Read) -> list[TimerEvent]:
        """Return the events of the next records before ``end``, at most so many, and move on after them.

        A record that is damaged or lost means nothing; it is reported.
        """
        parks = self._records(PARKS, self.place.parks, end.parks, read)
        marks = self._records(MARKS, self.place.marks, end.marks, read)
        events: list[TimerEvent] = []
        count_parks, count_marks = self.place
        for log_offset, is_park, event in islice(heapq.merge(parks, marks, key=lambda found: found[0]), most):
            count_parks, count_marks = count_parks + is_park, count_marks + (not is_park)
            if event is None:
                logger.error("record of timers lost after_log_offset=%d", log_offset)
            else:
                events.append(event)
        self.place = Ordinals(count_parks, count_marks)
        return events

    def _records(self, key: TopicPartition, begin: int, end: int, read: Read) -> Iterator[tuple[int, bool, TimerEvent | None]]:
        if begin >= end:
            return
        is_park, log_offset = key == PARKS, 0
        read_event = event_of_park if is_park else event_of_mark
        for stored in islice(self._store.records(self._store.queues[key], begin, READ_BYTES, read), end - begin):
            event: TimerEvent | None = None
            if stored is not None:
                log_offset = stored.log_offset
                try:
                    event = read_event(stored)
                except CorruptRecord as error:
                    logger.error("record of timers cannot be read log_offset=%d reason=%s", log_offset, error)
            yield log_offset, is_park, event
