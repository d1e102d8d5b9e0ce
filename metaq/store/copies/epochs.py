"""Epochs: which replica was master while which part of the log was written.

Each time that a replica becomes master it begins a new epoch with a record of an internal topic, so the log itself says who
wrote what. Between two masters' begins only one of them appended, so two logs that both hold epoch *e* of replica *r* from
the same log offset on are the same up to where the first of them leaves it. The body of the record is the whole table::

    METAQ_SYS_EPOCHS, partition 0     {"epochs":[[1,0,0],[2,81233,1],[5,99500,2]]}
                                                  │ │     └ number of the replica, 0: unknown
                                                  │ └ log offset from which on it wrote
                                                  └ epoch, rising

A log without such a record has one epoch, ``FIRST``. The table is written again before retention takes its newest record.
"""

import zlib
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson

from metaq.message import TopicPartition
from metaq.protocol.record import constant_middle, decode_record
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.store.files.filecache import read_here
from metaq.store.messagestore import FIRST_EPOCH, MessageStore

TOPIC: Final = "METAQ_SYS_EPOCHS"
_KEY: Final = TopicPartition(TOPIC, 0)
MOST_EPOCHS: Final = 512
"""That a table holds: of a log so much younger, no other replica has only older ones."""
LAST_EPOCH: Final = (1 << 16) - 1
"""Ids of text messages have room for no more."""


class Epoch(NamedTuple):
    """One master's part of the log, as far as the next one's."""

    number: int
    start: int
    """Log offset."""
    replica: int


FIRST: Final = Epoch(FIRST_EPOCH, 0, 0)


class Epochs:
    """The table of one store; part of the log, so to be read only after it was opened."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self.refresh()

    def refresh(self) -> None:
        """Read what is in the log now: a slave's grows by its master's."""
        self.table = _load(self._store)
        self._store.epoch = self.current.number

    @property
    def current(self) -> Epoch:
        return self.table[-1]

    def number_at(self, log_offset: int) -> int:
        """The epoch in which a record was written."""
        return self.table[max(0, bisect_right(self.table, log_offset, key=lambda epoch: epoch.start) - 1)].number

    def shared_end(self, epoch: Epoch, log_end: int) -> int:
        """The log offset before which this log is one that ended at ``log_end`` in an epoch; at most ``log_end``."""
        others = [each.start for each in self.table if each.number >= epoch.number and each != epoch]
        return min(log_end, self._store.log.end, *others, log_end if epoch in self.table else epoch.start)

    def begin(self, number: int, replica: int) -> None:
        """Stage the begin of an epoch that is newer than all others; it holds when the append succeeds."""
        assert self.current.number < number <= LAST_EPOCH, (self.current, number)
        self.table = [*self.table[1 - MOST_EPOCHS :], Epoch(number, self._store.log.staged_end, replica)]
        self._store.epoch = number
        self._write()

    def _write(self) -> None:
        store, now_ms = self._store, self._store.clock.now_ms()
        body = orjson.dumps({"epochs": [list(epoch) for epoch in self.table]})
        middle = constant_middle(0, now_ms, bytes(8), now_ms, bytes(8))
        crc, queue = zlib.crc32(body) & 0x7FFFFFFF, store.queue(TOPIC, 0)
        store.put(queue, 0, body, crc, middle, HEADER_SIZE_TEXT + len(body))

    # -- a keeper (see ``metaq.engine.duties``) -----------------------------------------------------------------------

    @property
    def oldest(self) -> int | None:
        """Where the newest durable table is in the log."""
        queue, place = self._store.queues.get(_KEY), None
        for ordinal in range(queue.next - 1, queue.base - 1, -1) if queue is not None else ():
            assert queue is not None
            place = queue.unit(ordinal, read_here)[0]
            if place < self._store.durable_end:
                break
        return place

    def keep(self, before: int) -> None:
        """Stage the table again, if it is before a log offset; the end of the turn appends it."""
        place = self.oldest
        if place is not None and place < before:
            self._store.check_writable()
            self._write()


def _load(store: MessageStore) -> list[Epoch]:
    queue = store.queues.get(_KEY)
    for ordinal in range(queue.next - 1, queue.base - 1, -1) if queue is not None else ():
        assert queue is not None
        offset, size, _ = queue.unit(ordinal, read_here)
        stored = store.log.record_at(offset, read_here)
        if stored is not None and stored.size == size:
            content: dict[str, Any] = orjson.loads(decode_record(stored.buffer).body)
            return [Epoch(*epoch) for epoch in content["epochs"]]
    return [FIRST]


def common_end(ours: Sequence[Epoch], our_end: int, theirs: Sequence[Epoch], their_end: int) -> int | None:
    """The log offset up to which two logs are the same; ``None`` when they have no epoch in common."""
    our_ends = _ends(ours, our_end)
    shared = [(epoch, end) for epoch, end in _ends(theirs, their_end).items() if epoch in our_ends]
    if not shared:
        return None
    epoch, end = max(shared)
    return min(end, our_ends[epoch])


def _ends(table: Sequence[Epoch], log_end: int) -> dict[Epoch, int]:
    return dict(zip(table, (*(epoch.start for epoch in table[1:]), log_end), strict=True))


def last_record(store: MessageStore) -> tuple[int, int] | None:
    """Log offset and size of the last record of the log that is in a queue."""
    units = (queue.unit(queue.next - 1, read_here) for queue in store.queues.values() if queue.next > queue.base)
    found = [(offset, size) for offset, size, _ in units if offset + size <= store.log.end]
    return max(found, default=None)
