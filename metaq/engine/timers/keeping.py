"""The log that pending timers need: their segments stay, or the timers are stored again before retention deletes them."""

import logging
from typing import Final

from metaq.engine.halfmessages import pairs_of
from metaq.engine.timers.defining import stage_definition_again
from metaq.engine.timers.recurring import Runs
from metaq.engine.timers.timers import Timers
from metaq.engine.writing import again
from metaq.errors import BadRequest, IndexFailed
from metaq.protocol.record import Record, decode_record
from metaq.store.files.filecache import Run, read_through
from metaq.timers.entering import TimerState
from metaq.timers.fold import place_of
from metaq.timers.pending import Pending
from metaq.timers.records import PARKS, Key, event_of_park, park_origin

logger = logging.getLogger(__name__)

KEPT_A_ROUND: Final = 64 << 20
"""About how many bytes of parks one round stores again."""
AT_ONCE: Final = 128


class TimerKeeper:
    """Keeps retention from deleting what pending timers need."""

    def __init__(self, timers: Timers, runs: Runs, run: Run) -> None:
        self._timers = timers
        self._runs = runs
        self._store = timers.context.store
        self._run = run
        self._read = read_through(run)

    @property
    def oldest(self) -> int | None:
        """The lowest log offset that timers need; ``None`` without any."""
        return self._timers.needed_from

    def keep(self, before: int) -> None:
        """Store the timers whose parks lie before a log offset once more, up to a limit of bytes."""
        table = self._timers.table
        oldest = None if table is None else table.oldest()
        if table is None or oldest is None or oldest >= before:
            return
        if table.secret is not None and table.secret.place < before:
            self._timers.stage_secret_again()
        self._keep_definitions(table, before)
        begin, end = place_of(self._store, oldest, self._read).parks, place_of(self._store, before, self._read).parks
        room = KEPT_A_ROUND
        while begin < end and room > 0:
            count = min(AT_ONCE, end - begin)
            room -= self._keep_some(table, begin, count)
            begin += count

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

    def _keep_some(self, table: Pending, ordinal: int, count: int) -> int:
        """Store those of some parks again that are pending at just this place; return their bytes."""
        queue = self._store.queues[PARKS]
        parks = []
        for _, stored in zip(range(count), self._store.records(queue, ordinal, 1 << 20, self._read), strict=False):
            if stored is not None:
                record = decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size]))
                parks.append((event_of_park(stored).key, record))
        try:
            places = self._places(table, [key for key, _ in parks])
        except IndexFailed as error:
            self._timers.failed(error)
            raise
        kept = 0
        if self._timers.table is not table:
            return kept
        self._store.check_appendable()
        for key, record in parks:
            if places.get(key) == record.log_offset and table.state(key) in (TimerState.PENDING, TimerState.FAR):
                kept += self._keep_one(key, record)
        return kept

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

    def _keep_one(self, key: Key, record: Record) -> int:
        origin = park_origin(record)._replace(place=record.log_offset)
        try:
            self._timers.stage_again(key, origin, again(record, *PARKS, pairs_of(record)))
        except BadRequest as error:
            logger.error("timer cannot be stored again, its segment stays log_offset=%d reason=%s", origin.place, error)
            return 0
        return record.size
