"""The table of the timers of one broker: it follows the log, and is opened again when it fails.

Whatever is staged in a turn is *in flight* until readers could see it; then the table takes it (``metaq.timers.pending``). When
the append of the turn fails, it is undone at once, whatever the order in which senders hear of it.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import gevent
from gevent.event import Event

from metaq.engine.context import Context
from metaq.engine.reading.catchup import read_in_the_end
from metaq.engine.timers.staged import Appended, Changes
from metaq.engine.timers.upkeep import Upkeep
from metaq.engine.turn import Turns
from metaq.engine.writing import note
from metaq.errors import DiskFull, IndexFailed, Overloaded, StoreError
from metaq.store.copies.discarding import TIMER_INDEX
from metaq.store.files.filecache import Run, read_through
from metaq.store.ordered.ordered import remove_ordered
from metaq.store.recovery.recovery import add_feature
from metaq.timers.definitions import RECURRING
from metaq.timers.fold import Fold, Ordinals, ends, readable
from metaq.timers.handles import Handles
from metaq.timers.opening import FEATURE, open_pending
from metaq.timers.pending import Pending
from metaq.timers.records import MARKS, PARKS, Defined, Key, Secret, TimerEvent, Undefined, record_count

logger = logging.getLogger(__name__)

FOLD_PORTION: Final = 1024
"""Records that the fold reads in one go, some milliseconds of work."""
MOST_WAITING: Final = 200_000
"""Events that may wait to enter the index; beyond it parks are refused."""
RETRY_MS: Final = 100
WAIT_S: Final = 0.05
"""Pause while the fold waits for records to become readable."""


class TimerTable:
    """The table of one broker, as a master that changes timers or as a slave that follows."""

    def __init__(self, context: Context, turns: Turns, run: Run) -> None:
        """Open the table if the log has timers; everything else waits until the first message is parked.

        Where the disk has no room for that, it is opened later: until then delayed messages are refused, and no segment goes.
        """
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
        """Names of recurring messages that are being defined or ended, or get a run that was lost."""
        self._has_recurring = False  # as the folder says
        self._handles: Handles | None = None  # known with the secret
        self._flushed = 0
        self.upkeep = Upkeep(self._store.clock, turns.lasting_end)
        self._greenlets: list[Any] = []
        self._changed = Event()
        self.woken: Callable[[], None] = lambda: None
        if any(key in self._store.queues for key in (PARKS, MARKS)):
            with suppress(DiskFull):  # it has the feature, unless its file was lost and written again
                add_feature(self._store, FEATURE)
            try:
                self._open()
            except DiskFull as error:
                self.failed(error)

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
        """True while what was in the log before the start is read, or the index could not be opened for it."""
        return self._fold is not None or (self._pending is None and self._failure is not None)

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
        return self._pending is not None or self._failure is not None

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
            if self._staged is not None or self._in_log or self._store.full is not None:
                return False
            if pending is not None:
                if pending.asked:
                    return False
                with suppress(StoreError):
                    pending.index.ordered.close()
            if self._failure is IndexFailed:
                remove_ordered(self._folder)
            try:
                self._open()
            except DiskFull:  # tried again at the next sweep
                return False
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
        if self._pending is None and self._failure is None:
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
        pending = self._pending
        assert pending is not None
        try:
            self.upkeep.enter(pending)
            self.upkeep.sort_in(pending)
        except (IndexFailed, DiskFull) as error:
            self.failed(error)

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
            while self._failure is None and pending.apply(self.turns.lasting_end()):
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
            self.hold(event.definition.name if isinstance(event, Defined) else event.name)

    def hold(self, name: str) -> None:
        """Let nobody change a recurring message until readers see what this turn stages, or it has failed."""
        self._changes().names.append(name)
        self.names_in_flight.add(name)

    # -- for changes --------------------------------------------------------------------------------------------------

    def ready(self) -> Pending:
        """Return the table, for changes. Raise ``Overloaded`` while it can take none."""
        pending = self._pending
        if self._failure is not None:
            raise Overloaded("the index of timers is being opened again", retry_after_ms=RETRY_MS)
        if pending is None:
            pending = self._begin()
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

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def needed_from(self) -> int | None:
        """The lowest log offset that pending timers, or a start after a kill, need; ``None`` without timers."""
        pending = self._pending
        if pending is None:
            return None if self._failure is None else 0
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
