"""The pending timers of one store: a fold over parks and marks in the order of the log, in memory and in an ordered index.

::

                         X                     end of what is safe
    log      ────────────┃─────────────────────┃──────────────▶
              in the index   waits in memory      in flight: staged, or not yet safe

             ◀── near: in memory, in the order of the keys ──┃── far: in the index, or waiting to be applied to it ──▶
    keys     ────────────────────────────────────────────────┃────────────────────────────────────────────────────
                                                          horizon

An event is *safe* when readers could see its record. Safe events change the table at once. They enter the index when
neither a power cut nor a failover can take them back (``apply``), together with the log offset X before which all of them are
there. So the index is a function of the log before X, and what is between X and the end of the log is folded again at a start.

Every pending timer whose key is below the *horizon* is in memory, ``near``; ``load`` moves the horizon on. The others are far.
A timer that is about to be delivered, cancelled or stored again is *taken*: it is nobody else's until the outcome is known.

Keys in the index; integers are unsigned and big-endian::

    T due (8) id (8)    → empty, or the place of the newest park (8) when that is not the first one
    X due (8) id (8)    → empty: a cancelled timer, so that a second cancel gets the same answer
    S base (8)          → how many pending timers the segment with this base holds (8)
    Z                   → the secret of the handles (16) and its place (8)
    C number (8)        → the definition of a recurring message, as JSON
    N number (8)        → due (8) id (8): its next run
    B                   → where the log began when this index was made (8): of timers from before it not all is known
"""

import enum
import struct
from collections import deque
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Final

from metaq.store.files.filecache import Run, run_here
from metaq.store.log.commitlog import CommitLog
from metaq.store.log.segments import Segment
from metaq.store.ordered.engine import DeleteKey, DeleteRange, Entry, Operation, SetKey
from metaq.store.ordered.following import checksum_before
from metaq.store.ordered.ordered import Covered, Ordered
from metaq.timers.definitions import Definitions
from metaq.timers.records import (
    Cancelled,
    Defined,
    Delivered,
    Key,
    Park,
    Secret,
    TimerEvent,
    Undefined,
    key_of,
    parts_of,
)

TIMER, CANCEL, SEGMENT, SECRET, BEGIN = b"T", b"X", b"S", b"Z", b"B"
SLICE: Final = 256
"""Keys that one call of ``load`` reads from the index: some 0.1 ms."""
PORTION: Final = 64
"""Events in one batch of the index. A batch holds the interpreter's lock, so a large one would stop the loop."""
LARGE_PORTION: Final = 256
"""The same while many events wait."""
MANY: Final = 10_000
KEPT_CANCELS_MS: Final = 24 * 3_600_000
"""How long after it was due a cancelled timer is remembered."""
_new: Final = tuple.__new__
"""Costs a third of a named tuple's own constructor."""
_NUMBER: Final = struct.Struct(">Q")
_SECRET: Final = struct.Struct(">16sQ")


class TimerState(enum.Enum):
    """The state of a timer, as memory or the index knows it."""

    PENDING = enum.auto()
    TAKEN = enum.auto()
    CANCELLED = enum.auto()
    GONE = enum.auto()
    """Delivered, or never stored."""
    FAR = enum.auto()
    """Only the index knows."""


class Flight:
    """The timers whose newest records are staged and not yet seen by readers, turn by turn. No delivery may pass them.

    Turns become visible in their order, so the least key of each is all that has to be known.
    """

    def __init__(self) -> None:
        self._least: Key | None = None  # of the turn that is going on
        self._appended: deque[Key | None] = deque()

    def add(self, key: Key) -> None:
        """Take a timer whose record is staged in this turn."""
        if self._least is None or key < self._least:
            self._least = key

    def end_turn(self, *, is_stored: bool) -> None:
        """Learn what became of the records of this turn."""
        if is_stored:
            self._appended.append(self._least)
        self._least = None

    def land(self) -> None:
        """Learn that readers see the records of the oldest turn."""
        self._appended.popleft()

    @property
    def lowest(self) -> Key | None:
        """The least key in flight; ``None`` without any."""
        lowest = self._least
        for key in self._appended:
            if key is not None and (lowest is None or key < lowest):
                lowest = key
        return lowest


class Pending:
    """The pending timers of one store."""

    def __init__(self, index: Ordered, log: CommitLog, run: Run = run_here) -> None:
        """Begin with what the index has; ``run`` is where an engine waits later, if it has to."""
        self.index = index
        self._log = log
        self._segment: Segment | None = None  # the last one that was looked for: most places are in one
        self._run: Run = run_here  # what the opening reads
        self._waiting: deque[TimerEvent] = deque()  # safe, and not yet in the index
        self._near: dict[Key, int] = {}  # to the places
        self._heap: list[Key] = []
        self._taken: dict[Key, int] = {}
        self._far: dict[Key, int] = {}  # beyond the horizon, and not yet in the index
        self._far_heap: list[Key] = []
        self._cancelled: dict[Key, None] = {}  # not yet in the index
        self.horizon: Key = b""
        self.flight = Flight()
        self.segments: dict[int, int] = {}
        """Pending timers by the base of the segment that holds them."""
        self._applied: dict[int, int] = {}  # the same at X
        self.secret: Secret | None = None
        self.definitions = Definitions()
        self.known_from = log.begin
        """Of timers whose first parks lie before this log offset, cancels may be forgotten: the log had lost them already."""
        self.asked = 0
        """The number of calls that read or flush the index now, off the loop."""
        self._read_index()
        self._run = run

    def _read_index(self) -> None:
        begin = SEGMENT
        while rows := self._slice(begin, SEGMENT + b"\xff", run_here):
            for key, value in rows:
                self._applied[_NUMBER.unpack(key[1:])[0]] = _NUMBER.unpack(value)[0]
            begin = rows[-1][0] + b"\0"
        self.segments = self._kept(self._applied)
        self.definitions.load(lambda begin, end: self._slice(begin, end, run_here))
        found, begin_found = self.index.find([SECRET, BEGIN])
        if begin_found is not None:
            self.known_from = _NUMBER.unpack(begin_found)[0]
        if found is not None:
            secret, place = _SECRET.unpack(found)
            self.secret = Secret(secret, place, self.covered)

    def _kept(self, segments: dict[int, int]) -> dict[int, int]:
        """Return the counts without segments that were deleted since: what ended their last timers may be later in the log."""
        return {base: count for base, count in segments.items() if base >= self._log.begin}

    def _slice(self, begin: bytes, end: bytes, run: Run) -> list[Entry]:
        """Return the first entries of a range of the index, at most ``SLICE``."""
        with self.index.scan(begin, end, run) as scan:
            return scan.next(SLICE)

    @property
    def covered(self) -> int:
        """X: the index has all events before this log offset."""
        return 0 if self.index.covered is None else self.index.covered.log_offset

    # -- figures ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(self.segments.values())

    @property
    def waiting(self) -> int:
        """The number of events that wait to enter the index."""
        return len(self._waiting)

    @property
    def near(self) -> int:
        """The number of pending timers in memory that nobody has taken."""
        return len(self._near)

    @property
    def first(self) -> Key | None:
        """The least key that is pending below the horizon and that nobody has taken."""
        heap = self._heap
        while heap and heap[0] not in self._near:
            heappop(heap)
        return heap[0] if heap else None

    def oldest(self) -> int | None:
        """Return the base of the oldest segment that holds a pending timer, or the place of an older definition or the secret.

        A timer that was stored again counts at its old place until that is in the index: a power cut could undo it before.
        """
        places = [*self._kept(self.segments | self._applied), *(() if self.secret is None else (self.secret.place,))]
        places += [definition.place for definition in self.definitions]
        return min(places, default=None)

    # -- the fold -----------------------------------------------------------------------------------------------------

    def follow(self, event: TimerEvent) -> None:
        """Take a safe event into the table; the next one in the order of the log comes with the next call."""
        self._waiting.append(event)
        if isinstance(event, Park):
            self._parked(event)
            if event.definition is None:  # of nearly all
                return
        elif isinstance(event, Delivered):
            self._delivered(event)
        elif isinstance(event, Cancelled):
            for key, place in event.timers:
                self._cancel(key, place)
        elif isinstance(event, Secret):
            self.secret = event
        elif event[1] is not None:  # the run of a definition that has ended
            self._cancel(event[1].key, event[1].place)
        self.definitions.follow(event)

    def _parked(self, event: Park) -> None:
        key, place, before, _, _ = event
        if before is not None:
            self._taken.pop(key, None)
            self._count(self.segments, before, -1)
        if key < self.horizon:
            if key not in self._near:
                heappush(self._heap, key)
            self._near[key] = place
        else:
            if key not in self._far:
                heappush(self._far_heap, key)
            self._far[key] = place
        self._count(self.segments, place, 1)

    def _delivered(self, event: Delivered) -> None:
        to = event.to
        for heap, places in ((self._heap, self._near), (self._far_heap, self._far)):
            while heap and heap[0] <= to:
                places.pop(heappop(heap), None)
        for key in [key for key in self._taken if key <= to]:
            del self._taken[key]
        self.horizon = max(self.horizon, to + b"\0")
        for base, count in event.segments.items():
            self._add(self.segments, base, -count)

    def _cancel(self, key: Key, place: int) -> None:
        self._remove(key)
        self._cancelled[key] = None
        self._count(self.segments, place, -1)

    def _remove(self, key: Key) -> None:
        self._near.pop(key, None)
        self._taken.pop(key, None)
        self._far.pop(key, None)

    def _count(self, segments: dict[int, int], place: int, change: int) -> None:
        segment = self._segment
        if segment is None or not segment.base <= place < segment.end or place < self._log.begin:
            segment = self._segment = self._log.find(place)
        if segment is not None:  # a place that has aged out counts nowhere
            self._add(segments, segment.base, change)

    @staticmethod
    def _add(segments: dict[int, int], base: int, change: int) -> None:
        count = segments.get(base, 0) + change
        if count > 0:
            segments[base] = count
        else:
            segments.pop(base, None)

    # -- the index ----------------------------------------------------------------------------------------------------

    def apply(self, before: int) -> bool:
        """Enter one batch of the events that end at or before a log offset into the index.

        Return false when there is none, or when the index would have to wait; nothing has changed then, nor when it fails.
        """
        portion = LARGE_PORTION if len(self._waiting) > MANY else PORTION
        taken: list[TimerEvent] = []
        while self._waiting and len(taken) < portion and self._waiting[0].end <= before:
            taken.append(self._waiting.popleft())
        if not taken:
            return False
        segments = self._kept(self._applied)
        batch: list[Operation] = [] if self.covered else [SetKey(BEGIN, _NUMBER.pack(self.known_from))]
        for event in taken:
            self._enter(batch, event, segments)
        for base in segments.keys() | self._applied.keys():
            count = segments.get(base)
            if count is None:
                batch.append(DeleteKey(SEGMENT + _NUMBER.pack(base)))
            elif count != self._applied.get(base):
                batch.append(SetKey(SEGMENT + _NUMBER.pack(base), _NUMBER.pack(count)))
        end, is_applied = taken[-1].end, False
        try:
            is_applied = self.index.apply(batch, Covered(end, checksum_before(self._log, end)), self._run)
        finally:
            if not is_applied:
                self._waiting.extendleft(reversed(taken))
        if not is_applied:
            return False
        self._applied = segments
        self._forget(taken)
        return True

    def _enter(self, batch: list[Operation], event: TimerEvent, segments: dict[int, int]) -> None:
        if isinstance(event, Park):
            key, place, before, _, definition = event
            batch.append(_new(SetKey, (TIMER + key, b"" if before is None else _NUMBER.pack(place))))
            self._count(segments, place, 1)
            if before is not None:
                self._count(segments, before, -1)
            if definition is None:  # of nearly all
                return
        elif isinstance(event, Delivered):
            batch.append(DeleteRange(TIMER, TIMER + event.to + b"\0"))
            for base, count in event.segments.items():
                self._add(segments, base, -count)
        elif isinstance(event, Cancelled):
            for key, place in event.timers:
                self._enter_cancel(batch, key, place, segments)
        elif isinstance(event, Secret):
            batch.append(SetKey(SECRET, _SECRET.pack(event.secret, event.place)))
        elif event[1] is not None:  # the run of a definition that has ended
            self._enter_cancel(batch, event[1].key, event[1].place, segments)
        batch += self.definitions.rows(event)

    def _enter_cancel(self, batch: list[Operation], key: Key, place: int, segments: dict[int, int]) -> None:
        batch.append(DeleteKey(TIMER + key))
        batch.append(SetKey(CANCEL + key))
        self._count(segments, place, -1)

    def _forget(self, applied: Iterable[TimerEvent]) -> None:
        """Drop what the index knows now."""
        for event in applied:
            if isinstance(event, Park) and self._far.get(event.key) == event.place:
                del self._far[event.key]
            elif isinstance(event, Cancelled):
                for key, _ in event.timers:
                    self._cancelled.pop(key, None)
            elif isinstance(event, Defined | Undefined) and (ended := event[1]) is not None:
                self._cancelled.pop(ended.key, None)
        if len(self._far_heap) > 2 * len(self._far) + MANY:
            self._far_heap = list(self._far)
            heapify(self._far_heap)

    def flush(self, run: Run) -> None:
        """Make durable what has entered the index."""
        self.asked += 1
        try:
            self.index.flush(run)
        finally:
            self.asked -= 1

    def forget_cancels(self, now_ms: int) -> None:
        """Remove the cancels of timers that would have been due more than ``KEPT_CANCELS_MS`` ago."""
        if self.index.covered is not None:
            old = DeleteRange(CANCEL, CANCEL + key_of(max(0, now_ms - KEPT_CANCELS_MS), 0))
            self.index.apply([old], self.index.covered, self._run)

    # -- the near ones ------------------------------------------------------------------------------------------------

    def load(self, until: Key) -> bool:
        """Move the horizon on towards ``until`` by one slice of the index; return whether it is there."""
        if self.horizon >= until:
            return True
        rows = self._slice(TIMER + self.horizon, TIMER + until, self._run)
        horizon = until if len(rows) < SLICE else rows[-1][0][1:] + b"\0"
        for row, value in rows:
            key = row[1:]
            if key not in self._cancelled and key not in self._taken and key not in self._far:
                self._near[key] = _NUMBER.unpack(value)[0] if value else parts_of(key)[1]
                heappush(self._heap, key)
        while self._far_heap and self._far_heap[0] < horizon:
            key = heappop(self._far_heap)
            place = self._far.pop(key, None)
            if place is not None:
                self._near[key] = place
                heappush(self._heap, key)
        self.horizon = horizon
        return horizon == until

    def take_due(self, now_ms: int, most: int) -> list[tuple[Key, int]]:
        """Take the timers that are due, in order, at most so many; return their keys and places.

        None is taken at or beyond a key in flight: a delivery means all keys up to its last one.
        """
        end, barrier = key_of(now_ms + 1, 0), self.flight.lowest
        if barrier is not None and barrier < end:
            end = barrier
        taken: list[tuple[Key, int]] = []
        while len(taken) < most and (key := self.first) is not None and key < end:
            heappop(self._heap)
            place = self._near.pop(key)
            self._taken[key] = place
            taken.append((key, place))
        return taken

    def is_clear(self, to: Key) -> bool:
        """Return whether all pending timers up to a key are taken, and none is in flight: a delivery may say so."""
        lowest, first = self.flight.lowest, self.first
        return (lowest is None or lowest > to) and (first is None or first > to)

    def page(self, after: Key, most: int) -> list[tuple[Key, int]]:
        """Return the first pending timers after a key, at most so many and a slice of the index, with their places.

        The caller keeps changes of the index away (``Timers.index_lock``). Timers that are taken are left out.
        """
        begin = max(after + b"\0", self.horizon)
        rows = self._slice(TIMER + begin, TIMER + b"\xff", self._run)[:most]
        memory = [*self._near.items(), *self._far.items()]
        last = rows[-1][0][1:] if len(rows) == min(most, SLICE) else b"\xff"
        found = {key: place for key, place in memory if after < key <= last}
        for row, value in rows:
            key = row[1:]
            if key >= self.horizon and key not in found and key not in self._cancelled and key not in self._taken:
                found[key] = _NUMBER.unpack(value)[0] if value else parts_of(key)[1]
        return sorted(found.items())[:most]

    # -- single ones --------------------------------------------------------------------------------------------------

    def state(self, key: Key) -> TimerState:
        """Return what memory knows about a timer."""
        if key in self._taken:
            return TimerState.TAKEN
        if key in self._near or key in self._far:
            return TimerState.PENDING
        if key in self._cancelled:
            return TimerState.CANCELLED
        return TimerState.FAR

    def find(self, keys: list[Key], run: Run) -> list[tuple[TimerState, int]]:
        """Return what the index says about timers that memory does not know: the state, and the place of a pending one.

        The call may wait for the disk. What it returns holds only if ``state`` still says ``FAR`` afterwards, and a pending
        timer must not be below the horizon then.
        """
        self.asked += 1
        try:
            rows = self.index.find([TIMER + key for key in keys] + [CANCEL + key for key in keys], run)
        finally:
            self.asked -= 1
        found = []
        for key, timer, cancel in zip(keys, rows, rows[len(keys) :], strict=False):
            if timer is not None:
                found.append((TimerState.PENDING, _NUMBER.unpack(timer)[0] if timer else parts_of(key)[1]))
            else:
                found.append((TimerState.GONE if cancel is None else TimerState.CANCELLED, 0))
        return found

    def place(self, key: Key) -> int | None:
        """Return the place of a pending timer that memory knows and nobody has taken."""
        return self._near.get(key, self._far.get(key))

    def take(self, key: Key, place: int) -> None:
        """Take a pending timer, which memory or the index has."""
        self._near.pop(key, None)
        self._far.pop(key, None)
        self._taken[key] = place

    def release(self, key: Key) -> None:
        """Give back a timer that was taken: what was to become of it did not."""
        place = self._taken.pop(key)
        if key < self.horizon:
            self._near[key] = place
            heappush(self._heap, key)
        else:
            self._far[key] = place
            heappush(self._far_heap, key)
