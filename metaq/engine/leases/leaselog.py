"""The log of leases: what each turn brings about is one record of ``METAQ_SYS_LEASES`` at its end (``metaq.leases.events``).

An opening needs the records from ``since`` on only: by then each place that has leases has told its whole state. So there is no
index, and no file beside the log. A *snapshot* moves ``since``: the whole states are recorded one after the other, while the
events of other places go on between them. Once all are in the log, the ordinal of the first of these records is the new
``since``, which one more record says.

Events that could not be stored, for lack of room, leave a place *unkept*: what is recorded of it next is its whole state, for
nothing that follows would mean the same without them.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from metaq.checksum import body_crc
from metaq.engine.context import Context
from metaq.engine.turn import Turns
from metaq.errors import CorruptRecord, DiskFull, MetaqError, StoreError
from metaq.leases.events import EVENTS, Forgotten, LeaseEvent, LeaseRecord, Lined, PlacedEvent, decode_events, encode_events
from metaq.message import GroupPartition
from metaq.protocol.record import constant_middle, decode_record
from metaq.protocol.text.messages import HEADER_SIZE_TEXT
from metaq.store.files.filecache import read_here
from metaq.store.queues.consumequeue import ConsumeQueue

logger = logging.getLogger(__name__)

READ_BYTES: Final = 256 * 1024
SECRET_BYTES: Final = 16
EVENTS_A_RECORD: Final = 512
"""Events of one record: at about 60 bytes each, 32 KiB."""
WHOLE_EVENTS: Final = 8
"""Events of a whole state that are made at once, for one record of mostly 52 KiB."""
RECORD_BYTES: Final = 64 * 1024
"""Bytes of the body of a record. A single event, or one with the ``Lined`` after it, is mostly smaller."""
SNAPSHOT_BYTES: Final = 8 << 20
"""Bytes of records after which a snapshot is due, at least, and"""
SNAPSHOT_SHARE: Final = 4
"""that many times the size of the last snapshot: so snapshots add at most a quarter to what is written."""


class LeaseLog:
    """The records of the leases of one broker."""

    def __init__(self, context: Context, turns: Turns, whole: Callable[[GroupPartition], Iterable[LeaseEvent]]) -> None:
        """Create it; ``whole`` returns the state of a place as events."""
        self._context = context
        self._store = context.store
        self._turns = turns
        self._whole = whole
        self._noted: list[PlacedEvent] = []
        self._unsure: set[GroupPartition] = set()  # places with events in the append that comes
        self._awaited = False  # the result of the append that comes
        self._unkept: set[GroupPartition] = set()
        self._complaint = ""
        self._secret: bytes | None = None
        self._owes_secret = False
        self.since = 0
        """The ordinal of the record from which on an opening reads."""
        self._next_since: int | None = None  # while a snapshot is being taken
        self._bytes = 0  # of records since ``since``
        self._bytes_before = 0  # the snapshot
        self._snapshot_bytes = 0
        self._has_gap = False
        """Some of these are missing, until a snapshot makes them superfluous."""
        self.snapshots = 0
        """Snapshots since the start."""

    # -- opening ------------------------------------------------------------------------------------------------------

    def read(self) -> Iterator[PlacedEvent | None]:
        """Iterate over the events from which all states follow, in their order; ``None`` stands for some that are missing.

        If some are, all that the log has are read: a whole state may be among the missing ones.
        """
        queue = self._store.queues.get(EVENTS)
        if queue is None or not queue.readable:
            return
        least = self._store.first(queue, read_here)[0]
        since = self._last_since(queue, least)
        self.since = max(least, since)
        self._has_gap = since < least or any(record is None for record in self._records(queue, self.since))
        if self._has_gap:
            logger.error("records of leases are missing: messages that were finished lately may be given again")
            self.since = least
        for record in self._records(queue, self.since):
            if record is None:
                yield None
                continue
            if record.secret is not None:
                self._secret = record.secret
            yield from record.events

    def _last_since(self, queue: ConsumeQueue, least: int) -> int:
        for ordinal in range(queue.readable - 1, least - 1, -1):
            last = next(self._records(queue, ordinal), None)
            if last is not None:
                return last.since
        return least

    def _records(self, queue: ConsumeQueue, first: int) -> Iterator[LeaseRecord | None]:
        self._bytes = 0
        for stored in self._store.records(queue, first, READ_BYTES, read_here):
            if stored is None:
                yield None
                continue
            self._bytes += stored.size
            try:
                yield decode_events(decode_record(stored.buffer[stored.at : stored.at + stored.size]).body)
            except CorruptRecord as error:
                logger.error("record of leases skipped log_offset=%d reason=%s", stored.log_offset, error)
                yield None

    # -- the secret ---------------------------------------------------------------------------------------------------

    @property
    def secret(self) -> bytes:
        """The secret of the tokens, which is made when it is first needed."""
        if self._secret is None:
            self._secret = secrets.token_bytes(SECRET_BYTES)
            self._owes_secret = True
        return self._secret

    # -- writing ------------------------------------------------------------------------------------------------------

    def note(self, place: GroupPartition, events: Sequence[LeaseEvent]) -> None:
        """Take events of a place, which its state has already, for the record at the end of this turn."""
        if not self._noted:
            self._turns.before_append(self.flush)
        self._noted += [(place, event) for event in events]
        if len(self._noted) >= EVENTS_A_RECORD:
            self.flush()

    def tell(self, place: GroupPartition) -> bool:
        """Stage the whole state of a place, a few events at a time: all of them may take 500 MB. Return whether it has room."""
        self.flush()
        if place in self._unkept:
            self._write([(place, Forgotten())])  # in its place the whole state is written
            return place not in self._unkept
        events = iter(self._whole(place))
        while portion := [(place, event) for event in islice(events, WHOLE_EVENTS)]:
            self._write(portion)
            if place in self._unkept:
                return False  # it is told anew later
        return True

    def flush(self) -> None:
        """Stage what was noted, so that a record that is staged afterwards follows it."""
        noted, self._noted = self._noted, []
        if noted:
            self._write(noted)

    def _write(self, noted: Sequence[PlacedEvent]) -> None:
        """Stage records of events."""
        places = {place for place, _ in noted}
        self._await_append()
        try:
            self._store.check_appendable()
            events = noted if self._unkept.isdisjoint(places) else self._made_whole(noted, places & self._unkept)
            for portion in self._portions(events):
                self._stage(portion)
        except MetaqError as error:
            self._failed(error, places)
            return
        self._unkept -= places
        self._unsure |= places

    def _made_whole(self, noted: Sequence[PlacedEvent], unkept: set[GroupPartition]) -> Sequence[PlacedEvent]:
        """Return events with the whole states of some places in the place of theirs.

        Raise ``DiskFull`` while the disk is full: a whole state may be large, and would be made in vain in each turn.
        """
        if (full := self._store.full) is not None:
            raise DiskFull(str(full))
        others = [(place, event) for place, event in noted if place not in unkept]
        return [*others, *((place, event) for place in unkept for event in self._whole(place))]

    def _portions(self, events: Sequence[PlacedEvent]) -> list[bytes]:
        """Return bodies of records for events: halves of halves, until each is within the limit.

        A ``Lined`` stays in the record of the event before it, by which its messages are passed: a log that ended between the
        two would have them done.
        """
        secret = self.secret if self._owes_secret else None
        body = encode_events(LeaseRecord(self.since, events, secret))
        breaks = [] if len(body) <= self._most_bytes else _breaks(events)
        if not breaks:
            self._owes_secret = False
            return [body]
        half = breaks[len(breaks) // 2]
        return self._portions(events[:half]) + self._portions(events[half:])

    @property
    def _most_bytes(self) -> int:
        return min(RECORD_BYTES, self._store.settings.segment_bytes // 4)

    def _stage(self, body: bytes) -> None:
        """Stage a record: by hand what ``metaq.engine.writing`` does for any message, for there is one in each turn."""
        store, host = self._store, self._context.store_host
        now_ms, queue = store.clock.now_ms(), store.queue(*EVENTS)
        ordinal, middle = queue.next, constant_middle(0, now_ms, host, now_ms, host)
        store.put(queue, 0, body, body_crc(body), middle, HEADER_SIZE_TEXT + len(body))
        self._bytes += len(body)
        self._complaint = ""
        if ordinal == 0:
            self.since = 0

    def _await_append(self) -> None:
        if not self._awaited:
            self._awaited = True
            self._turns.after_append(self._appended)

    def _appended(self, failure: StoreError | None) -> None:
        places, self._unsure, self._awaited = self._unsure, set(), False
        if failure is not None:
            self._failed(failure, places)

    def _failed(self, error: MetaqError, places: set[GroupPartition]) -> None:
        """Take note that events of places were not stored; a snapshot that is being taken is worth nothing then."""
        self._complain(error)
        self._unkept |= places
        self._owes_secret = self._secret is not None
        self._next_since = None

    def _complain(self, error: MetaqError) -> None:
        """Log once why leases are kept in memory only."""
        if str(error) != self._complaint:
            logger.error("leases are not kept: after a restart messages are given again reason=%s", error)
        self._complaint = str(error)

    def mark(self, place: GroupPartition, events: Sequence[LeaseEvent]) -> bytes:
        """Stage what was noted; return the body of a record that has events more, all of one place.

        Raise ``DiskFull`` when there is no room for what comes before them.
        """
        if place in self._unkept:
            self.tell(place)
        self.flush()
        if place in self._unkept:
            raise DiskFull(self._complaint)
        self._await_append()
        return encode_events(LeaseRecord(self.since, [(place, event) for event in events]))

    def keeps(self, places: Iterable[GroupPartition]) -> bool:
        """Return whether the events of all these places could be stored."""
        return self._unkept.isdisjoint(places)

    @property
    def unkept(self) -> list[GroupPartition]:
        """The places whose events could not all be stored."""
        return list(self._unkept)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The bytes of records that the next opening reads."""
        return self._bytes

    @property
    def snapshot_due(self) -> bool:
        return self._has_gap or self._bytes > max(SNAPSHOT_BYTES, SNAPSHOT_SHARE * self._snapshot_bytes)

    def begin_snapshot(self) -> None:
        """Begin a snapshot: what is recorded from now on holds all states, once ``end_snapshot`` says so."""
        self.flush()
        self._await_append()
        self._next_since = self._store.queue(*EVENTS).next
        self._owes_secret = self._secret is not None
        self._bytes_before = self._bytes

    def end_snapshot(self) -> None:
        """Have openings read from the records of the snapshot on, which are in the log, unless there was no room for one."""
        if self._next_since is None:
            return
        self.since, self._next_since, self._has_gap = self._next_since, None, False
        self._write([])
        self.snapshots += 1
        self._snapshot_bytes = self._bytes = self._bytes - self._bytes_before


def _breaks(events: Sequence[PlacedEvent]) -> list[int]:
    """Return where events may be parted into two records."""
    return [at for at in range(1, len(events)) if not isinstance(events[at][1], Lined)]
