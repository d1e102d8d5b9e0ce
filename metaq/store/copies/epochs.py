"""Epochs: which replica was master while which part of the log was written.

Each time a replica becomes master it begins a new epoch with a record in an internal topic, so the log itself records which
replica wrote which part. Within an epoch only its master appended. So two logs that both hold epoch *e* of replica *r* from the
same log offset on are identical up to where the first of them leaves that epoch. The body of the record is the whole table::

    METAQ_SYS_EPOCHS, partition 0     {"epochs":[[1,0,0],[2,81233,1],[5,99500,2]]}
                                                  │ │     └ number of the replica, 0: unknown
                                                  │ └ log offset at which it began to write
                                                  └ epoch, rising

A log without such a record has one epoch, ``FIRST``. The table is written again before retention deletes its newest record.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import orjson

from metaq.checksum import crc32
from metaq.message import EPOCHS_TOPIC, TopicPartition
from metaq.protocol.record import constant_middle, decode_record
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.store.files.filecache import read_here
from metaq.store.messagestore import FIRST_EPOCH, MessageStore

_KEY: Final = TopicPartition(EPOCHS_TOPIC, 0)
MOST_EPOCHS: Final = 512
"""A table holds the newest of its epochs, at most that many: no other replica lags so far that it has only older ones."""
LAST_EPOCH: Final = (1 << 16) - 1
"""The largest epoch that the ids of text messages have room for."""
END_OF_NEWEST: Final = (1 << 63) - 1
"""A log offset after all records, of 64 bits with a sign as they are."""


class Epoch(NamedTuple):
    """The part of the log that one master wrote, up to the start of the next epoch."""

    number: int
    start: int
    """Log offset."""
    replica: int


FIRST: Final = Epoch(FIRST_EPOCH, 0, 0)


class Epochs:
    """The table of epochs of one store. It is part of the log, so it can be read only after the store was opened."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store
        self.refresh()

    def refresh(self) -> None:
        """Read the table that is in the log now: a slave's log grows by the records of its master."""
        self.table = _load(self._store)
        self._store.epoch = self.current.number

    @property
    def current(self) -> Epoch:
        """The newest epoch."""
        return self.table[-1]

    def at(self, log_offset: int) -> tuple[int, int]:
        """Return the number of the epoch in which the record at a log offset was written, and the log offset where it ends."""
        following = max(1, bisect_right(self.table, log_offset, key=lambda epoch: epoch.start))
        end = self.table[following].start if following < len(self.table) else END_OF_NEWEST
        return self.table[following - 1].number, end

    def shared_end(self, epoch: Epoch, log_end: int) -> int:
        """Return the log offset up to which this log equals another one, which ended at ``log_end`` in ``epoch``."""
        others = [each.start for each in self.table if each.number >= epoch.number and each != epoch]
        return min(log_end, self._store.log.end, *others, log_end if epoch in self.table else epoch.start)

    def begin(self, number: int, replica: int) -> None:
        """Stage the begin of an epoch that is newer than all others; it takes effect when the append succeeds."""
        assert self.current.number < number <= LAST_EPOCH, (self.current, number)
        self.table = [*self.table[1 - MOST_EPOCHS :], Epoch(number, self._store.log.staged_end, replica)]
        self._store.epoch = number
        self._write()

    def _write(self) -> None:
        store, now_ms = self._store, self._store.clock.now_ms()
        body = orjson.dumps({"epochs": [list(epoch) for epoch in self.table]})
        middle = constant_middle(0, now_ms, bytes(8), now_ms, bytes(8))
        store.put(
            queue=store.queue(EPOCHS_TOPIC, 0),
            flag=0,
            body=body,
            crc=crc32(body) & 0x7FFFFFFF,
            middle=middle,
            text_size=HEADER_SIZE_TEXT + len(body),
        )

    # -- a keeper (see ``metaq.engine.duties``) -----------------------------------------------------------------------

    @property
    def oldest(self) -> int | None:
        """The log offset of the newest durable table; of the oldest one when none is durable, ``None`` without any."""
        queue, place = self._store.queues.get(_KEY), None
        for ordinal in range(queue.next - 1, queue.base - 1, -1) if queue is not None else ():
            assert queue is not None
            place = queue.unit(ordinal, read_here)[0]
            if place < self._store.durable_end:
                break
        return place

    def keep(self, before: int) -> None:
        """Stage the table again if ``oldest`` is before a log offset; the end of the turn appends it.

        Raises what ``MessageStore.check_appendable`` and ``put`` raise.
        """
        place = self.oldest
        if place is not None and place < before:
            self._store.check_appendable()
            self._write()


def _load(store: MessageStore) -> list[Epoch]:
    """Return the newest intact table in the log."""
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
    """Return the log offset up to which two logs are identical; ``None`` when they have no epoch in common."""
    our_ends = _ends(ours, our_end)
    shared = [(epoch, end) for epoch, end in _ends(theirs, their_end).items() if epoch in our_ends]
    if not shared:
        return None
    epoch, end = max(shared)
    return min(end, our_ends[epoch])


def _ends(table: Sequence[Epoch], log_end: int) -> dict[Epoch, int]:
    """Return the log offset at which each epoch ends."""
    return dict(zip(table, (*(epoch.start for epoch in table[1:]), log_end), strict=True))


def last_record(store: MessageStore) -> tuple[int, int] | None:
    """Return log offset and size of the last record of the log that is in a queue; ``None`` when no queue holds one."""
    units = (queue.unit(queue.next - 1, read_here) for queue in store.queues.values() if queue.next > queue.base)
    found = [(offset, size) for offset, size, _ in units if offset + size <= store.log.end]
    return max(found, default=None)
