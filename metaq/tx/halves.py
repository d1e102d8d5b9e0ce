"""RocketMQ's half messages: the table of undecided transactional messages (specs: remoting protocol, section 5.5).

A half message is an ordinary record of the half topic. Its decision is a record of the op topic whose body is the half's
ordinal as decimal digits; a committed message follows it in the same group. So the table is a fold over the two topics in the
order of the log, both while the broker runs and after a start: a half enters it when readers can see its record, and leaves it
when they can see its decision. While a decision is staged the half is *claimed*, so that there is no second one.

A half that is still undecided when its segment is to be deleted is stored again. So is one that was given up and is to be
checked once more. Such a copy has the property ``METAQ_HALF``, which says where the first record was: a half keeps its first
ordinal as its name for ever.

``config/halves.json`` shortens the fold after a start::

    {"log": [1, 0, 0, 81920], "ordinal": 17, "op": 12, "halves": [[3, 40960, 1700000000000, 2, 1700000012000]]}

It covers the records before these ordinals of the two topics. Each half has its first ordinal, its log offset now, when it was
first stored, how often its producers were asked, and when they are asked next. ``returned``, left out when it is empty, has the
first ordinals and the log offsets of halves that came back after they were given up. ``log`` is the moment of the snapshot
(``metaq.store.copies.snapshots``): the file is written once the log is durable up to its end at that moment. Without the file
the fold begins at the oldest records.
"""

import enum
import heapq
import logging
from collections.abc import Iterator
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from metaq.message import LogOffset, TopicPartition
from metaq.protocol import properties
from metaq.protocol.record import Record, decode_record, identity, store_ms
from metaq.protocol.text.messages import Stored
from metaq.store.copies.epochs import Epochs
from metaq.store.copies.snapshots import moment, read_snapshot
from metaq.store.files.documents import write_document
from metaq.store.files.filecache import Read, Run, read_here, run_here
from metaq.store.messagestore import MessageStore

logger = logging.getLogger(__name__)

HALVES: Final = TopicPartition("RMQ_SYS_TRANS_HALF_TOPIC", 0)
OPS: Final = TopicPartition("RMQ_SYS_TRANS_OP_HALF_TOPIC", 0)
SNAPSHOT: Final = "halves.json"
IMMUNITY: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
"""The property that says how long the producers of this one message are not asked."""
PORTION: Final = 2048
"""The most records that are applied to the table at once."""
READ_BYTES: Final = 256 * 1024
_HALF_NAME, _IMMUNITY_NAME = (f"{name}\x01".encode() for name in (properties.HALF, IMMUNITY))
MOST_IMMUNE_S: Final = 10**9
_IMMUNE_DIGITS: Final = len(str(MOST_IMMUNE_S))


class Fate(enum.Enum):
    """The fate of a half message."""

    COMMITTED = enum.auto()
    ROLLED_BACK = enum.auto()
    GIVEN_UP = enum.auto()


class Half(NamedTuple):
    """An undecided transactional message."""

    log_offset: LogOffset
    """The log offset of its newest record."""
    since_ms: int
    """When it was first stored."""
    checks: int
    """How often its producers were asked."""
    due_ms: int
    """When they are asked next."""


class Origin(NamedTuple):
    """The first record of a half message, by which its producer knows it."""

    ordinal: int
    log_offset: int
    since_ms: int

    def __str__(self) -> str:
        return f"{self.ordinal}:{self.log_offset}:{self.since_ms}"


LONGEST_ORIGIN: Final = str(Origin(*[(1 << 63) - 1] * 3))


def origin_of(record: Record, pairs: dict[str, str]) -> Origin:
    """Return the origin of the half message in a record with the properties ``pairs``; the record may be a later copy."""
    named = pairs.get(properties.HALF)
    if named is None:
        return Origin(record.queue_offset, record.log_offset, record.store_ms)
    return Origin(*map(int, named.split(":")))


class _Place(NamedTuple):
    """How many records of each of the two topics the table has taken in."""

    half: int
    op: int


class _Event(NamedTuple):
    """A record of one of the topics."""

    log_offset: int
    place: _Place
    """1 for its own topic, 0 for the other."""
    ordinal: int = -1
    """The first ordinal of the half that it concerns; −1 when the record is damaged."""
    half: Half | None = None
    """``None`` for a decision."""


class _Snapshot(NamedTuple):
    seen: _Place
    halves: dict[int, Half]
    returned: dict[int, int]
    log_end: int
    version: int
    log: dict[str, list[int]]
    """The moment at which it was taken."""

    @property
    def content(self) -> dict[str, Any]:
        """The document to write. It is made in the thread that writes: for 100,000 halves it takes some 30 ms."""
        rows = [[ordinal, *half] for ordinal, half in self.halves.items()]
        returned = {"returned": list(map(list, self.returned.items()))} if self.returned else {}
        return {**self.log, "ordinal": self.seen.half, "op": self.seen.op, "halves": rows, **returned}


class Halves:
    """The undecided half messages of one store, and counts of those decided since the start."""

    def __init__(self, store: MessageStore, folder: Path, check_after_ms: int) -> None:
        """Read the snapshot in ``folder``, and the log from that point on."""
        self._store = store
        self._epochs = Epochs(store)
        self._path = folder / SNAPSHOT
        self.check_after_ms = check_after_ms
        """The age at which producers are asked about a half; a change applies to messages that come after it."""
        self._halves: dict[int, Half] = {}
        """Halves by their first ordinals, the oldest first."""
        self._returned: dict[int, int] = {}
        """The log offsets of halves that came back, by first ordinal; those before the log's begin are dropped."""
        self._claimed: set[int] = set()
        self._seen = _Place(0, 0)
        self._version = self._saved_version = 0
        self._waiting: _Snapshot | None = None  # until the log is durable up to it
        self.decided = dict.fromkeys(Fate, 0)
        """How many halves had each fate, since the start."""
        self.checked = 0
        """How often producers were asked, since the start."""
        self._recover()

    # -- asking -------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._halves)

    def __iter__(self) -> Iterator[int]:
        """Return the first ordinals of all halves that are undecided now; later changes do not affect the iteration."""
        return iter(list(self._halves))

    def find(self, ordinal: int) -> Half | None:
        """Return the undecided half with this first ordinal; ``None`` also while its decision is on its way into the log."""
        return None if ordinal in self._claimed else self._halves.get(ordinal)

    def is_visible(self, half: Half) -> bool:
        """Return whether readers may see the newest record of a half; otherwise it waits for replicas."""
        return half.log_offset < self._store.published_end

    def stored(self, half: Half, read: Read) -> Stored | None:
        """Return the newest record of a half; ``None`` when it is damaged or not visible. Raises ``ColdRead`` as ``read`` does.

        The table says where it is, so a damaged unit in the half topic does not matter.
        """
        return self._store.log.record_at(half.log_offset, read) if self.is_visible(half) else None

    def place_of(self, ordinal: int, log_offset: int) -> int | None:
        """Return where the newest record of the half with this first record is; ``None`` once readers can see its decision.

        Its first record may not be visible yet, or its decision is on its way.
        """
        half = self._halves.get(ordinal)
        if half is not None:
            return half.log_offset
        return log_offset if ordinal >= self._seen.half else None

    def has_returned(self, ordinal: int, given_up_at: int) -> bool:
        """Return whether a half that was given up, by the record at this log offset, has come back since."""
        return self._returned.get(ordinal, -1) > given_up_at

    @property
    def oldest(self) -> int | None:
        """The lowest log offset of an undecided half; ``None`` without any."""
        return min((half.log_offset for half in self._halves.values()), default=None)

    @property
    def oldest_ms(self) -> int | None:
        """The time at which the oldest undecided half was first stored, in Unix milliseconds; ``None`` without any."""
        oldest = next(iter(self._halves.values()), None)
        return None if oldest is None else oldest.since_ms

    # -- changing -----------------------------------------------------------------------------------------------------

    def claim(self, ordinal: int) -> None:
        """Note that a decision of this half is staged: ``find`` no longer returns the half, unless the decision fails."""
        assert self.find(ordinal) is not None
        self._claimed.add(ordinal)

    def release(self, ordinal: int) -> None:
        """Note that the decision could not be stored: the half is undecided again."""
        self._claimed.discard(ordinal)

    def asked(self, ordinal: int, checks: int, due_ms: int) -> None:
        """Note that the producers were asked, ``checks`` times in all; they are due again at ``due_ms``."""
        self._halves[ordinal] = self._halves[ordinal]._replace(checks=checks, due_ms=due_ms)
        self._version += 1

    # -- following the log --------------------------------------------------------------------------------------------

    def follow(self, read: Read) -> None:
        """Apply the records of the two topics that readers can see by now. Raises ``ColdRead`` as ``read`` does."""
        ends = self._readable()  # both ends at one moment: otherwise a decision could be seen without its half
        while self._seen.half < ends.half or self._seen.op < ends.op:
            seen = self._seen
            events = list(islice(self._events(seen, ends, read), PORTION))
            if self._seen is seen:  # unless another greenlet applied them while this one waited for the disk
                self._apply(events)

    def _readable(self) -> _Place:
        queues = self._store.queues
        return _Place(*(queues[key].readable if key in queues else 0 for key in (HALVES, OPS)))

    def _events(self, seen: _Place, ends: _Place, read: Read) -> Iterator[_Event]:
        """Return the records of both topics in the order of the log."""
        halves = self._records(HALVES, seen.half, ends.half, read)
        ops = self._records(OPS, seen.op, ends.op, read)
        return heapq.merge(halves, ops, key=attrgetter("log_offset"))

    def _records(self, key: TopicPartition, begin: int, end: int, read: Read) -> Iterator[_Event]:
        if begin >= end:
            return
        place, event_of = (_Place(1, 0), self._stored_half) if key == HALVES else (_Place(0, 1), _decision)
        log_offset = 0
        for stored in islice(self._store.records(self._store.queues[key], begin, READ_BYTES, read), end - begin):
            if stored is None:  # reported when it was read
                yield _Event(log_offset, place)
                continue
            log_offset = stored.log_offset
            yield _Event(log_offset, place, *event_of(stored))

    def _stored_half(self, stored: Stored) -> tuple[int, Half]:
        data = stored.buffer[stored.at : stored.at + stored.size]
        after_ms = self.check_after_ms
        ordinal, since_ms = identity(data).queue_offset, store_ms(data)
        content = bytes(data)
        if _HALF_NAME in content or _IMMUNITY_NAME in content:
            record = decode_record(content)
            pairs = properties.parse(record.properties.decode(errors="replace"))
            ordinal, _, since_ms = origin_of(record, pairs)
            seconds = pairs.get(IMMUNITY, "")
            if seconds.isascii() and seconds.isdecimal():  # Python converts no text of more than 4,300 digits
                after_ms = 1000 * (min(int(seconds), MOST_IMMUNE_S) if len(seconds) <= _IMMUNE_DIGITS else MOST_IMMUNE_S)
        return ordinal, Half(LogOffset(stored.log_offset), since_ms, 0, since_ms + after_ms)

    def _apply(self, events: list[_Event]) -> None:
        half_at, op_at = self._seen
        for _, place, ordinal, half in events:
            half_at, op_at = half_at + place.half, op_at + place.op
            if half is not None:
                if ordinal not in self._halves and ordinal != half_at - place.half:  # a copy of what had left the table
                    self._returned[ordinal] = half.log_offset
                known = self._halves.get(ordinal, half)  # a copy changes the place, but not the age and the checks
                self._halves[ordinal] = known._replace(log_offset=half.log_offset)
            else:
                self._halves.pop(ordinal, None)
                self._claimed.discard(ordinal)
        self._seen = _Place(half_at, op_at)
        self._version += 1

    # -- the snapshot -------------------------------------------------------------------------------------------------

    def save(self, run: Run) -> None:
        """Write the table that an earlier call copied, once the log is durable up to there; copy it again if it has changed.

        Call it at intervals.
        """
        waiting = self._waiting
        if self._store.failure is not None or (waiting is not None and waiting.log_end > self._store.durable_end):
            return
        self._waiting = self._snapshot() if self._version != self._saved_version else None
        if waiting is not None:
            self._write(waiting, run)

    def save_last(self, run: Run = run_here) -> None:
        """Write the table at an orderly stop, when nothing else writes to the store any more."""
        if self._store.failure is None:
            self._store.sync(run)
            self.follow(read_here)
            self._write(self._snapshot(), run)

    def _snapshot(self) -> _Snapshot:
        begin, end = self._store.log.begin, self._store.log.end
        self._returned = {ordinal: place for ordinal, place in self._returned.items() if place >= begin}
        tables = self._halves.copy(), self._returned.copy()
        return _Snapshot(self._seen, *tables, end, self._version, moment(self._epochs, end))

    def _write(self, snapshot: _Snapshot, run: Run) -> None:
        if snapshot.version == self._saved_version:
            return
        run(lambda: self._store.disk.make_directories(self._path.parent))
        run(lambda: write_document(self._store.disk, self._path, snapshot.content))
        self._saved_version = snapshot.version

    def _recover(self) -> None:
        store, log = self._store, self._store.log
        content, problems = read_snapshot(store.disk, self._path, self._epochs)
        for problem in problems:
            logger.error("table of half messages damaged, found again in the log problem=%s", problem)
        ends = self._readable()
        if content is not None:
            self._seen = _Place(min(content["ordinal"], ends.half), min(content["op"], ends.op))
            for ordinal, *fields in content["halves"]:
                half = Half(*fields)
                # before the log's begin it was decided or stored again, and beyond the end it is lost
                if log.begin <= half.log_offset < log.end:
                    self._halves[ordinal] = half
            self._returned = {ordinal: place for ordinal, place in content.get("returned", ()) if place < log.end}
        begins = (store.first(store.queues[key], read_here)[0] if key in store.queues else 0 for key in (HALVES, OPS))
        self._seen = _Place(*map(max, zip(self._seen, begins, strict=True)))
        self.follow(read_here)
        # copies stand in the log after younger halves
        self._halves = dict(sorted(self._halves.items(), key=lambda item: item[1].since_ms))
        if self._halves:
            logger.info("half messages are undecided count=%d", len(self._halves))


def _decision(stored: Stored) -> tuple[int, None]:
    """Return the first ordinal of the half that an op record decides."""
    return int(bytes(decode_record(stored.buffer[stored.at : stored.at + stored.size]).body)), None
