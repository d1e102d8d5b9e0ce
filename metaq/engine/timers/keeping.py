"""The log that pending timers need: their segments stay, or the timers are stored again before retention deletes them.

The table counts pending timers by segment. Where a record was damaged or lost, a count is too low or too high, and says nothing
of it. So the parks themselves decide: a segment goes when all its parks were looked at, and none of them is pending there.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

import gevent

from metaq.clock import Clock
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


@dataclass(slots=True)
class _Search:
    """A look for timers that the queue has lost, among all that are pending; it goes on from round to round."""

    table: Pending
    before: int
    """The log offset before which they lie."""
    after: Key = b""
    """The key of the last timer that was looked at."""
    is_there: bool = False
    """True once one was found."""


class _Look:
    """The time that one round looks; others go on in between."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._rested = clock.monotonic()

    def is_over(self) -> bool:
        """Return whether the time is over; rest first when it is time for that."""
        if self._clock.monotonic() - self._rested >= LONG_WORK_S:
            gevent.sleep(REST_S)
            self._rested = self._clock.monotonic()
        return self._clock.monotonic() - self._began >= LOOK_S


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
        self._search: _Search | None = None
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
            if table.secret is not None and table.secret.place < before:
                self._timers.stage_secret_again()
            self._keep_definitions(table, before)
        finally:  # without room for these, too: segments before them still go
            self._keep_parks(table, before)

    def _keep_parks(self, table: Pending, before: int) -> None:
        look = _Look(self._store.clock)
        try:
            self._confirm(table, look)
            self._walk(table, before, look)
            self._timers.upkeep.enter(table)
            self._confirm(table, look)
        except IndexFailed as error:
            if self._timers.table is not table:  # it was opened again meanwhile, and the new one is in order
                return
            self._timers.failed(error)
            raise

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

    def _walk(self, table: Pending, before: int, look: _Look) -> None:
        """Store the timers before a log offset again; look as far beyond it, up to the next one that is pending.

        So retention, which deletes a few segments at a time, need not wait for a look at each time.
        """
        lasting_end = self._timers.turns.lasting_end()
        until = min(2 * before - self._store.log.begin, lasting_end)
        offsets = (self._seen, min(before, lasting_end), until)
        at, end, ahead = (place_of(self._store, offset, self._read).parks for offset in offsets)
        queue = self._store.queue(*PARKS)  # there is none while only the secret of handles is stored
        if at < ahead and queue.readable < ahead:
            return
        records = self._store.records(queue, at, READ_BYTES, self._read)
        room, first, reached = KEPT_A_ROUND, None, self._seen
        while at < ahead and (first is None or (at < end and room > 0)):
            count = min(AT_ONCE, (end if at < end else ahead) - at)
            parks = [park for park in map(_parked, islice(records, count)) if park is not None]
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
            if look.is_over():
                until = reached if at < ahead else until
                break
        self._saw(table, until if first is None else first)

    def _saw(self, table: Pending, until: int) -> None:
        """Take note that no park before a log offset is pending there."""
        self._seen = max(self._seen, until)
        self._seen_at = max(self._seen_at, table.followed)

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

    def _confirm(self, table: Pending, look: _Look) -> None:
        """Have no segment kept any more in which nothing was seen to be pending, once that cannot be taken back."""
        if self._timers.table is not table or table.covered < self._seen_at:
            return
        search = self._search
        if search is None or search.table is not table:
            search = self._search = _Search(table, self._seen)
        counted = table.counted(search.before)
        if counted and not self._search_on(search, look):
            return
        self._search = None
        if not search.is_there:
            table.discount(counted)
            self._clean = search.before

    def _search_on(self, search: _Search, look: _Look) -> bool:
        """Store timers again that the walk did not meet, since the queue has lost their places; return whether that is done.

        Otherwise a later round goes on with it. Those whose records are lost, too, are reported.
        """
        table, room, lost, is_done = search.table, KEPT_A_ROUND, list[int](), False
        while room > 0 and not (is_done or self._is_stopping or look.is_over()):
            timers = self._timers.upkeep.page(table, search.after, AT_ONCE)
            keys = {place: key for key, place in timers if place < search.before}
            found = records_at(self._store.log, PARKS, list(keys), self._run)
            if self._timers.table is not table:
                break
            parks = self._needed(table, [_Parked(keys[place], place, _data(stored)) for place, stored in found.items()])
            search.is_there = search.is_there or bool(parks)
            for park in parks:
                if size := self._keep_all(table, [park]):
                    self._seen_at = self._store.log.staged_end
                    room -= size
            lost += keys.keys() - found.keys()
            search.after = timers[-1][0] if timers else search.after
            is_done = not timers
        if lost:
            logger.error("timers lost, their segments go timers=%d first_log_offset=%d", len(lost), min(lost))
        return is_done


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
