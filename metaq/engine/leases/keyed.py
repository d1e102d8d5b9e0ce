"""Order by key: which of the messages that were never given may be given now, and which stand in line behind others."""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from metaq.engine.reading.collecting import MOST_S, Collected, collect_messages
from metaq.engine.reading.filters import Filter
from metaq.leases.keylines import KeyLines
from metaq.protocol.properties import SHARDING_KEY
from metaq.protocol.record import property_of
from metaq.store.files.filecache import Read
from metaq.store.messagestore import MessageStore
from metaq.store.queues.consumequeue import ConsumeQueue

MOST_LINED: Final = 10_000
"""Messages of one partition that stand in line for their keys; then nothing is given that comes after the next one."""
MOST_LOOKED: Final = 4096
"""Messages that one pop looks at."""

_KEY: Final = b"\x02" + SHARDING_KEY.encode() + b"\x01"


class KeyedMessages(NamedTuple):
    """Messages that were never given, sorted out by their keys."""

    given: Collected
    lined: Sequence[int]
    """Those that are passed over for now: messages with their keys are open."""
    keys: Mapping[int, str]
    """The keys of both, by ordinal, in ascending order."""


def records_of(body: Sequence[bytes | memoryview]) -> Iterator[memoryview]:
    """Iterate over the records of slices that each hold one or more."""
    for piece in body:
        view, at = memoryview(piece), 0
        while at < len(view):
            size = int.from_bytes(view[at : at + 4])
            yield view[at : at + size]
            at += size


def keys_of_open(store: MessageStore, queue: ConsumeQueue, ordinals: Sequence[int], read: Read) -> dict[int, str]:
    """Return the keys of open messages, by ordinal, in ascending order. Raise ``ColdRead`` as ``read`` does."""
    found = {}
    for ordinal in ordinals:
        stored = store.reader.record(queue, ordinal, read) if ordinal < queue.readable else None
        key = None if stored is None else property_of(stored.buffer[stored.at : stored.at + stored.size], _KEY)
        if key is not None:
            found[ordinal] = key
    return found


class KeyedReader:
    """Reads the messages of one partition that were never given, for one pop."""

    def __init__(self, store: MessageStore, queue: ConsumeQueue, wanted: Filter, read: Read) -> None:
        self._store = store
        self._queue = queue
        self._wanted = wanted
        self._read = read

    def collect(self, first: int, most: int, most_bytes: int, busy: KeyLines | None, room: int) -> KeyedMessages:
        """Return what may be given from ``first`` on, at most ``most`` messages, one of each key, as time allows.

        ``busy`` has the keys of what is open, ``room`` is the number of messages that may be lined.
        """
        body: list[bytes | memoryview] = []
        ordinals: list[int] = []
        lined: list[int] = []
        keys: dict[int, str] = {}
        taken: set[str] = set()
        following, size, until = first, 0, time.thread_time() + MOST_S
        while len(ordinals) < most and size < most_bytes and following - first < MOST_LOOKED:
            found = collect_messages(self._store, self._queue, following, MOST_LOOKED, self._wanted, self._read)
            if found.following == following:
                break
            for ordinal, record in zip(found.ordinals, records_of(found.body), strict=True):
                key = property_of(record, _KEY)
                is_busy = key is not None and (key in taken or (busy is not None and busy.is_busy(key)))
                if (is_busy and len(lined) >= room) or len(ordinals) >= most or (ordinals and size + len(record) > most_bytes):
                    return KeyedMessages(Collected(body, ordinals, ordinal), lined, keys)
                if key is not None:
                    keys[ordinal] = key
                    taken.add(key)
                if is_busy:
                    lined.append(ordinal)
                else:
                    ordinals.append(ordinal)
                    body.append(record)
                    size += len(record)
            following = found.following
            if time.thread_time() >= until:
                break
        return KeyedMessages(Collected(body, ordinals, following), lined, keys)
