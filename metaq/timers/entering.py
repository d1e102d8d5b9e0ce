"""The index of timers: what has entered it up to X, and how the events of the log enter it, batch by batch.

Keys; integers are unsigned and big-endian::

    T due (8) id (8)    → empty, or the place of the newest park (8) when that is not the first one
    X due (8) id (8)    → empty: a cancelled timer, so that a second cancel gets the same answer
    S base (8)          → how many pending timers the segment with this base holds (8)
    Z                   → the secret of the handles (16) and its place (8)
    C number (8)        → the definition of a recurring message, as JSON
    N number (8)        → due (8) id (8): its next run
    B                   → where the log began when this index was made (8): of timers from before it not all is known
    P, R, D             packs of timers, which are not yet sorted in: metaq.timers.packs
"""

import enum
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from metaq.errors import IndexFailed
from metaq.store.files.filecache import Run, run_here
from metaq.store.log.commitlog import CommitLog
from metaq.store.log.segments import Segment
from metaq.store.ordered.engine import DeleteKey, DeleteRange, Entry, Operation, SetKey
from metaq.store.ordered.following import checksum_before
from metaq.store.ordered.ordered import Covered, Ordered
from metaq.timers.definitions import Definitions
from metaq.timers.packs import REACHED, REMOVED, Packs, has_key, keys_in, pack_row
from metaq.timers.records import Cancelled, Delivered, Key, Park, Parks, Secret, TimerEvent, key_of, parts_of

TIMER, CANCEL, SEGMENT, SECRET, BEGIN = b"T", b"X", b"S", b"Z", b"B"
SLICE: Final = 256
"""Keys that one call reads from the index: some 0.1 ms."""
KEPT_CANCELS_MS: Final = 24 * 3_600_000
"""How long after it was due a cancelled timer is remembered."""
PACK_FROM: Final = 32
"""Fewer parks in a batch are sorted in at once."""
MOST_PACKED: Final = 1 << 20
"""Timers in packs: a start reads them all, 16 MiB. Beyond that, parks are sorted in at once."""
SORTED_AT_ONCE: Final = 2
"""Packs that are read together, and sorted in within about a millisecond."""
OVER_AT_ONCE: Final = 16
"""Packs that are removed in one batch, with a row for each of their timers that was cancelled."""
_new: Final = tuple.__new__
"""Costs a third of a named tuple's own constructor."""
_NUMBER: Final = struct.Struct(">Q")
_SECRET: Final = struct.Struct(">16sQ")


class IndexStep(enum.Enum):
    """The end of one step of a long work on the index."""

    MORE = enum.auto()
    """There may be more to do."""
    DONE = enum.auto()
    """There was nothing left to do."""
    REFUSED = enum.auto()
    """The engine would have had to wait. Nothing was changed; try again soon."""


class TimerState(enum.Enum):
    """The state of a timer, as memory or the index knows it."""

    PENDING = enum.auto()
    TAKEN = enum.auto()
    CANCELLED = enum.auto()
    GONE = enum.auto()
    """Delivered, or never stored."""
    FAR = enum.auto()
    """Only the index knows."""


class Counter:
    """Counts timers by the segment of the log that holds them."""

    def __init__(self, log: CommitLog) -> None:
        self._log = log
        self._segment: Segment | None = None  # the last one that was looked for: most places are in one

    def count(self, segments: dict[int, int], place: int, change: int) -> None:
        """Change the count of the segment that holds a place; a place that has aged out counts nowhere."""
        segment = self._segment
        if segment is None or not segment.base <= place < segment.end or place < self._log.begin:
            segment = self._segment = self._log.find(place)
        if segment is not None:
            add(segments, segment.base, change)

    def count_all(self, segments: dict[int, int], places: Sequence[int]) -> None:
        """Count timers at places, which rise."""
        first = self._log.find(places[0])
        if first is not None and places[-1] < first.end:
            add(segments, first.base, len(places))
        else:
            for place in places:
                self.count(segments, place, 1)

    def kept(self, segments: dict[int, int]) -> dict[int, int]:
        """Return the counts without segments that were deleted since: what ended their last timers may be later in the log."""
        return {base: count for base, count in segments.items() if base >= self._log.begin}

    def ended(self, segments: Iterable[int], before: int) -> list[int]:
        """Return those of some segments, given by their bases, that end at or before a log offset and are kept."""
        found = [(base, self._log.find(base)) for base in segments]
        return [base for base, segment in found if segment is not None and segment.end <= before]


def add(segments: dict[int, int], base: int, change: int) -> None:
    """Change the count of a segment."""
    count = segments.get(base, 0) + change
    if count > 0:
        segments[base] = count
    else:
        segments.pop(base, None)


class _Batch:
    """The changes that the events of one batch make."""

    def __init__(self, reached: Key, low: Key, segments: dict[int, int]) -> None:
        self.operations: list[Operation] = []
        self.packed: dict[Key, None] = {}
        """First parks of the batch that are pending at its end."""
        self.removed: list[Key] = []
        """Timers of packs that were cancelled, or stored again."""
        self.reached = reached
        self.low = low
        """No timer below it has a row of its own."""
        self.segments = segments

    def put(self, key: Key, value: bytes = b"") -> None:
        """Give a timer a row of its own."""
        self.operations.append(_new(SetKey, (TIMER + key, value)))
        self.low = min(self.low, key)

    def deliver(self, to: Key) -> None:
        """End all timers up to a key.

        The ranges of two deliveries never overlap: to read through n ranges that begin alike costs RocksDB n² steps.
        """
        self.packed = {key: None for key in self.packed if key > to}
        end = to + b"\0"
        if end > self.low:
            begin, last = TIMER + self.low, self.operations[-1] if self.operations else None
            if isinstance(last, DeleteRange) and last.end == begin:
                begin = last.begin
                self.operations.pop()
            self.operations.append(DeleteRange(begin, TIMER + end))
            self.low = end
        self.reached = max(self.reached, to)


class TimerIndex:
    """The index of timers of one store."""

    def __init__(self, ordered: Ordered, log: CommitLog, counter: Counter, pack_from: int = PACK_FROM) -> None:
        """Begin with what the index has. It waits for the disk; later ``run`` says where."""
        self.ordered = ordered
        self.run: Run = run_here
        """Where an engine waits, if it has to."""
        self._log = log
        self._counter = counter
        self._pack_from = pack_from
        self.packs = Packs()
        self.packs.load(self.slice)
        self._low: Key = b""  # no timer below it has a row of its own
        self.version = 0
        """Changes with every change of the index."""
        self.segments: dict[int, int] = {}
        """Pending timers at X by the base of the segment that holds them."""
        begin = SEGMENT
        while rows := self.slice(begin, SEGMENT + b"\xff"):
            for key, value in rows:
                self.segments[_NUMBER.unpack(key[1:])[0]] = _NUMBER.unpack(value)[0]
            begin = rows[-1][0] + b"\0"
        secret, known_from = self.ordered.find([SECRET, BEGIN])
        self.secret: Secret | None = None
        """The secret that was in the index when it was opened."""
        if secret is not None:
            value, place = _SECRET.unpack(secret)
            self.secret = Secret(value, place, self.covered)
        self.known_from: int = log.begin if known_from is None else _NUMBER.unpack(known_from)[0]
        """Cancels of timers whose first parks lie before this log offset may be forgotten: the log had lost them already."""

    @property
    def covered(self) -> int:
        """X: the index has all events before this log offset."""
        return 0 if self.ordered.covered is None else self.ordered.covered.log_offset

    # -- reading ------------------------------------------------------------------------------------------------------

    def slice(self, begin: bytes, end: bytes) -> list[Entry]:
        """Return the first entries of a range of the index, at most ``SLICE``."""
        with self.ordered.scan(begin, end, self.run) as scan:
            return scan.next(SLICE)

    def timers(self, begin: Key, end: Key) -> list[tuple[Key, int]]:
        """Return the first timers of a range that have rows of their own, and their places, at most ``SLICE``."""
        rows = self.slice(TIMER + begin, TIMER + end)
        return [(row[1:], _NUMBER.unpack(value)[0] if value else parts_of(row[1:])[1]) for row, value in rows]

    def find(self, keys: Sequence[Key], run: Run) -> list[tuple[TimerState, int]]:
        """Return the states of timers, and the places of pending ones. The answer holds if ``version`` is still the same."""
        ends = [self.packs.end_of(key) for key in keys]
        packs = list(dict.fromkeys(end for end in ends if end is not None))
        wanted = [*map(pack_row, packs), *(TIMER + key for key in keys), *(CANCEL + key for key in keys)]
        rows = self.ordered.find(wanted, run)
        pack_of = dict(zip(packs, rows, strict=False))
        timers, cancels = rows[len(packs) : len(packs) + len(keys)], rows[len(packs) + len(keys) :]
        found = []
        for key, end, timer, cancel in zip(keys, ends, timers, cancels, strict=True):
            if timer is not None:
                found.append((TimerState.PENDING, _NUMBER.unpack(timer)[0] if timer else parts_of(key)[1]))
            elif cancel is not None:
                found.append((TimerState.CANCELLED, 0))
            elif end is not None and (pack := pack_of[end]) and has_key(pack, key) and self.packs.is_pending(key, end):
                found.append((TimerState.PENDING, parts_of(key)[1]))
            else:
                found.append((TimerState.GONE, 0))
        return found

    # -- entering -----------------------------------------------------------------------------------------------------

    def enter(self, events: Sequence[TimerEvent], definitions: Definitions, horizon: Key) -> bool:
        """Enter events, the next ones of the log, all or none; return false when the index would have to wait.

        Timers below the horizon are in memory.
        """
        batch = _Batch(self.packs.reached, self._low, self._counter.kept(self.segments))
        if not self.covered:
            batch.operations.append(SetKey(BEGIN, _NUMBER.pack(self.known_from)))
        for event in events:
            self._enter(batch, event, definitions)
        batch.operations += self._changes_of(batch.segments)
        if batch.reached != self.packs.reached:
            batch.operations.append(SetKey(REACHED, batch.reached))
        end, packed = events[-1].end, list(batch.packed)
        is_pack = len(packed) >= self._pack_from and self.packs.count + len(packed) <= MOST_PACKED
        if is_pack:
            batch.operations.append(SetKey(pack_row(end), b"".join(packed)))
        else:
            for key in packed:
                batch.put(key)
        if not self._apply(batch.operations, Covered(end, checksum_before(self._log, end))):
            return False
        self._low, self.segments, self.packs.reached = batch.low, batch.segments, batch.reached
        if is_pack:
            self.packs.add(end, packed, horizon)
        for key in batch.removed:
            self.packs.remove(key)
        return True

    def _changes_of(self, segments: Mapping[int, int]) -> list[Operation]:
        """Return what makes the index count so many pending timers in each segment of the log."""
        operations: list[Operation] = []
        for base in segments.keys() | self.segments.keys():
            count = segments.get(base)
            if count is None:
                operations.append(DeleteKey(SEGMENT + _NUMBER.pack(base)))
            elif count != self.segments.get(base):
                operations.append(SetKey(SEGMENT + _NUMBER.pack(base), _NUMBER.pack(count)))
        return operations

    def _apply(self, operations: Sequence[Operation], covered: Covered) -> bool:
        is_applied = self.ordered.apply(operations, covered, self.run)
        self.version += is_applied
        return is_applied

    def _enter(self, batch: _Batch, event: TimerEvent, definitions: Definitions) -> None:
        if isinstance(event, Parks):
            self._counter.count_all(batch.segments, event.places)
            if min(event.keys) > batch.reached:
                batch.packed.update(dict.fromkeys(event.keys))
            else:
                for key in event.keys:
                    self._park(batch, key)
            return
        if isinstance(event, Park):
            key, place, before, _, definition = event
            self._counter.count(batch.segments, place, 1)
            if before is None:
                self._park(batch, key)
            else:
                self._counter.count(batch.segments, before, -1)
                self._unpack(batch, key)
                batch.put(key, _NUMBER.pack(place))
            if definition is None:  # of nearly all
                return
        elif isinstance(event, Delivered):
            batch.deliver(event.to)
            for base, count in event.segments.items():
                add(batch.segments, base, -count)
        elif isinstance(event, Cancelled):
            for key, place in event.timers:
                self._cancel(batch, key, place)
        elif isinstance(event, Secret):
            batch.operations.append(SetKey(SECRET, _SECRET.pack(event.secret, event.place)))
        elif event[1] is not None:  # the run of a definition that has ended
            self._cancel(batch, event[1].key, event[1].place)
        batch.operations += definitions.rows(event)

    def _park(self, batch: _Batch, key: Key) -> None:
        if key > batch.reached:
            batch.packed[key] = None
        else:
            batch.put(key)

    def _cancel(self, batch: _Batch, key: Key, place: int) -> None:
        self._unpack(batch, key)
        batch.operations.append(DeleteKey(TIMER + key))
        batch.operations.append(SetKey(CANCEL + key))
        self._counter.count(batch.segments, place, -1)

    def _unpack(self, batch: _Batch, key: Key) -> None:
        """Have a timer count no more in its pack, if it is in one."""
        if key in batch.packed:
            del batch.packed[key]
        elif self.packs.end_of(key) is not None:
            batch.operations.append(SetKey(REMOVED + key))
            batch.removed.append(key)

    def forget_cancels(self, now_ms: int) -> None:
        """Remove the cancels of timers that would have been due more than ``KEPT_CANCELS_MS`` ago."""
        if self.ordered.covered is not None:
            old = DeleteRange(CANCEL, CANCEL + key_of(max(0, now_ms - KEPT_CANCELS_MS), 0))
            self._apply([old], self.ordered.covered)

    # -- packs --------------------------------------------------------------------------------------------------------

    def sort_in(self, until: Key | None = None) -> IndexStep:
        """Give all timers of some packs rows of their own: of packs that have one beyond the horizon and before ``until``.

        Packs of which all was delivered are removed.
        """
        covered = self.ordered.covered
        if covered is None:
            return IndexStep.DONE
        over = self.packs.over(OVER_AT_ONCE)
        if over and not self._remove(over, covered):
            return IndexStep.REFUSED
        ends = self.packs.far(SORTED_AT_ONCE, until)
        rows = self.ordered.find([pack_row(end) for end in ends], self.run) if ends else []
        for end, row in zip(ends, rows, strict=True):
            if row is None:
                raise IndexFailed(f"the index has no timers of before the log offset {end}, of which it had many")
            batch = _Batch(self.packs.reached, self._low, {})
            for key in keys_in(row):
                if self.packs.is_pending(key, end):
                    batch.put(key)
            if not self._apply([*batch.operations, *self.packs.rows_of(end)], covered):
                return IndexStep.REFUSED
            self._low = batch.low
            self.packs.drop(end)
        return IndexStep.MORE if ends or len(over) == OVER_AT_ONCE else IndexStep.DONE

    def _remove(self, ends: list[int], covered: Covered) -> bool:
        if not self._apply([row for end in ends for row in self.packs.rows_of(end)], covered):
            return False
        for end in ends:
            self.packs.drop(end)
        return True
