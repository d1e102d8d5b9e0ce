"""The timers of one broker: whatever changes a timer is staged here, and the table takes it when readers could see it."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Final

from metaq.engine.context import Context
from metaq.engine.timers.staged import NextRun, properties_to_park
from metaq.engine.timers.table import RETRY_MS, TimerTable
from metaq.engine.turn import Turns
from metaq.engine.writing import Draft, Placed, internal_mark, new_record, stage
from metaq.errors import MessageIllegal, NotWritable, Overloaded
from metaq.protocol import properties
from metaq.store.files.filecache import Run
from metaq.store.newrecord import Fields
from metaq.store.recordgroups import put_record_group
from metaq.timers.handles import Handle, Handles
from metaq.timers.records import (
    LATEST_MS,
    MARKS,
    PARKS,
    Again,
    Cancelled,
    Delivered,
    Key,
    Park,
    Secret,
    cancel_mark,
    deliver_mark,
    key_of,
    secret_mark,
)

_new: Final = tuple.__new__
"""Costs a third of a named tuple's own constructor."""


class Timers(TimerTable):
    """The timers of one broker, and what changes them."""

    def __init__(self, context: Context, turns: Turns, run: Run) -> None:
        """Open the table as ``TimerTable`` does."""
        self.parked = self.delivered = self.cancelled = self.dropped = self.runs_dropped = self.moved = 0
        """Counts since the start. ``runs_dropped`` are those of ``dropped`` that were runs of recurring messages."""
        super().__init__(context, turns, run)

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

    def _current_handles(self) -> Handles:
        """Return what makes handles; make their secret with the first one."""
        if self._handles is None:
            if self.is_reading:
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
            if self.is_reading:
                raise NotWritable("the timers of before the start are still being read; try again in a second")
            return False
        return self._handles.is_genuine(handle)
