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

What the index has is in ``metaq.timers.entering``.
"""

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final

from metaq.store.files.filecache import Run, run_here
from metaq.store.log.commitlog import CommitLog
from metaq.store.ordered.ordered import Ordered
from metaq.timers.definitions import Definitions
from metaq.timers.dueorder import DueOrder
from metaq.timers.entering import PACK_FROM, SLICE, Counter, IndexStep, TimerIndex, TimerState, add
from metaq.timers.records import (
    Cancelled,
    Defined,
    Delivered,
    Key,
    Park,
    Parks,
    Secret,
    TimerEvent,
    Undefined,
    key_of,
    record_count,
)

PORTION: Final = 64
"""Events in one batch of the index. A batch holds the interpreter's lock, so a large one would stop the loop."""
LARGE_PORTION: Final = 256
"""The same while many events wait."""
MANY: Final = 10_000
_LAST: Final = b"\xff" * 17
"""A key after all others."""


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

    def __init__(self, index: Ordered, log: CommitLog, run: Run = run_here, pack_from: int = PACK_FROM) -> None:
        """Begin with what the index has; ``run`` is where an engine waits later, if it has to."""
        self._counter = Counter(log)
        self.index = TimerIndex(index, log, self._counter, pack_from)
        self._waiting: deque[TimerEvent] = deque()  # safe, and not yet in the index
        self._waiting_size = 0  # their records
        self._near: dict[Key, int] = {}  # to the places
        self._order = DueOrder()  # of these, and of some that are near no more
        self._taken: dict[Key, int] = {}
        self._far: dict[Key, int] = {}  # beyond the horizon, and not yet in the index
        self._far_heap: list[tuple[Key, list[Key]]] = []  # these, some together, with the least of them, and what entered since
        self._far_heap_size = 0
        self._whole: deque[Parks] = deque()  # far ones, too, of which nobody has asked for a single one yet, in the log's order
        self._whole_from: Key = _LAST  # none of these is below it
        self._cancelled: dict[Key, None] = {}  # not yet in the index
        self.horizon: Key = b""
        self.flight = Flight()
        self.segments = self._counter.kept(self.index.segments)
        """Pending timers by the base of the segment that holds them."""
        self.secret: Secret | None = self.index.secret
        self.definitions = Definitions()
        self.definitions.load(self.index.slice)
        self.known_from = self.index.known_from
        self.asked = 0
        """The number of calls that read or flush the index now, off the loop."""
        self.index.run = run

    @property
    def covered(self) -> int:
        """X: the index has all events before this log offset."""
        return self.index.covered

    @property
    def followed(self) -> int:
        """The end of the last event that was taken into the table: once ``covered`` is there, none so far can be undone."""
        return self._waiting[-1].end if self._waiting else self.covered

    # -- figures ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(self.segments.values())

    @property
    def waiting(self) -> int:
        """The number of events that wait to enter the index."""
        return self._waiting_size

    @property
    def near(self) -> int:
        """The number of pending timers in memory that nobody has taken."""
        return len(self._near)

    @property
    def first(self) -> Key | None:
        """The least key that is pending below the horizon and that nobody has taken."""
        order = self._order
        while (first := order.first) is not None and first not in self._near:
            order.pop()
        return first

    def oldest(self) -> int | None:
        """Return the base of the oldest segment that holds a pending timer, or the place of an older definition or the secret.

        A timer that was stored again counts at its old place until that is in the index: a power cut could undo it before.
        """
        places = [
            *self._counter.kept(self.segments | self.index.segments),
            *(() if self.secret is None else (self.secret.place,)),
        ]
        places += [definition.place for definition in self.definitions]
        return min(places, default=None)

    def counted(self, before: int) -> list[int]:
        """Return the bases of the segments that end at or before a log offset and count as holding pending timers."""
        return self._counter.ended(self.segments | self.index.segments, before)

    def discount(self, bases: Iterable[int]) -> None:
        """Learn that segments hold no pending timer: they count as if they did when marks were damaged or lost."""
        for base in bases:
            self.segments.pop(base, None)
            self.index.segments.pop(base, None)

    # -- the fold -----------------------------------------------------------------------------------------------------

    def follow(self, event: TimerEvent) -> None:
        """Take a safe event into the table; the next one in the order of the log comes with the next call."""
        self._waiting.append(event)
        self._waiting_size += record_count(event)
        if isinstance(event, Parks):
            self._all_parked(event)
            return
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

    def _all_parked(self, event: Parks) -> None:
        keys, places = event.keys, event.places
        least = min(keys)
        if least >= self.horizon:
            self._whole.append(event)
            self._whole_from = min(self._whole_from, least)
        else:
            for key, place in zip(keys, places, strict=True):
                self._put(key, place)
        self._counter.count_all(self.segments, places)

    def _split(self) -> None:
        """Take apart what was left whole, as most of it is until it enters the index: two entries of a table less for each."""
        if self._whole:
            for run in self._whole:
                self._far.update(zip(run.keys, run.places, strict=True))
                self._push_far(min(run.keys), run.keys)
            self._whole.clear()
            self._whole_from = _LAST

    def _parked(self, event: Park) -> None:
        key, place, before, _, _ = event
        if before is not None:
            self._taken.pop(key, None)
            self._counter.count(self.segments, before, -1)
        self._put(key, place)
        self._counter.count(self.segments, place, 1)

    def _put(self, key: Key, place: int) -> None:
        if key < self.horizon:
            if key not in self._near:
                self._order.add(key)
            self._near[key] = place
        else:
            self._split()
            if key not in self._far:
                self._push_far(key, [key])
            self._far[key] = place

    def _push_far(self, least: Key, keys: list[Key]) -> None:
        heappush(self._far_heap, (least, keys))
        self._far_heap_size += len(keys)

    def _pop_far(self, end: Key) -> dict[Key, int]:
        """Return the far timers before a key, and their places: they are far no more."""
        popped: dict[Key, int] = {}
        if self._whole_from < end:
            self._split()
        while self._far_heap and self._far_heap[0][0] < end:
            _, keys = heappop(self._far_heap)
            self._far_heap_size -= len(keys)
            others: list[Key] = []
            for key in keys:
                place = self._far.get(key)
                if place is None:
                    continue
                if key < end:
                    popped[key] = place
                    del self._far[key]
                else:
                    others.append(key)
            if others:
                self._push_far(min(others), others)
        return popped

    def _delivered(self, event: Delivered) -> None:
        to = event.to
        while (first := self._order.first) is not None and first <= to:
            self._near.pop(self._order.pop(), None)
        self._pop_far(to + b"\0")
        ended = [key for key in self._taken if key <= to]
        if len(ended) == len(self._taken):
            self._taken.clear()
        else:
            for key in ended:
                del self._taken[key]
        self.horizon = max(self.horizon, to + b"\0")
        for base, count in event.segments.items():
            add(self.segments, base, -count)

    def _cancel(self, key: Key, place: int) -> None:
        self._remove(key)
        self._cancelled[key] = None
        self._counter.count(self.segments, place, -1)

    def _remove(self, key: Key) -> None:
        self._split()
        self._near.pop(key, None)
        self._taken.pop(key, None)
        self._far.pop(key, None)

    # -- the index ----------------------------------------------------------------------------------------------------

    def apply(self, before: int) -> bool:
        """Enter one batch of the events that end at or before a log offset into the index.

        Return false when there is none, or when the index would have to wait; nothing has changed then, nor when it fails.
        """
        portion = LARGE_PORTION if self._waiting_size > MANY else PORTION
        taken: list[TimerEvent] = []
        size = 0
        while self._waiting and size < portion and self._waiting[0].end <= before:
            event = self._waiting.popleft()
            taken.append(event)
            size += record_count(event)
        if not taken:
            return False
        is_entered = False
        try:
            is_entered = self.index.enter(taken, self.definitions, self.horizon)
        finally:
            if not is_entered:
                self._waiting.extendleft(reversed(taken))
        if is_entered:
            self._waiting_size -= size
            self._forget(taken)
        return is_entered

    def _forget(self, applied: Iterable[TimerEvent]) -> None:
        """Drop what the index knows now."""
        for event in applied:
            if isinstance(event, Parks):
                if self._whole and self._whole[0] is event:
                    self._whole.popleft()
                    if not self._whole:
                        self._whole_from = _LAST
                elif self._far:
                    for key, place in zip(event.keys, event.places, strict=True):
                        self._forget_far(key, place)
            elif isinstance(event, Park):
                self._forget_far(event.key, event.place)
            elif isinstance(event, Cancelled):
                for key, _ in event.timers:
                    self._cancelled.pop(key, None)
            elif isinstance(event, Defined | Undefined) and (ended := event[1]) is not None:
                self._cancelled.pop(ended.key, None)
        if self._far_heap_size > 2 * len(self._far) + MANY:
            self._far_heap, self._far_heap_size = [], 0
            if self._far:
                self._push_far(min(self._far), list(self._far))

    def _forget_far(self, key: Key, place: int) -> None:
        newest = self._far.pop(key, None)
        if newest is not None and newest != place:  # it was stored again since
            self._far[key] = newest

    def flush(self, run: Run) -> None:
        """Make durable what has entered the index."""
        self.asked += 1
        try:
            self.index.ordered.flush(run)
        finally:
            self.asked -= 1

    # -- the near ones ------------------------------------------------------------------------------------------------

    def load(self, until: Key) -> IndexStep:
        """Move the horizon on towards ``until`` by one slice of the index.

        Timers that stand only in packs are not in a slice, so it stays where it is until all of these before ``until`` are
        sorted in.
        """
        if self.horizon >= until:
            return IndexStep.DONE
        step = self.index.sort_in(until)
        if step is not IndexStep.DONE:
            return step
        found = self.index.timers(self.horizon, until)
        self._split()
        horizon = until if len(found) < SLICE else found[-1][0] + b"\0"
        for key, place in found:
            if key not in self._cancelled and key not in self._taken and key not in self._far:
                self._near[key] = place
                self._order.add(key)
        for key, place in self._pop_far(horizon).items():
            self._near[key] = place
            self._order.add(key)
        self.horizon = horizon
        return IndexStep.DONE if horizon == until else IndexStep.MORE

    def take_due(self, now_ms: int, most: int) -> list[tuple[Key, int]]:
        """Take the timers that are due, in order, at most so many; return their keys and places.

        None is taken at or beyond a key in flight: a delivery means all keys up to its last one.
        """
        end, barrier = key_of(now_ms + 1, 0), self.flight.lowest
        if barrier is not None and barrier < end:
            end = barrier
        taken: list[tuple[Key, int]] = []
        order, near = self._order, self._near
        while len(taken) < most and (key := order.first) is not None and key < end:
            order.pop()
            place = near.pop(key, -1)
            if place >= 0:  # else it was cancelled or taken
                self._taken[key] = place
                taken.append((key, place))
        return taken

    def is_clear(self, to: Key) -> bool:
        """Return whether all pending timers up to a key are taken, and none is in flight: a delivery may say so."""
        lowest, first = self.flight.lowest, self.first
        return (lowest is None or lowest > to) and (first is None or first > to)

    def page(self, after: Key, most: int) -> tuple[list[tuple[Key, int]], Key | None]:
        """Return the first pending timers after a key with their places, and the key to go on after; ``None`` after the last.

        One call reads one slice of the index, which may have some that are pending no more. So there are at most ``most``, and
        perhaps fewer, or none, before the last. Timers that are taken are left out.

        The caller keeps changes of the index away, and has sorted in all packs (``metaq.engine.timers.upkeep``).
        """
        rows = self.index.timers(max(after + b"\0", self.horizon), b"\xff")
        self._split()
        end = rows[-1][0] if len(rows) == SLICE else _LAST
        memory = [*self._near.items(), *self._far.items()]
        found = {key: place for key, place in memory if after < key <= end}
        for key, place in rows:
            if key >= self.horizon and key not in found and key not in self._cancelled and key not in self._taken:
                found[key] = place
        timers = sorted(found.items())
        if len(timers) > most:
            del timers[most:]
            end = timers[-1][0]
        return timers, None if end == _LAST else end

    # -- single ones --------------------------------------------------------------------------------------------------

    def state(self, key: Key) -> TimerState:
        """Return what memory knows about a timer."""
        self._split()
        if key in self._taken:
            return TimerState.TAKEN
        if key in self._near or key in self._far:
            return TimerState.PENDING
        if key in self._cancelled:
            return TimerState.CANCELLED
        return TimerState.FAR

    def find(self, keys: list[Key], run: Run) -> list[tuple[TimerState, int]]:
        """Return what the index says about timers that memory does not know: the state, and the place of a pending one.

        The call may wait for the disk. What it returns holds only if afterwards the index has the same ``version`` and
        ``state`` still says ``FAR``, and a pending timer must not be below the horizon then.
        """
        self.asked += 1
        try:
            return self.index.find(keys, run)
        finally:
            self.asked -= 1

    def place(self, key: Key) -> int | None:
        """Return the place of a pending timer that memory knows and nobody has taken."""
        self._split()
        return self._near.get(key, self._far.get(key))

    def take(self, key: Key, place: int) -> None:
        """Take a pending timer, which memory or the index has."""
        self._split()
        self._near.pop(key, None)
        self._far.pop(key, None)
        self._taken[key] = place

    def release(self, key: Key) -> None:
        """Give back a timer that was taken: what was to become of it did not."""
        place = self._taken.pop(key)
        if key < self.horizon:
            self._near[key] = place
            self._order.add(key)
        else:
            self._far[key] = place
            self._push_far(key, [key])
