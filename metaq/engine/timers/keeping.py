"""The log that pending timers need: their segments stay, or the timers are stored again before retention deletes them.

The table counts pending timers by segment. Where a record was damaged or lost, a count is too low or too high, and says nothing
of it. So the parks themselves decide: a segment goes when all its parks were looked at, and none of them is pending there.
"""

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final, NamedTuple

import gevent

from metaq.engine.halfmessages import pairs_of
from metaq.engine.timers.defining import stage_definition_again
from metaq.engine.timers.recurring import Runs
from metaq.engine.timers.timers import Timers
from metaq.engine.timers.upkeep import LONG_WORK_S, REST_S
from metaq.engine.writing import again
from metaq.errors import BadRequest, CorruptRecord, IndexFailed
from metaq.protocol.record import decode_record
from metaq.protocol.text.messages import Stored
from metaq.store.files.filecache import Run, read_through
from metaq.store.log.noted import records_at
from metaq.timers.entering import TimerState
from metaq.timers.fold import place_of
from metaq.timers.pending import Pending
from metaq.timers.records import PARKS, Key, due_of_first, event_of_park, key_of, park_origin

logger = logging.getLogger(__name__)

KEPT_A_ROUND: Final = 64 << 20
"""About how many bytes of parks one round stores again."""
LOOK_S: Final = 30.0
"""About how long one round looks at parks: a disk that fills up waits for it."""
AT_ONCE: Final = 128
READ_BYTES: Final = 1 << 20


class _Parked(NamedTuple):
    """A park that was read."""

    key: Key
    place: int
    data: bytes


class TimerKeeper:
    """Keeps retention from deleting what pending timers need."""

    def __init__(self, timers: Timers, runs: Runs, run: Run) -> None:
        self._timers = timers
        self._runs = runs
        self._store = timers.context.store
        self._run = run
        self._read = read_through(run)
        self._seen = 0  # no park before this log offset was pending there
        self._seen_at = 0  # the end of the events of timers when that was seen
        self._clean = 0  # the same, and nothing that ended these timers can be taken back
        self._is_stopping = False

    def stop(self) -> None:
        """End a look that goes on, and begin none that is long: a broker that stops waits for it."""
        self._is_stopping = True

    @property
    def oldest(self) -> int | None:
        """The lowest log offset that timers need, as far as ``keep`` has looked; ``None`` without any."""
        if not self._timers.is_used:
            return None
        needed = self._timers.needed_from
        return self._clean if needed is None else min(needed, self._clean)

    def keep(self, before: int) -> None:
        """Store the timers whose parks lie before a log offset once more, up to a limit of bytes and of time.

        What is found to need no record there may be deleted from the next call of ``oldest`` on, or a round later.
        """
        table = self._timers.table
        if table is None:
            return
        try:
            self._confirm(table)
            self._walk(table, before)
            self._timers.upkeep.enter(table)
            self._confirm(table)
        except IndexFailed as error:
            if self._timers.table is not table:  # it was opened again meanwhile, and the new one is in order
                return
            self._timers.failed(error)
            raise
        if table.secret is not None and table.secret.place < before:  # last: without room, segments before it still go
            self._timers.stage_secret_again()
        self._keep_definitions(table, before)

    def _keep_definitions(self, table: Pending, before: int) -> None:
        """Store the definitions of recurring messages again whose marks lie before a log offset."""
        for definition in [each for each in table.definitions if each.place < before]:
            recurring = self._runs.recurring(definition)
            is_same = self._timers.table is table and table.definitions.get(definition.name) is definition
            if not is_same or definition.name in self._timers.names_in_flight:
                continue
            if recurring is None:
                logger.error("recurring message cannot be stored again, its segment stays name=%s", definition.name)
                continue
            self._store.check_appendable()
            stage_definition_again(self._timers, definition, recurring)

    def _walk(self, table: Pending, before: int) -> None:
        """Store the timers before a log offset again; look as far beyond it, up to the next one that is pending.

        So retention, which deletes a few segments at a time, need not wait for a look at each time.
        """
        lasting_end = self._timers.turns.lasting_end()
        until = min(2 * before - self._store.log.begin, lasting_end)
        offsets = (self._seen, min(before, lasting_end), until)
        at, end, ahead = (place_of(self._store, offset, self._read).parks for offset in offsets)
        if at < ahead and self._store.queues[PARKS].readable < ahead:
            return
        room, first, reached, clock = KEPT_A_ROUND, None, self._seen, self._store.clock
        began = rested = clock.monotonic()
        while at < ahead and (first is None or (at < end and room > 0)):
            count = min(AT_ONCE, (end if at < end else ahead) - at)
            parks = self._parks(at, count)
            if self._timers.table is not table or self._is_stopping:
                return
            needed = self._needed(table, parks)
            reached = parks[-1].place if parks else reached
            if needed and first is None:
                first = needed[0].place
            self._saw(table, reached if first is None else first)  # now: where there is no room, the next line fails
            if at < end:
                room -= self._keep_all(table, needed)
            at += count
            if clock.monotonic() - began >= LOOK_S:
                until = reached if at < ahead else until
                break
            if clock.monotonic() - rested >= LONG_WORK_S:
                gevent.sleep(REST_S)
                rested = clock.monotonic()
        self._saw(table, until if first is None else first)

    def _saw(self, table: Pending, until: int) -> None:
        """Take note that no park before a log offset is pending there."""
        self._seen = max(self._seen, until)
        self._seen_at = max(self._seen_at, table.followed)

    def _parks(self, ordinal: int, count: int) -> list[_Parked]:
        records = self._store.records(self._store.queues[PARKS], ordinal, READ_BYTES, self._read)
        return [park for park in map(_parked, islice(records, count)) if park is not None]

    def _needed(self, table: Pending, parks: Sequence[_Parked]) -> list[_Parked]:
        """Return those of some parks whose timers are pending at just this place, or taken, at the moment of the return."""
        places = self._places(table, [park.key for park in parks])
        return [park for park in parks if places.get(park.key) == park.place or table.state(park.key) is TimerState.TAKEN]

    def _places(self, table: Pending, keys: list[Key]) -> dict[Key, int]:
        """Return the places of those timers that are pending and that nobody has taken, known at the moment of the return."""
        while True:
            far = [key for key in keys if table.state(key) is TimerState.FAR and key >= table.horizon]
            version = table.index.version
            asked = table.find(far, self._run) if far else []
            if table.index.version == version and all(
                table.state(key) is TimerState.FAR and key >= table.horizon for key in far
            ):
                break
        found = {key: place for key, (state, place) in zip(far, asked, strict=True) if state is TimerState.PENDING}
        for key in keys:
            place = table.place(key)
            if place is not None:
                found[key] = place
        return found

    def _keep_all(self, table: Pending, parks: Iterable[_Parked]) -> int:
        """Store those of some timers again that nobody has taken; return the bytes of their parks."""
        kept = 0
        for key, place, data in parks:
            self._store.check_appendable()
            if table.state(key) is not TimerState.TAKEN:
                kept += self._keep_one(key, place, data)
        return kept

    def _keep_one(self, key: Key, place: int, data: bytes) -> int:
        record = decode_record(data)
        origin = park_origin(record)._replace(place=place)
        try:
            self._timers.stage_again(key, origin, again(record, *PARKS, pairs_of(record)))
        except BadRequest as error:
            logger.error("timer cannot be stored again, its segment stays log_offset=%d reason=%s", place, error)
            return 0
        return record.size

    def _confirm(self, table: Pending) -> None:
        """Have no segment kept any more in which nothing was seen to be pending, once that cannot be taken back."""
        if self._timers.table is not table or table.covered < self._seen_at:
            return
        counted = table.counted(self._seen)
        if not (counted and self._has_missed(table)) and self._timers.table is table:
            table.discount(counted)
            self._clean = self._seen

    def _has_missed(self, table: Pending) -> bool:
        """Store timers again that the walk did not meet, since the queue has lost their places; return whether any is there.

        Those whose records are lost, too, are reported.
        """
        lost: list[int] = []
        after, is_there, room = b"", False, KEPT_A_ROUND
        while timers := self._timers.upkeep.page(table, after, AT_ONCE):
            after = timers[-1][0]
            keys = {place: key for key, place in timers if place < self._seen}
            found = records_at(self._store.log, PARKS, list(keys), self._run)
            if self._timers.table is not table:
                return True
            parks = [_Parked(keys[place], place, _data(stored)) for place, stored in found.items()]
            places = self._places(table, [park.key for park in parks])
            parks = [park for park in parks if places.get(park.key) == park.place]
            for park in parks:
                if size := self._keep_all(table, [park]):
                    self._seen_at = self._store.log.staged_end
                    room -= size
            if room <= 0:
                return True
            is_there = is_there or bool(parks)
            lost += keys.keys() - found.keys()
        if lost:
            logger.error("timers lost, their segments go timers=%d first_log_offset=%d", len(lost), min(lost))
        return is_there


def _data(stored: Stored) -> bytes:
    return bytes(stored.buffer[stored.at : stored.at + stored.size])


def _parked(stored: Stored | None) -> _Parked | None:
    """Return a park that was read; ``None`` for one that is lost or none at all, which the fold has reported."""
    if stored is None:
        return None
    data = _data(stored)
    due_ms = due_of_first(data)
    if due_ms is not None:
        return _Parked(key_of(due_ms, stored.log_offset), stored.log_offset, data)
    try:
        return _Parked(event_of_park(stored).key, stored.log_offset, data)
    except CorruptRecord:
        return None
