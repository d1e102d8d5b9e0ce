"""Recurring messages without a pending run, as its record was damaged or lost when the table was made: they get another one."""

import logging
from functools import partial

from metaq.engine.timers.recurring import Runs
from metaq.engine.timers.timers import Timers
from metaq.engine.writing import note, stage
from metaq.errors import BadRequest, MetaqError
from metaq.store.files.filecache import Run
from metaq.timers.entering import TimerState
from metaq.timers.pending import Pending
from metaq.timers.records import Definition, parts_of

logger = logging.getLogger(__name__)


class LostRuns:
    """Looks at each new table once; each run brings the next one along, so nothing is lost later."""

    def __init__(self, timers: Timers, runs: Runs, run: Run) -> None:
        self._timers = timers
        self._runs = runs
        self._context = timers.context
        self._run = run
        self._looked_at: Pending | None = None
        self._done: set[int] = set()  # numbers of definitions that have got a run, or can have none

    def restore(self, table: Pending) -> None:
        """Stage a run for each recurring message that has none. Raises ``MetaqError`` when that must be tried again."""
        if self._looked_at is table:
            return
        lacking = [each for each in self._without_run(table) if each.number not in self._done]
        left = [each for each in lacking if not self._restore(table, each)]
        if not left and self._timers.table is table:
            self._looked_at = table

    def _without_run(self, table: Pending) -> list[Definition]:
        """Return the definitions of which no run is pending or taken."""
        keys = {definition: table.definitions.run(definition) for definition in table.definitions}
        known = (TimerState.PENDING, TimerState.TAKEN)
        lacking = {definition: key for definition, key in keys.items() if key is None or table.state(key) not in known}
        far = [key for key in lacking.values() if key is not None and key >= table.horizon]
        states = table.find(far, self._run) if far else []
        pending = {key for key, (state, _) in zip(far, states, strict=True) if state is TimerState.PENDING}
        return [definition for definition, key in lacking.items() if key not in pending]

    def _restore(self, table: Pending, definition: Definition) -> bool:
        """Stage a run if there is one; return false when somebody else changes the definition, who may fail."""
        now_ms, key = self._context.store.clock.now_ms(), table.definitions.run(definition)
        due_ms = now_ms if key is None else parts_of(key)[0]
        run = self._runs.next_run(definition, None, self._runs.plan(definition, due_ms, now_ms, 1).next_ms)
        is_same = self._timers.table is table and table.definitions.get(definition.name) is definition
        if not is_same or definition.name in self._timers.names_in_flight:
            return False
        if run is not None:
            self._context.store.check_writable()
            self._timers.ready()
            try:
                place = stage(self._context, run.draft, run.own).log_offset
            except BadRequest:  # no segment has room for it
                logger.error("recurring message lost name=%s", definition.name)
            else:
                self._timers.stage_runs([run], [place], [self._context.store.log.staged_end])
                self._timers.hold(definition.name)  # an end that comes meanwhile would not know of the run
                note(self._timers.turns, partial(self._settled, definition))
                logger.error("recurring message had lost its run name=%s next_ms=%d", definition.name, run.due_ms)
        self._done.add(definition.number)
        return True

    def _settled(self, definition: Definition, failure: MetaqError | None) -> None:
        if failure is not None:
            self._done.discard(definition.number)
            self._looked_at = None
