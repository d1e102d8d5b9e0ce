"""*Groups* of records: recovery keeps all records of a group or none of them.

::

    mark  METAQ_GROUP_END=E │ member │ member │ … │ member │
                                                           E   log offset after the last member

A group is staged in one turn, its records adjacent: a *mark*, which says where the group ends, and its *members*, which carry a
bit in their system flag. In a running broker one append makes the whole group visible; after a kill or a power cut,
``whole_groups`` decides what is kept. The bit distinguishes members whose mark is lost from records that belong to no group.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from metaq.errors import BadRequest
from metaq.protocol.properties import GROUP_END
from metaq.protocol.record import BLANK_SIZE, CHECKSUM_SIZE, GROUP_MEMBER, HEADER_SIZE, identity, longer_tail
from metaq.protocol.text.messages import Stored
from metaq.store.log.walk import Gap
from metaq.store.messagestore import MessageStore
from metaq.store.newrecord import Fields, NewRecord
from metaq.store.queues.consumequeue import ConsumeQueue

MARK_PARTITIONS: Final = frozenset(
    (
        ("METAQ_SYS_TRANSACTIONS", 0),
        ("RMQ_SYS_TRANS_OP_HALF_TOPIC", 0),
        ("METAQ_SYS_TIMERS", 1),
        ("METAQ_SYS_LEASES", 0),
    )
)
"""The partitions that marks are in; in any other partition their property has no meaning."""

_SYS_FLAG_AT: Final = 36
_MEMBER_IN_FIRST_BYTE: Final = GROUP_MEMBER >> 24
_NAME: Final = f"{GROUP_END}\x01".encode()
_DIGITS: Final = 16
_TOPIC_LENGTH_SIZE, _PROPERTIES_LENGTH_SIZE = 1, 2
END_SIZE: Final = len(_NAME) + _DIGITS + 1
"""Bytes by which a mark grows when members follow it."""


def put_record_group(store: MessageStore, mark: NewRecord, rest: Sequence[Fields]) -> list[int]:
    """Stage a mark and its members so that recovery keeps all or none of them; return their log offsets.

    The caller has called ``check_writable`` or ``check_appendable`` of the store; ``mark`` goes to one of ``MARK_PARTITIONS``.
    Without members, the mark is put as a single record. Raises ``BadRequest`` when the records do not fit into one segment, and
    ``DiskFull`` when the log cannot grow; then nothing is staged.
    """
    assert (mark.queue.topic, mark.queue.partition) in MARK_PARTITIONS, mark.queue
    if not rest:
        return [store.put(*mark)]
    sizes = [mark.size + END_SIZE]
    sizes += [HEADER_SIZE + len(body) + len(tail or queue.tail) + CHECKSUM_SIZE for queue, _, body, _, _, _, tail, _, _ in rest]
    total, most = sum(sizes), store.settings.segment_bytes - BLANK_SIZE
    if total > most:
        raise BadRequest(f"{len(sizes)} records kept together take {total} bytes, a segment of the log has room for {most}")
    log = store.log
    log.reserve(total)
    end = log.end_of(sizes)
    offset = store.put(*mark._replace(tail=_with_end(mark.queue, mark.tail, end)))
    offsets = [offset, *store.put_all(rest, GROUP_MEMBER)]
    assert log.staged_end == end
    return offsets


def _with_end(queue: ConsumeQueue, tail: bytes | None, end: int) -> bytes:
    """Return the tail of a mark in ``queue``, with the log offset ``end`` of its group added to the properties."""
    properties = b"" if tail is None else tail[_TOPIC_LENGTH_SIZE + tail[0] + _PROPERTIES_LENGTH_SIZE :]
    return longer_tail(queue.tail, b"%b%b%016X\x02" % (properties, _NAME, end))


def group_end(stored: Stored) -> int | None:
    """Return the log offset at which the group of a mark ends; ``None`` for an intact record that is not a mark."""
    view, at, size, _ = stored
    end = at + size - CHECKSUM_SIZE
    if view[end - END_SIZE : end - END_SIZE + len(_NAME)] != _NAME:
        return None
    if identity(view[at : at + size])[:2] not in MARK_PARTITIONS:
        return None
    return int(bytes(view[end - 1 - _DIGITS : end - 1]), 16)


# -- recovery ---------------------------------------------------------------------------------------------------------


class Dropped(NamedTuple):
    """An intact record that is not delivered: it is in quarantine, or its group is not whole. Its ordinal is not used again."""

    stored: Stored


Found = Stored | Gap | Dropped


class Ranges:
    """A set of ranges of log offsets, to be queried in rising order."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._left = deque(sorted(ranges))

    def hold(self, log_offset: int) -> bool:
        """Return whether one of the ranges holds a log offset, which is not lower than in the call before."""
        while self._left and self._left[0][1] <= log_offset:
            self._left.popleft()
        return bool(self._left) and self._left[0][0] <= log_offset


def whole_groups(found: Iterable[Stored | Gap], trusted: int, quarantine: Ranges) -> Iterator[Found]:
    """Yield what a walk through the log ``found``, without groups from log offset ``trusted`` on that are not whole.

    Records in ``quarantine`` are not kept either. Before ``trusted``, every append is known to be complete, so damage costs one
    record and not its group. Records that are not kept are reported as soon as a later record is kept: one gap, then the intact
    records in it. Records after the last one that is kept are not reported; they are treated as the end of the log.
    """
    sieve = _Sieve()
    for item in found:
        if isinstance(item, Gap):
            sieve.broken(item.start)
        elif quarantine.hold(item.log_offset):
            sieve.drop(item)
        elif item.log_offset < trusted:
            yield from sieve.keep((item,))
        elif is_member(item):
            yield from sieve.member(item)
        else:
            yield from sieve.begin(item)


class _Sieve:
    """A filter that holds the group being read, and the records not kept since the last one that was kept."""

    def __init__(self) -> None:
        self._group: list[Stored] = []
        self._group_end = 0
        self._bad: int | None = None  # where the gap begins that is open now
        self._dropped: list[Dropped] = []

    def broken(self, log_offset: int) -> None:
        """Open a gap, unless one is open, at a log offset or where the unfinished group begins; drop that group's records."""
        if self._bad is None:
            self._bad = self._group[0].log_offset if self._group else log_offset
        self._dropped += map(Dropped, self._group)
        self._group = []

    def drop(self, stored: Stored) -> None:
        """Drop an intact record, and the unfinished group before it."""
        self.broken(stored.log_offset)
        self._dropped.append(Dropped(stored))

    def keep(self, records: Sequence[Stored]) -> Sequence[Found]:
        """Return records that are kept, after the gap before them and the intact records in it, if there is one."""
        if self._bad is None:
            return records
        found: list[Found] = [Gap(self._bad, records[0].log_offset), *self._dropped, *records]
        self._bad, self._dropped = None, []
        return found

    def begin(self, stored: Stored) -> Sequence[Found]:
        """Take a mark, which begins a group, or a record that belongs to no group; return what can be reported now."""
        if self._group:  # it ends before the offset in its mark
            self.broken(stored.log_offset)
        end = group_end(stored)
        if end is None:
            return self.keep((stored,))
        self._group, self._group_end = [stored], end
        return ()

    def member(self, stored: Stored) -> Sequence[Found]:
        """Take a member of a group; return what can be reported now.

        A member without a group is dropped when there is a gap before it: its mark is lost. Without a gap its mark has aged
        out, and the member is kept.
        """
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


def is_member(stored: Stored) -> bool:
    """Return whether an intact record is a member of a group."""
    return bool(stored.buffer[stored.at + _SYS_FLAG_AT] & _MEMBER_IN_FIRST_BYTE)
