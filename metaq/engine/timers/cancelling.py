"""Cancels of timers: acknowledged only when no delivery can follow any more."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from gevent.event import AsyncResult

from metaq.engine.dedupe.dedupe import Dedupe
from metaq.engine.timers.timers import Timers
from metaq.engine.turn import NOT_STORED, Short
from metaq.errors import IndexFailed, MetaqError, NotWritable, RequestFailed, TimerDelivered, UnknownTimer
from metaq.protocol import properties
from metaq.protocol.record import decode_record
from metaq.store.files.filecache import Run, read_through
from metaq.timers.entering import KEPT_CANCELS_MS, TimerState
from metaq.timers.handles import Handle
from metaq.timers.pending import Pending
from metaq.timers.records import Key, park_origin, parts_of

FOLD_WAIT_S: Final = 3.0
TAKEN_WAIT_S: Final = 10.0
"""How long a cancel waits for a timer that is being delivered, cancelled or stored again."""


class Awaited:
    """The outcome of one cancel, or of another change that is waited for."""

    __slots__ = ("_result", "_what", "size")

    def __init__(self, what: str = "the cancel") -> None:
        self._what = what
        self._result: Any = AsyncResult()
        self.size = 0

    def stored(self) -> None:
        self._result.set(None)

    def refused(self, error: MetaqError, outcome: str) -> None:
        self._result.set(RequestFailed(error.code, f"{self._what} {outcome}: {error}") if outcome != NOT_STORED else error)

    def late(self, short: Short) -> None:
        self._result.set(RequestFailed(short.code, f"{self._what} is stored, but not {short.lacks}"))

    def get(self) -> None:
        failure: MetaqError | None = self._result.get()
        if failure is not None:
            raise failure


class Cancels:
    """Cancels the timers of one broker; its calls wait, so they run in greenlets of their own."""

    def __init__(self, timers: Timers, dedupe: Dedupe, run: Run) -> None:
        self._timers = timers
        self._dedupe = dedupe
        self._store = timers.context.store
        self._run = run
        self._read = read_through(run)

    def cancel(self, handle: Handle, check: Callable[[str], object]) -> None:
        """Cancel a timer, and return when that is as safe as the broker promises of messages.

        ``check`` is called with the topic of its message, and raises when it may not be cancelled. A timer that was cancelled
        before is cancelled. Raises ``TimerDelivered`` for one whose delivery was first, ``UnknownTimer`` for one that the log
        does not have, and whatever keeps messages from being stored.
        """
        self.table()
        if not self._timers.is_genuine(handle):
            raise UnknownTimer("the handle is not of this broker")
        place = self.place(self.table(), handle.key)
        if place is None:
            return
        pairs, stored_ms = dict[str, str](), 0  # of a message that cannot be read
        stored = self._store.record_at_offset(place, self._read)
        if stored is not None:
            record = decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
            pairs, stored_ms = properties.parse(record.properties.decode(errors="replace")), park_origin(record).since_ms
            check(pairs.get(properties.REAL_TOPIC, ""))
        place = self.place(self.table(), handle.key)  # others may have cancelled it or stored it again while it was read
        if place is None:
            return
        self._store.check_writable()
        self._timers.turns.check_load()
        self._dedupe.release(pairs, handle.ident, stored_ms, partial(self._timers.stage_cancel, handle.key, place))
        outcome = Awaited()
        self._timers.turns.staged(outcome)
        outcome.get()
        self._timers.cancelled += 1

    def table(self) -> Pending:
        """Return the table, once it is there. Raise ``NotWritable`` when that takes long, ``UnknownTimer`` without timers."""
        self._store.check_master()
        deadline = self._store.clock.monotonic() + FOLD_WAIT_S
        while (table := self._timers.table) is None:
            if not self._timers.is_used:
                raise UnknownTimer("this broker has no delayed message with this handle")
            if self._store.clock.monotonic() >= deadline:
                raise NotWritable("the timers of before the start are still being read; try again in a second")
            self._timers.wait(0.05)
        return table

    def place(self, table: Pending, key: Key) -> int | None:
        """Return the place of a pending timer, known at the moment of the return; ``None`` for one that was cancelled."""
        deadline = self._store.clock.monotonic() + TAKEN_WAIT_S
        while True:
            if self._timers.table is not table:
                raise NotWritable("the index of timers is being opened again; try again in a second")
            match table.state(key):
                case TimerState.PENDING:
                    return table.place(key)
                case TimerState.CANCELLED:
                    return None
                case TimerState.TAKEN:
                    if self._store.clock.monotonic() >= deadline:
                        raise NotWritable("the delayed message is being delivered or cancelled; try again in a second")
                    self._timers.wait(0.05)
                case TimerState.FAR:
                    version = table.index.version
                    try:
                        (found, place), *_ = table.find([key], self._run)
                    except IndexFailed as error:
                        self._timers.failed(error)
                        continue
                    if (
                        self._timers.table is not table
                        or table.index.version != version
                        or table.state(key) is not TimerState.FAR
                    ):
                        continue  # the table has changed while the index was asked
                    if found is TimerState.PENDING and key >= table.horizon:
                        return place
                    if found is TimerState.CANCELLED:
                        return None
                    raise self._gone(table, key)

    def _gone(self, table: Pending, key: Key) -> MetaqError:
        due_ms, ident = parts_of(key)
        late_ms = self._store.clock.now_ms() - due_ms
        if late_ms > KEPT_CANCELS_MS or (late_ms >= 0 and ident < table.known_from):
            return UnknownTimer(f"it is not known any more what became of the message {ident}")
        if late_ms >= 0:
            return TimerDelivered(f"the message {ident} was delivered at its time")
        return UnknownTimer(f"the log has no delayed message {ident} that is due at {due_ms}")
