"""Messages ready to be staged, and *groups* of records that recovery keeps all or none of.

::

    mark  METAQ_GROUP_END=E │ member │ member │ … │ member │
                                                           E   log offset behind the last member

A group is staged in one turn, its records one behind the other: a *mark*, which says where the group ends, and its *members*,
which carry a bit in their system flag. In a running broker one append makes the whole visible; ``whole_groups`` judges
what a kill or a power cut has left. The bit tells members whose mark is lost from messages of their own.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from metaq.errors import BadRequest
from metaq.protocol.properties import GROUP_END
from metaq.protocol.record import BLANK_SIZE, CHECKSUM_SIZE, GROUP_MEMBER, HEADER_SIZE, identity, longer_tail
from metaq.protocol.text.messages import Stored
from metaq.store.log.commitlog import Gap
from metaq.store.messagestore import Message, MessageStore
from metaq.store.queues.consumequeue import ConsumeQueue

MARK_PARTITIONS: Final = frozenset((("METAQ_SYS_TRANSACTIONS", 0), ("RMQ_SYS_TRANS_OP_HALF_TOPIC", 0)))
"""Where marks are; anywhere else their property means nothing."""

_SYS_FLAG_AT: Final = 36
_MEMBER_IN_FIRST_BYTE: Final = GROUP_MEMBER >> 24
_NAME: Final = f"{GROUP_END}\x01".encode()
_DIGITS: Final = 16
_TOPIC_LENGTH_SIZE, _PROPERTIES_LENGTH_SIZE = 1, 2
END_SIZE: Final = len(_NAME) + _DIGITS + 1
"""Bytes by which a mark grows when members follow it."""


class Ready(NamedTuple):
    """A message that waits for nothing but its place in the log: the arguments of ``MessageStore.put``."""

    queue: ConsumeQueue
    flag: int
    body: bytes
    crc: int
    middle: bytes
    text_size: int
    tail: bytes | None = None
    tag: int = 0
    keys: tuple[str, ...] = ()


def ready_size(ready: Ready) -> int:
    """Bytes of the record in the log; a mark with members has ``END_SIZE`` more."""
    tail = ready.queue.tail if ready.tail is None else ready.tail
    return HEADER_SIZE + len(ready.body) + len(tail) + CHECKSUM_SIZE


def put_together(store: MessageStore, mark: Ready, rest: Sequence[Message]) -> list[int]:
    """Stage a mark and its members so that recovery keeps all or none of them; return their log offsets.

    ``store.check_writable`` came first, ``mark`` goes to one of ``MARK_PARTITIONS``. Raises ``BadRequest`` when they do not fit
    into one segment, and ``DiskFull`` when the log cannot grow; nothing is staged then. A mark alone needs no group.
    """
    assert (mark.queue.topic, mark.queue.partition) in MARK_PARTITIONS, mark.queue
    if not rest:
        return [store.put(*mark)]
    sizes = [ready_size(mark) + END_SIZE]
    sizes += [HEADER_SIZE + len(body) + len(tail or queue.tail) + CHECKSUM_SIZE for queue, _, body, _, _, _, tail, _, _ in rest]
    total, most = sum(sizes), store.settings.segment_bytes - BLANK_SIZE
    if total > most:
        raise BadRequest(f"{len(sizes)} records kept together take {total} bytes, a segment of the log has room for {most}")
    log = store.log
    log.reserve(total)
    end = log.end_of(sizes)
    queue, flag, body, crc, middle, text_size, tail, tag, keys = mark
    offset = store.put(queue, flag, body, crc, middle, text_size, _with_end(queue, tail, end), tag, keys)
    offsets = [offset, *store.put_all(rest, GROUP_MEMBER)]
    assert log.staged_end == end
    return offsets


def _with_end(queue: ConsumeQueue, tail: bytes | None, end: int) -> bytes:
    """The tail of a mark in that queue, with where its group ends."""
    properties = b"" if tail is None else tail[_TOPIC_LENGTH_SIZE + tail[0] + _PROPERTIES_LENGTH_SIZE :]
    return longer_tail(queue.tail, b"%b%b%016X\x02" % (properties, _NAME, end))


def group_end(stored: Stored) -> int | None:
    """Where the group ends that an intact record is the mark of; ``None`` for any other record."""
    view, at, size, _ = stored
    end = at + size - CHECKSUM_SIZE
    if view[end - END_SIZE : end - END_SIZE + len(_NAME)] != _NAME:
        return None
    if identity(view[at : at + size])[:2] not in MARK_PARTITIONS:
        return None
    return int(bytes(view[end - 1 - _DIGITS : end - 1]), 16)


# -- recovery ---------------------------------------------------------------------------------------------------------


class Dropped(NamedTuple):
    """An intact record that nobody gets: it is in quarantine, or its group is not whole. Its ordinal is not used again."""

    stored: Stored


Found = Stored | Gap | Dropped


class Ranges:
    """Ranges of log offsets, which is asked in rising order."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._left = deque(sorted(ranges))

    def hold(self, log_offset: int) -> bool:
        """Whether one of them holds a log offset."""
        while self._left and self._left[0][1] <= log_offset:
            self._left.popleft()
        return bool(self._left) and self._left[0][0] <= log_offset


def whole_groups(found: Iterable[Stored | Gap], trusted: int, quarantine: Ranges) -> Iterator[Found]:
    """What a walk through the log ``found``, without groups from log offset ``trusted`` on that are not whole.

    Before that offset everything that was appended is known to have been whole, so damage costs one record. What is not kept is
    reported when a record behind it is kept: one gap, and the intact records in it. What stands behind the last record
    that is kept is not reported, like the end of any log.
    """
    sieve = _Sieve()
    for item in found:
        if isinstance(item, Gap):
            sieve.broken(item.start)
        elif quarantine.hold(item.log_offset):
            sieve.drop(item)
        elif item.log_offset < trusted:
            yield from sieve.keep((item,))
        elif _is_member(item):
            yield from sieve.member(item)
        else:
            yield from sieve.begin(item)


class _Sieve:
    """Holds the group that is being read, and what was not kept since the last record that was."""

    def __init__(self) -> None:
        self._group: list[Stored] = []
        self._group_end = 0
        self._bad: int | None = None  # where that begins
        self._dropped: list[Dropped] = []

    def broken(self, log_offset: int) -> None:
        """Nothing is kept from here on, nor of the group that was to go on here."""
        if self._bad is None:
            self._bad = self._group[0].log_offset if self._group else log_offset
        self._dropped += map(Dropped, self._group)
        self._group = []

    def drop(self, stored: Stored) -> None:
        self.broken(stored.log_offset)
        self._dropped.append(Dropped(stored))

    def keep(self, records: Sequence[Stored]) -> Sequence[Found]:
        if self._bad is None:
            return records
        found: list[Found] = [Gap(self._bad, records[0].log_offset), *self._dropped, *records]
        self._bad, self._dropped = None, []
        return found

    def begin(self, stored: Stored) -> Sequence[Found]:
        """A mark, or a record of its own."""
        if self._group:  # it ends elsewhere than its mark says
            self.broken(stored.log_offset)
        end = group_end(stored)
        if end is None:
            return self.keep((stored,))
        self._group, self._group_end = [stored], end
        return ()

    def member(self, stored: Stored) -> Sequence[Found]:
        """A member without a group: its mark is lost, or has aged out, which leaves no gap before it."""
        if self._group:
            self._group.append(stored)
            if stored.log_offset + stored.size < self._group_end:
                return ()
            whole, self._group = self._group, []
            return self.keep(whole)
        if self._bad is not None:
            self.drop(stored)
            return ()
        return self.keep((stored,))


def _is_member(stored: Stored) -> bool:
    return bool(stored.buffer[stored.at + _SYS_FLAG_AT] & _MEMBER_IN_FIRST_BYTE)
