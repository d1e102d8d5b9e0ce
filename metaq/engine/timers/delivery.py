"""Delivery of timers: one greenlet sleeps until the first is due, then stores the copies of those that are, group by group.

A group is a mark with the copies after it (``metaq.timers.records``): recovery keeps all of it or nothing, so each timer is
delivered exactly once, whenever the broker ends. The next group is staged as soon as the one before is in the log; the two
become safe in order.

A copy whose topic has been deleted is dropped, as the topic's messages were; so is one that cannot be stored, or whose park is
damaged.

The next run of a recurring message is a member of the group that delivers the one before it, also when that one is dropped. Why
runs of it are dropped is logged once, until there is another reason or one is delivered.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import gevent
from gevent.event import AsyncResult, Event

from metaq.engine.priorities.levels import partition_of_copy
from metaq.engine.timers.recurring import Runs
from metaq.engine.timers.staged import RESERVED_BYTES, NextRun
from metaq.engine.timers.timers import Timers
from metaq.engine.writing import again, new_record, note
from metaq.errors import IndexFailed, MetaqError, StoreError
from metaq.protocol import properties
from metaq.protocol.record import Record, decode_record
from metaq.store.files.filecache import Run, read_through
from metaq.store.newrecord import NewRecord
from metaq.timers.definitions import MOST
from metaq.timers.pending import Pending
from metaq.timers.records import Definition, Key, key_of, parts_of

logger = logging.getLogger(__name__)

PORTION: Final = 256
"""Messages in one group."""
PORTION_BYTES: Final = 1 << 20
IN_FLIGHT_BYTES: Final = 8 << 20
"""Copies that may be on their way to become safe at once."""
NEAR: Final = 50_000
"""Timers that are read into memory ahead of their time."""
FEW: Final = 5_000
"""Below so many, more are read."""
AHEAD_MS: Final = 30_000
"""How far ahead of their time timers are read."""
CLOSE_MS: Final = 5_000
LONGEST_SLEEP_S: Final = 60.0
"""The longest sleep, so that a wall clock that was set is noticed."""
RETRY_S: Final = 1.0
"""Pause after a failed delivery: a full disk may have room again."""
CLOCK_STEP_MS: Final = 10_000
"""A wall clock that moves by this much against the monotonic one was set, and that is logged."""

OnDrop = Callable[[int, str], None]
"""Report that the message parked at a log offset is dropped, and why."""


class _Copies(NamedTuple):
    """The timers of one group, and the messages that it delivers."""

    taken: list[tuple[Key, int]]
    records: list[NewRecord]
    runs: list[NextRun]
    size: int
    dropped: int


class Delivery:
    """The greenlet that delivers the timers of one broker."""

    def __init__(self, timers: Timers, runs: Runs, run: Run) -> None:
        self._timers = timers
        self._runs = runs
        self._context = timers.context
        self._store = timers.context.store
        self._read = read_through(run)
        self._wake = Event()
        self._in_flight_bytes = 0
        self._failing = False
        self._drops: dict[int, str] = {}  # by the number of a definition: why runs of it are dropped now
        self._greenlet: Any = None
        self._clock_difference_ms: int | None = None
        timers.woken = self._wake.set

    def start(self) -> None:
        """Begin; only a master delivers."""
        self._greenlet = gevent.spawn(self._deliver_forever)

    def stop(self) -> None:
        """Deliver no more."""
        gevent.killall([] if self._greenlet is None else [self._greenlet])

    def _deliver_forever(self) -> None:
        while True:
            self._wake.clear()
            wait_s = LONGEST_SLEEP_S
            table = self._timers.table
            if table is not None:
                try:
                    wait_s = self._round(table)
                    self._failing = False
                except MetaqError as error:
                    if isinstance(error, IndexFailed):
                        self._timers.failed(error)
                    elif not self._failing:
                        logger.error("timers wait, tried again reason=%s", error)
                    self._failing = True
                    gevent.sleep(RETRY_S)
                    continue
            self._wake.wait(wait_s)

    def _round(self, table: Pending) -> float:
        """Deliver one group if any is due; return the seconds until the next round."""
        now_ms = self._now_ms()
        self._load(table, now_ms)
        if self._in_flight_bytes >= IN_FLIGHT_BYTES:
            return RETRY_S  # woken when a group is safe
        taken = table.take_due(now_ms, PORTION)
        if not taken:
            return self._pause_s(table, now_ms)
        try:
            self._store.check_writable()
            self._timers.turns.check_load()
            copies = self._copies(table, taken)
        except BaseException:
            for key, _ in taken:
                table.release(key)
            raise
        is_clear = self._timers.table is table and table.is_clear(copies.taken[-1][0])
        if not is_clear:  # one with an earlier time came meanwhile, as the clock was set back, or the index failed
            for key, _ in copies.taken:
                table.release(key)
            return 0.0
        self._stage(table, copies)
        return 0.0

    def _pause_s(self, table: Pending, now_ms: int) -> float:
        """Return how long nothing can be due, as far as is known now."""
        first = table.first
        lowest = table.flight.lowest
        is_known = first is not None and (lowest is None or first < lowest)  # else woken when what is in flight lands
        until_ms = int.from_bytes(first[:8]) if first is not None and is_known else now_ms + CLOSE_MS
        return min(max(0.001, (until_ms - now_ms) / 1000), CLOSE_MS / 1000)

    def _now_ms(self) -> int:
        """Return the wall clock's time, and log when it was set."""
        clock = self._store.clock
        now_ms = clock.now_ms()
        difference_ms = now_ms - round(clock.monotonic() * 1000)
        if self._clock_difference_ms is None:
            self._clock_difference_ms = difference_ms
        step_ms = difference_ms - self._clock_difference_ms
        if abs(step_ms) >= CLOCK_STEP_MS:
            logger.warning("the clock was set by_ms=%d", step_ms)
            self._clock_difference_ms = difference_ms
        return now_ms

    def _load(self, table: Pending, now_ms: int) -> None:
        """Read timers into memory when few are left there, or the last ones are close."""
        if table.near >= FEW and table.horizon >= key_of(now_ms + CLOSE_MS, 0):
            return
        until = key_of(now_ms + AHEAD_MS, 0)
        with self._timers.index_lock:
            while table.near < NEAR and not table.load(until):
                gevent.sleep(0.0005)

    # -- one group ----------------------------------------------------------------------------------------------------

    def _copies(self, table: Pending, taken: list[tuple[Key, int]]) -> _Copies:
        """Return the copies of the first timers that were taken, as many as fit into a group; the others are given back."""
        most_bytes = min(PORTION_BYTES, self._store.settings.segment_bytes // 2)
        records: list[NewRecord] = []
        runs: list[NextRun] = []
        size, count, dropped = 0, 0, 0
        for key, place in taken:
            definition = table.definitions.of_run(key)
            if definition is None:
                record = self._park(place, self._dropped)
                found, run = [] if record is None else self._copy(record, self._dropped), None
            else:
                found, run = self._run_copies(definition, key, place, most_bytes - size)
            length = sum(copy.size for copy in found) + (0 if run is None else len(run.draft.body) + RESERVED_BYTES)
            if (records or runs) and size + length > most_bytes:
                break
            records += found
            runs += [] if run is None else [run]
            size += length
            count += 1
            dropped += not found
        for key, _ in taken[count:]:
            table.release(key)
        return _Copies(taken[:count], records, runs, size, dropped)

    def _run_copies(self, definition: Definition, key: Key, place: int, room: int) -> tuple[list[NewRecord], NextRun | None]:
        """Return the copies of a run of a recurring message, as many as there is room for, and the next run."""
        due_ms, now_ms = parts_of(key)[0], self._store.clock.now_ms()
        on_drop = partial(self._run_dropped, definition)
        record = self._park(place, on_drop)
        copy = [] if record is None else self._copy(record, on_drop)
        most = max(1, room // (copy[0].size + 1)) if copy else 1
        plan = self._runs.plan(definition, due_ms, now_ms, most)
        run = self._runs.next_run(definition, record, plan.next_ms)
        if record is None or not copy:
            return [], run
        if self._drops.pop(definition.number, None) is not None:
            logger.info("recurring message delivered again name=%s", definition.name)
        copies = [self._copy(record, on_drop, out_ms)[0] for out_ms in plan.times] if plan.times != [due_ms] else copy
        return copies, run

    def _park(self, place: int, on_drop: OnDrop) -> Record | None:
        """Return a park; ``None`` when it is damaged or lost, which is reported."""
        try:
            stored = self._store.record_at_offset(place, self._read)
        except StoreError as error:
            if self._store.failure is not None:
                raise
            on_drop(place, str(error))
            return None
        if stored is None:
            on_drop(place, "its record is damaged or lost")
            return None
        return decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))

    def _copy(self, record: Record, on_drop: OnDrop, out_ms: int | None = None) -> list[NewRecord]:
        """Return the copy that consumers get, with another due time if one is given.

        Return nothing when its topic was deleted or it cannot be stored, which is reported.
        """
        pairs = properties.parse(record.properties.decode(errors="replace"))
        name, number = pairs.pop(properties.REAL_TOPIC, ""), int(pairs.pop(properties.REAL_QUEUE, "0"))
        topic = self._context.topics.of_parked(name, number) if name else None
        if topic is None:
            on_drop(record.log_offset, f"the topic {name} was deleted")
            return []
        if out_ms is not None:
            pairs[properties.TIMER_OUT] = str(out_ms)
        own = {properties.CRON: pairs[properties.CRON]} if properties.CRON in pairs else properties.NONE
        pairs[properties.TIMER_ENQUEUE] = str(record.store_ms)
        pairs[properties.TIMER_DEQUEUE] = str(self._store.clock.now_ms())
        draft = again(record, name, partition_of_copy(topic, pairs, number), pairs)
        try:
            return [new_record(self._context, draft, own)]
        except MetaqError as error:
            on_drop(record.log_offset, str(error))
            return []

    def _dropped(self, place: int, reason: str) -> None:
        self._timers.dropped += 1
        logger.error("timer dropped log_offset=%d reason=%s", place, reason)

    def _run_dropped(self, definition: Definition, place: int, reason: str) -> None:
        self._timers.dropped += 1
        self._timers.runs_dropped += 1
        if self._drops.get(definition.number) == reason:
            return
        if len(self._drops) >= MOST:  # some of them are of definitions that have ended
            self._drops.clear()
        self._drops[definition.number] = reason
        logger.error("recurring message dropped name=%s log_offset=%d reason=%s", definition.name, place, reason)

    def _stage(self, table: Pending, copies: _Copies) -> None:
        """Stage a group, and wait until it is in the log. Raises ``MetaqError`` when it is not; its timers are given back."""
        try:
            self._timers.stage_delivery(copies.taken, copies.records, copies.dropped, copies.runs)
        except MetaqError:
            for key, _ in copies.taken:
                table.release(key)
            raise
        appended: Any = AsyncResult()
        self._timers.turns.after_append(appended.set)
        self._in_flight_bytes += copies.size
        note(self._timers.turns, partial(self._settled, len(copies.records), copies.size))
        failure: StoreError | None = appended.get()
        if failure is not None:
            raise failure

    def _settled(self, messages: int, size: int, failure: MetaqError | None) -> None:
        self._in_flight_bytes -= size
        if failure is None:
            self._timers.delivered += messages
        self._wake.set()
