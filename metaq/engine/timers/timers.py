"""The timers of one broker: their table follows the log, and everything that changes a timer is staged here.

Whatever is staged in a turn is *in flight* until readers could see it; then the table takes it (``metaq.timers.pending``). When
the append of the turn fails, it is undone at once, whatever the order in which senders hear of it.
"""

import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import gevent
from gevent.event import Event

from metaq.engine.context import Context
from metaq.engine.reading.catchup import read_in_the_end
from metaq.engine.timers.staged import Appended, Changes, NextRun, properties_to_park
from metaq.engine.timers.upkeep import Upkeep
from metaq.engine.turn import Turns
from metaq.engine.writing import Draft, Placed, internal_mark, new_record, note, stage
from metaq.errors import DiskFull, IndexFailed, MessageIllegal, NotWritable, Overloaded, StoreError
from metaq.protocol import properties
from metaq.store.copies.discarding import TIMER_INDEX
from metaq.store.files.filecache import Run, read_through
from metaq.store.newrecord import Fields
from metaq.store.ordered.ordered import remove_ordered
from metaq.store.recordgroups import put_record_group
from metaq.store.recovery.recovery import add_feature
from metaq.timers.definitions import RECURRING
from metaq.timers.fold import Fold, Ordinals, ends, readable
from metaq.timers.handles import Handle, Handles
from metaq.timers.opening import FEATURE, open_pending
from metaq.timers.pending import Pending
from metaq.timers.records import (
    LATEST_MS,
    MARKS,
    PARKS,
    Again,
    Cancelled,
    Defined,
    Delivered,
    Key,
    Park,
    Secret,
    TimerEvent,
    Undefined,
    cancel_mark,
    deliver_mark,
    key_of,
    record_count,
    secret_mark,
)

logger = logging.getLogger(__name__)

FOLD_PORTION: Final = 1024
"""Records that the fold reads in one go, some milliseconds of work."""
MOST_WAITING: Final = 200_000
"""Events that may wait to enter the index; beyond it parks are refused."""
RETRY_MS: Final = 100
_new: Final = tuple.__new__
"""Costs a third of a named tuple's own constructor."""
WAIT_S: Final = 0.05
"""Pause while the fold waits for records to become readable."""


class Timers:
    """The timers of one broker, as a master that changes them or as a slave that follows."""

    def __init__(self, context: Context, turns: Turns, run: Run) -> None:
        """Open the table if the log has timers; everything else waits until the first message is parked."""
        self.context = context
        self.turns = turns
        self._store = context.store
        self._run = run
        self._read = read_through(run)
        self._folder: Path = context.settings.data / TIMER_INDEX
        self._pending: Pending | None = None
        self._fold: Fold | None = None
        self._fold_end = Ordinals(0, 0)
        self._failure: type[StoreError] | None = None  # why the index is opened again; an error itself would hold its files
        self._staged: Changes | None = None  # of this turn
        self._in_log: deque[Appended] = deque()  # the turns that readers may not see yet
        self._in_log_events = 0
        self.names_in_flight: set[str] = set()
        """Names of recurring messages that are being defined or ended."""
        self._has_recurring = False  # as the folder says
        self._handles: Handles | None = None  # known with the secret
        self._flushed = 0
        self.upkeep = Upkeep(self._store.clock, self._safe_end)
        self._greenlets: list[Any] = []
        self._changed = Event()
        self.woken: Callable[[], None] = lambda: None
        self.parked = self.delivered = self.cancelled = self.dropped = self.runs_dropped = self.moved = 0
        """Counts since the start. ``runs_dropped`` are those of ``dropped`` that were runs of recurring messages."""
        if any(key in self._store.queues for key in (PARKS, MARKS)):
            with suppress(DiskFull):  # it has the feature, unless its file was lost and written again
                add_feature(self._store, FEATURE)
            self._open()

    def _open(self) -> Pending:
        pending, self._fold = open_pending(self._store, self._folder, self.context.settings.timer_engine, self._run)
        self._pending = pending
        self._fold_end = ends(self._store)
        self._flushed = pending.covered
        if pending.secret is not None:
            self._handles = Handles(pending.secret.secret)
        return pending

    # -- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to read what the log has and the index has not."""
        if self._fold is not None:
            self._greenlets.append(gevent.spawn(self._fold_forever, self._fold))

    def stop(self) -> None:
        """End the reading."""
        gevent.killall(self._greenlets)

    @property
    def is_reading(self) -> bool:
        """True while what was in the log before the start is read."""
        return self._fold is not None

    @property
    def waiting(self) -> int:
        """The number of changes that wait to enter the index."""
        return 0 if self._pending is None else self._pending.waiting

    @property
    def packed(self) -> int:
        """The number of timers that the index holds as they came."""
        return 0 if self._pending is None else self._pending.index.packs.count

    @property
    def is_used(self) -> bool:
        """True when the log has ever had a timer."""
        return self._pending is not None

    def wait(self, most_s: float) -> None:
        """Wait until the table changes, at most so long."""
        self._changed.clear()
        self._changed.wait(most_s)

    @property
    def table(self) -> Pending | None:
        """The pending timers; ``None`` as long as the log has none, until what was before the start is folded, and while the
        index fails."""
        return self._pending if self._fold is None and self._failure is None else None

    def failed(self, error: StoreError) -> None:
        """Take note that the index is damaged, or could not be written: it is opened again, anew when it is damaged."""
        if self._failure is None:
            logger.error("timer index failed reason=%s", error)
            self._failure = type(error)

    def _open_again(self) -> bool:
        """Open the index again, once nobody works with it and nothing is in flight; return whether that is done."""
        self.follow()
        with self.upkeep.lock:
            pending = self._pending
            if pending is None or pending.asked or self._staged is not None or self._in_log or self._store.full is not None:
                return False
            with suppress(StoreError):
                pending.index.ordered.close()
            if self._failure is IndexFailed:
                remove_ordered(self._folder)
            self._open()
            self._failure = None
            self.start()
        return True

    def _fold_forever(self, fold: Fold) -> None:
        """Read what the log has and the index has not; a slave goes on with it as its log grows."""
        while self._fold is fold:
            end = readable(self._store)
            if self.context.replicas.is_master:
                end = Ordinals(min(end.parks, self._fold_end.parks), min(end.marks, self._fold_end.marks))
            events = read_in_the_end("timers", fold.next, end, FOLD_PORTION, self._read)
            if self._fold is not fold:  # the index was opened again meanwhile
                return
            for event in events:
                self._take(event)
            if self.context.replicas.is_master and fold.place == self._fold_end:
                self._fold = None
                self.follow()
                self.woken()
                return
            gevent.sleep(0.001 if events else WAIT_S)

    def apply(self) -> None:
        """Enter what is safe into the index; called every sweep interval."""
        store = self._store
        if self._pending is None:
            if any(key in store.queues for key in (PARKS, MARKS)) and not self.context.replicas.is_master:
                add_feature(self._store, FEATURE)
                self._open()
                self.start()
            return
        if self._failure is not None and not self._open_again():
            return
        self.follow()
        if self.recurring:
            self.begin_recurring()
        try:
            self.upkeep.enter(self._pending)
            self.upkeep.sort_in(self._pending)
        except (IndexFailed, DiskFull) as error:
            self.failed(error)

    def _safe_end(self) -> int:
        """Return the log offset before which nothing can be taken back."""
        copies = self.turns.copies
        durable = self._store.durable_end
        return durable if copies is None else min(durable, copies.held_end)

    def flush(self) -> None:
        """Write the index to the disk, so that a start reads less of the log again."""
        pending = self._pending
        if pending is None or self._failure is not None or pending.covered == self._flushed:
            return
        try:
            with self.upkeep.lock:
                pending.index.forget_cancels(self._store.clock.now_ms())
            covered = pending.covered
            pending.flush(self._run)
        except (IndexFailed, DiskFull) as error:
            self.failed(error)
        else:
            if pending is self._pending:
                self._flushed = covered

    def close(self) -> None:
        """Enter everything durable into the index and close it; nothing writes to the store any more."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            while self._failure is None and pending.apply(self._safe_end()):
                self._flushed = pending.covered
            pending.index.ordered.close()
        except (IndexFailed, DiskFull) as error:  # the log has everything
            logger.error("timer index not closed reason=%s", error)
            with suppress(StoreError):
                pending.index.ordered.close()

    # -- following the log --------------------------------------------------------------------------------------------

    def _take(self, event: TimerEvent) -> None:
        assert self._pending is not None
        self._pending.follow(event)
        if isinstance(event, Secret):
            self._handles = Handles(event.secret)

    def follow(self) -> None:
        """Take what readers can see by now into the table."""
        pending = self._pending
        if pending is None or self._fold is not None or not self._in_log:
            return
        before, seen = (pending.first, pending.flight.lowest), readable(self._store)
        while self._in_log:
            changes, end, size = self._in_log[0]
            if end.parks > seen.parks or end.marks > seen.marks:
                break
            self._in_log.popleft()
            self._in_log_events -= size
            pending.flight.land()
            self.names_in_flight.difference_update(changes.names)
            for event in changes.events:
                pending.follow(event)
        self._changed.set()
        if (pending.first, pending.flight.lowest) != before:
            self.woken()

    def _appended(self, failure: StoreError | None) -> None:
        """Learn at the end of a turn whether what was staged in it is in the log."""
        changes, self._staged, pending = self._staged, None, self._pending
        assert changes is not None and pending is not None
        pending.flight.end_turn(is_stored=failure is None)
        if failure is None:
            size = sum(map(record_count, changes.events))
            self._in_log.append(Appended(changes, ends(self._store), size))
            self._in_log_events += size
            return
        self.names_in_flight.difference_update(changes.names)
        for key in changes.taken:
            pending.release(key)
        if any(isinstance(event, Secret) for event in changes.events):  # the first one, or one that was stored before
            self._handles = None if pending.secret is None else Handles(pending.secret.secret)
        self._changed.set()
        self.woken()

    def _changes(self) -> Changes:
        """Return the changes of this turn."""
        changes = self._staged
        if changes is None:
            changes = self._staged = Changes()
            self.turns.after_append(self._appended)
            note(self.turns, lambda _: self.follow())
        return changes

    def stage_event(self, event: TimerEvent, taken: Sequence[Key] = ()) -> None:
        """Take note of a record that was staged, and of the timers that were taken for it."""
        changes = self._changes()
        changes.add(event)
        if taken:
            changes.taken += taken
        if isinstance(event, Defined | Undefined):
            name = event.definition.name if isinstance(event, Defined) else event.name
            changes.names.append(name)
            self.names_in_flight.add(name)

    # -- parking ------------------------------------------------------------------------------------------------------

    def send(self, draft: Draft, due_ms: int) -> Placed:
        """Stage a message for its time: parked, or at once in its partition when that time has passed."""
        if due_ms > self._store.clock.now_ms():
            return self.park(draft, due_ms)
        draft.properties[properties.TIMER_OUT] = str(due_ms)
        return stage(self.context, draft)

    def park(self, draft: Draft, due_ms: int) -> Placed:
        """Stage a message that is delivered at ``due_ms``, and return its place, with the handle that cancels it.

        Raises what ``stage`` raises, ``MessageIllegal`` when the copy that is delivered would be too long or the time too far
        away, and ``Overloaded`` while the index cannot keep up.
        """
        kept = properties_to_park(draft, due_ms, self.context.settings.segment_bytes)
        new = new_record(self.context, draft.moved(*PARKS, kept))
        handle = self.park_record(new, due_ms, self._store.clock.now_ms())
        return Placed(new.queue, 0, handle.ident, handle)

    def park_record(self, new: Fields, due_ms: int, now_ms: int) -> Handle:
        """Stage the record of a park, and return the handle that cancels it. Raises what ``park`` raises for the rest of it."""
        limit_ms = self.context.settings.max_delay_ms
        if (limit_ms and due_ms - now_ms > limit_ms) or due_ms > LATEST_MS:
            raise MessageIllegal(f"a delay of {due_ms - now_ms} ms is longer than {limit_ms or LATEST_MS} ms (max_delay_ms)")
        pending, handles = self.ready(), self._current_handles()
        queue, flag, body, crc, middle, text_size, tail, tag, keys = new  # unpacked by the call, they cost more
        place = self._store.put(queue, flag, body, crc, middle, text_size, tail, tag, keys)
        key = key_of(due_ms, place)
        pending.flight.add(key)
        self._changes().park(key, place, self._store.log.staged_end)
        self.parked += 1
        return _new(Handle, (due_ms, place, handles.code(key)))

    def ready(self) -> Pending:
        """Return the table, for changes. Raise ``Overloaded`` while it can take none."""
        pending = self._pending
        if pending is None:
            pending = self._begin()
        if self._failure is not None:
            raise Overloaded("the index of timers is being opened again", retry_after_ms=RETRY_MS)
        if pending.waiting + self._in_log_events > MOST_WAITING:
            reason = f"{pending.waiting} changes of timers wait for the index, the limit is {MOST_WAITING}"
            raise Overloaded(reason, retry_after_ms=RETRY_MS)
        return pending

    def _begin(self) -> Pending:
        """Open the index for the first message; ``ConfigError`` without the package that it needs."""
        pending = self._open()
        self._fold = None  # there is nothing to read yet
        try:
            add_feature(self._store, FEATURE)  # syncs a small file, once in the life of a data folder
        except StoreError:
            self._pending = None
            pending.index.ordered.close()
            raise
        self.woken()
        return pending

    def begin_recurring(self) -> None:
        """Write down, once, that the folder has recurring messages. Raise ``StoreError`` when that cannot be written."""
        if not self._has_recurring:
            add_feature(self._store, RECURRING)
            self._has_recurring = True

    def _current_handles(self) -> Handles:
        """Return what makes handles; make their secret with the first one."""
        if self._handles is None:
            if self._fold is not None:
                raise Overloaded("the timers of before the start are still being read", retry_after_ms=RETRY_MS)
            self._stage_secret(secrets.token_bytes(16))
        assert self._handles is not None
        return self._handles

    def _stage_secret(self, secret: bytes) -> None:
        place = stage(self.context, internal_mark(self.context, MARKS, secret_mark(secret))).log_offset
        self._handles = Handles(secret)
        self.stage_event(Secret(secret, place, self._store.log.staged_end))

    # -- what becomes of them -----------------------------------------------------------------------------------------

    def stage_delivery(
        self, taken: list[tuple[Key, int]], copies: list[Fields], dropped: int, runs: Sequence[NextRun] = ()
    ) -> None:
        """Stage the copies of timers that are taken, and the next runs, in one group with the mark that ends these timers."""
        context, store, pending = self.context, self._store, self._pending
        assert pending is not None
        segments = store.log.count_by_segment([place for _, place in taken])
        to = taken[-1][0]
        mark = internal_mark(context, MARKS, deliver_mark(to, len(copies), dropped, segments))
        members = [*copies, *(new_record(context, run.draft, run.own) for run in runs)]
        offsets = put_record_group(store, new_record(context, mark), members)
        ends = [*offsets[1:], store.log.staged_end]
        self.stage_event(Delivered(to, segments, ends[0]), [key for key, _ in taken])
        self.stage_runs(runs, offsets[1 + len(copies) :], ends[1 + len(copies) :])

    def stage_runs(self, runs: Sequence[NextRun], places: list[int], run_ends: list[int]) -> None:
        """Take note of parks that were staged as members of a group."""
        assert self._pending is not None
        for run, place, end in zip(runs, places, run_ends, strict=True):
            key = key_of(run.due_ms, place)
            self._pending.flight.add(key)
            self.stage_event(Park(key, place, None, end, run.definition.number))

    def stage_cancel(self, key: Key, place: int, pairs: Mapping[str, str]) -> None:
        """Stage the cancel of a timer that is pending at a place, in a record with properties, and take the timer."""
        context, store, pending = self.context, self._store, self._pending
        assert pending is not None
        stage(context, internal_mark(context, MARKS, cancel_mark([(key, place)]), pairs))
        pending.take(key, place)
        pending.flight.add(key)
        self.stage_event(Cancelled([(key, place)], store.log.staged_end), [key])

    def stage_again(self, key: Key, origin: Again, draft: Draft) -> None:
        """Stage the park of a timer once more, which ``origin`` describes, and take the timer."""
        store, pending = self._store, self._pending
        assert pending is not None
        definition = pending.definitions.of_run(key)
        own = {} if definition is None else NextRun(definition, 0, draft).own
        placed = stage(self.context, draft, {properties.TIMER: str(origin), **own})
        pending.take(key, origin.place)
        pending.flight.add(key)
        number = None if definition is None else definition.number
        self.stage_event(Park(key, placed.log_offset, origin.place, store.log.staged_end, number), [key])
        self.moved += 1

    def stage_secret_again(self) -> None:
        """Stage the secret once more: the segment that holds it is about to be deleted."""
        if self._handles is not None:
            self._stage_secret(self._handles.secret)

    # -- handles ------------------------------------------------------------------------------------------------------

    def handle(self, key: Key) -> str | None:
        """Return what cancels a timer; ``None`` as long as the secret of handles is not known."""
        return None if self._handles is None else str(self._handles.of(key))

    def parked_handle(self, due_ms: int, ident: int) -> Handle:
        """Return the handle of a timer that was parked. Raise ``Overloaded`` while the secret is not known."""
        return self._current_handles().of(key_of(due_ms, ident))

    def is_genuine(self, handle: Handle) -> bool:
        """Return whether this broker gave a handle. Raise ``NotWritable`` while that is not known."""
        if self._handles is None:
            if self._fold is not None:
                raise NotWritable("the timers of before the start are still being read; try again in a second")
            return False
        return self._handles.is_genuine(handle)

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def needed_from(self) -> int | None:
        """The lowest log offset that pending timers, or a start after a kill, need; ``None`` without timers."""
        pending = self._pending
        if pending is None:
            return None
        needed = [] if (oldest := pending.oldest()) is None else [oldest]
        if (
            pending.covered > self._flushed
            or pending.waiting
            or self._in_log
            or self._staged is not None
            or self._fold is not None
        ):
            needed.append(self._flushed)
        return min(needed, default=None)

    @property
    def pending(self) -> int:
        """The number of messages that are delayed now."""
        return 0 if self._pending is None else len(self._pending)

    @property
    def recurring(self) -> int:
        """The number of recurring messages that are defined now."""
        return 0 if self._pending is None else len(self._pending.definitions)

    @property
    def late_ms(self) -> int:
        """How long the first message that is due has been due, in milliseconds; 0 when none is."""
        first = None if self._pending is None else self._pending.first
        return 0 if first is None else max(0, self._store.clock.now_ms() - int.from_bytes(first[:8]))
