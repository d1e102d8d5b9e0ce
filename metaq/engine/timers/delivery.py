"""Delivery of timers: one greenlet sleeps until the first is due, then stores the copies of those that are, group by group.

A group is a mark with the copies after it (``metaq.timers.records``): recovery keeps all of it or nothing, so each timer is
delivered exactly once, whenever the broker ends. Several groups may be staged in one turn of the loop; the next ones are staged
as soon as these are in the log. They become safe in order.

A copy whose topic has been deleted is dropped, as the topic's messages were; so is one that cannot be stored, such as one for
which a segment has no room since ``segment_bytes`` was lowered, or whose park is damaged.

The next run of a recurring message is a member of the group that delivers the one before it, also when that one is dropped. Why
runs of it are dropped is logged once, until there is another reason or one is delivered. It ends when a segment has no room for
its next run.
"""

import logging
from functools import partial
from typing import Any, Final, NamedTuple

import gevent
from gevent.event import AsyncResult, Event

from metaq.engine.timers.copying import Copying, size_of
from metaq.engine.timers.lostruns import LostRuns
from metaq.engine.timers.recurring import Runs
from metaq.engine.timers.staged import RESERVED_BYTES, NextRun
from metaq.engine.timers.timers import Timers
from metaq.engine.timers.upkeep import REST_S
from metaq.engine.writing import note
from metaq.errors import BadRequest, IndexFailed, MetaqError, StoreError
from metaq.protocol.record import decode_record
from metaq.protocol.text.messages import Stored
from metaq.store.files.filecache import Run
from metaq.store.log.noted import records_at
from metaq.store.newrecord import Fields
from metaq.timers.definitions import MOST
from metaq.timers.entering import IndexStep
from metaq.timers.pending import Pending
from metaq.timers.records import PARKS, Definition, Key, key_of, parts_of

logger = logging.getLogger(__name__)

PORTION: Final = 256
"""Messages in one group."""
PORTION_BYTES: Final = 1 << 20
COLD: Final = 1024
"""Messages of several groups whose parks are read from the disk together: each wait costs a turn of the loop, or two."""
IN_FLIGHT_BYTES: Final = 8 << 20
"""Copies that may be on their way to become safe at once."""
LEAST_SHARE_S: Final = 0.001
MOST_SHARE_S: Final = 0.01
"""Deliveries take as long as all else did since the last ones, at least and at most so long: as long as requests (``Pace``).

With one group in a turn they fell behind where requests fill the turns: 256 in 10 ms are 25,600 a second."""
NEVER_S: Final = float("inf")
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
LOAD_RETRY_S: Final = 0.02
"""Pause after the index could not be read on, as its engine was busy with writes."""
CLOCK_STEP_MS: Final = 10_000
"""A wall clock that moves by this much against the monotonic one was set, and that is logged."""


class _Copies(NamedTuple):
    """The timers of one group, and the messages that it delivers."""

    taken: list[tuple[Key, int]]
    records: list[Fields]
    runs: list[NextRun]
    size: int
    dropped: int


class _Lost(NamedTuple):
    """A park that cannot be read."""

    place: int
    reason: str


class Delivery:
    """The greenlet that delivers the timers of one broker."""

    def __init__(self, timers: Timers, runs: Runs, run: Run) -> None:
        self._timers = timers
        self._runs = runs
        self._context = timers.context
        self._store = timers.context.store
        self._run = run
        self._lost_runs = LostRuns(timers, runs, run)
        self._wake = Event()
        self._in_flight_bytes = 0
        self._rests_from = NEVER_S
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
                    self._lost_runs.restore(table)
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
        """Deliver what is due, as much as this turn of the loop has room for; return the seconds until the next round."""
        now_ms, clock = self._now_ms(), self._store.clock
        began = clock.monotonic()
        until = began + min(max(began - self._rests_from, LEAST_SHARE_S), MOST_SHARE_S)
        loaded, is_staged = self._load(table, now_ms), False
        while self._in_flight_bytes < IN_FLIGHT_BYTES and (taken := self._take(table, now_ms)):
            if not self._deliver(table, taken):
                break
            is_staged = True
            if clock.monotonic() >= until:
                break
        self._rests_from = clock.monotonic()
        if is_staged:
            self._wait_for_log()
            return 0.0
        if self._in_flight_bytes >= IN_FLIGHT_BYTES:
            return RETRY_S  # woken when a group is safe
        self._rests_from = NEVER_S
        if loaded is IndexStep.DONE:
            return self._pause_s(table, now_ms)
        return REST_S if loaded is IndexStep.MORE else LOAD_RETRY_S

    def _take(self, table: Pending, now_ms: int) -> list[tuple[Key, int]]:
        """Take the next timers that are due: of one group, or of several whose parks are read from the disk in one wait."""
        taken = table.take_due(now_ms, PORTION)
        if taken and taken[0][1] < self._store.log.hot_from():
            taken += table.take_due(now_ms, COLD - PORTION)
        return taken

    def _deliver(self, table: Pending, taken: list[tuple[Key, int]]) -> bool:
        """Stage the groups that deliver timers that are taken; what must wait is given back. Return false when all must."""
        count = 0
        try:
            self._store.check_writable()
            self._timers.turns.check_load()
            parks = self._parks([place for _, place in taken])
            while count < len(taken) and self._in_flight_bytes < IN_FLIGHT_BYTES:
                copies = self._copies(table, taken[count : count + PORTION], parks)
                # one with an earlier time may have come meanwhile, as the clock was set back, or the index may have failed
                if self._timers.table is not table or not table.is_clear(copies.taken[-1][0]):
                    break
                self._stage(copies)
                count += len(copies.taken)
        finally:
            for key, _ in taken[count:]:
                table.release(key)
        return count > 0

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

    def _load(self, table: Pending, now_ms: int) -> IndexStep:
        """Read timers into memory for a while when few are left there, or the last ones are close.

        Where few are due, it reads only every 15 s: a scan of the index costs up to milliseconds while many are delivered.
        """
        enough_ms = CLOSE_MS if table.near >= FEW else AHEAD_MS // 2
        if table.horizon >= key_of(now_ms + enough_ms, 0):
            return IndexStep.DONE
        return self._timers.upkeep.load(table, key_of(now_ms + AHEAD_MS, 0), NEAR)

    # -- one group ----------------------------------------------------------------------------------------------------

    def _copies(self, table: Pending, taken: list[tuple[Key, int]], parks: dict[int, Stored | _Lost]) -> _Copies:
        """Return the copies of the first timers that were taken, as many as fit into a group."""
        most_bytes = min(PORTION_BYTES, self._store.settings.segment_bytes // 2)
        copying = Copying(self._context)
        records: list[Fields] = []
        runs: list[NextRun] = []
        size, count, dropped = 0, 0, 0
        definitions = table.definitions if len(table.definitions) else None
        for key, place in taken:
            definition, park = None if definitions is None else definitions.of_run(key), parks[place]
            run: NextRun | None = None
            if definition is not None:
                found, run = self._run_copies(copying, definition, key, park, most_bytes - size)
            elif isinstance(park, _Lost):
                self._dropped(place, park.reason)
                found = []
            else:
                found = copying.copy(park, self._dropped)
            length = 0 if run is None else len(run.draft.body) + RESERVED_BYTES
            for copy in found:
                length += size_of(copy)
            if (records or runs) and size + length > most_bytes:
                break
            records += found
            if run is not None:
                runs.append(run)
            size += length
            count += 1
            dropped += not found
        return _Copies(taken[:count], records, runs, size, dropped)

    def _run_copies(
        self, copying: Copying, definition: Definition, key: Key, park: Stored | _Lost, room: int
    ) -> tuple[list[Fields], NextRun | None]:
        """Return the copies of a run of a recurring message, as many as there is room for, and the next run."""
        due_ms, now_ms = parts_of(key)[0], self._store.clock.now_ms()
        on_drop = partial(self._run_dropped, definition)
        if isinstance(park, _Lost):
            on_drop(park.place, park.reason)
            record, copy = None, list[Fields]()
        else:
            record = decode_record(bytes(park.buffer[park.at : park.at + park.size]))
            copy = copying.copy_apart(record, on_drop)
        most = max(1, room // (size_of(copy[0]) + 1)) if copy else 1
        plan = self._runs.plan(definition, due_ms, now_ms, most)
        run = self._runs.next_run(definition, record, plan.next_ms)
        if record is None or not copy:
            return [], run
        if self._drops.pop(definition.number, None) is not None:
            logger.info("recurring message delivered again name=%s", definition.name)
        if plan.times == [due_ms]:
            return copy, run
        return [copying.copy_apart(record, on_drop, out_ms)[0] for out_ms in plan.times], run

    def _parks(self, places: list[int]) -> dict[int, Stored | _Lost]:
        """Return the parks at some places, or why there is none. Raise ``StoreError`` when the disk cannot be asked now."""
        found: dict[int, Stored | _Lost] = {**records_at(self._store.log, PARKS, places, self._run)}
        if len(found) < len(places):
            for place in places:
                if place not in found:
                    found[place] = _Lost(place, "its record is damaged or lost")
        return found

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

    def _stage(self, copies: _Copies) -> None:
        """Stage a group. Raises ``MetaqError`` when it cannot be; but without a message for which a segment has no room."""
        try:
            self._stage_group(copies)
        except BadRequest as error:
            copies = self._without_last(copies, str(error))
            try:
                self._stage_group(copies)
            except BadRequest:  # there is no room for the next run, either
                copies = self._without_runs(copies)
                self._stage_group(copies)
        self._in_flight_bytes += copies.size
        note(self._timers.turns, partial(self._settled, len(copies.records), copies.size))

    def _stage_group(self, copies: _Copies) -> None:
        self._timers.stage_delivery(copies.taken, copies.records, copies.dropped, copies.runs)

    def _without_last(self, copies: _Copies, reason: str) -> _Copies:
        """Drop what a group delivers for its last timer: the only one that it delivers, or the group would be smaller."""
        place = copies.taken[-1][1]
        if copies.runs:
            self._run_dropped(copies.runs[-1].definition, place, reason)
        else:
            self._dropped(place, reason)
        return copies._replace(records=[], dropped=copies.dropped + 1)

    def _without_runs(self, copies: _Copies) -> _Copies:
        """End the recurring message whose next run cannot be stored; there is at most one, or the group would be smaller."""
        for run in copies.runs:
            logger.error("recurring message lost name=%s", run.definition.name)
        return copies._replace(runs=[])

    def _wait_for_log(self) -> None:
        """Wait until what was staged is in the log. Raises ``StoreError`` when it is not; its timers are given back then."""
        appended: Any = AsyncResult()
        self._timers.turns.after_append(appended.set)
        failure: StoreError | None = appended.get()
        if failure is not None:
            raise failure

    def _settled(self, messages: int, size: int, failure: MetaqError | None) -> None:
        self._in_flight_bytes -= size
        if failure is None:
            self._timers.delivered += messages
        self._wake.set()
