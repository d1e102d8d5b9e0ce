"""Recurring messages: defined and ended by operators; each run brings the next one along."""

import logging
from itertools import islice
from typing import Final, NamedTuple

from metaq.engine.context import Context
from metaq.engine.halfmessages import pairs_of
from metaq.engine.tables.topics import FORBIDDEN
from metaq.engine.timers.cancelling import TAKEN_WAIT_S, Awaited, Cancels
from metaq.engine.timers.defining import stage_definition, stage_end
from metaq.engine.timers.staged import NextRun
from metaq.engine.timers.timers import Timers
from metaq.engine.writing import Draft, again
from metaq.errors import BadRequest, NotWritable, Overloaded, ReadFailed, TimerDelivered, UnknownTimer, UnknownTopic
from metaq.message import DEAD_PREFIX, RETRY_PREFIX
from metaq.protocol.record import TAGS, Record, decode_record
from metaq.store.files.filecache import Run, read_through
from metaq.timers.cron import Recurrence, parse_schedule
from metaq.timers.definitions import MOST, Missed, Recurring, recurring_of
from metaq.timers.pending import Pending
from metaq.timers.records import PARKS, Definition, Ended, key_of, properties_of_park

logger = logging.getLogger(__name__)

MOST_MISSED: Final = 1000
"""Messages for missed times that one group delivers."""
LATE_MS: Final = 60_000
"""Beyond it a run counts as missed where missed runs are not made up for."""
MOST_SCHEDULES: Final = 16_384


class DueRun(NamedTuple):
    """The deliveries that a due run stands for."""

    times: list[int]
    """The due times of the messages that are delivered now."""
    next_ms: int


class Runs:
    """The runs of recurring messages."""

    def __init__(self, context: Context, run: Run) -> None:
        self._context = context
        self._store = context.store
        self._read = read_through(run)
        self._schedules: dict[tuple[str, str], Recurrence] = {}
        self._turn = 0  # where a message goes that leaves the partition open

    def plan(self, definition: Definition, due_ms: int, now_ms: int, most: int) -> DueRun:
        """Return which times a run stands for, at most so many, and when the next one is."""
        schedule = self._schedule(definition)
        if definition.missed == Missed.ALL:
            times, following = [due_ms], schedule.next(due_ms)
            while following <= now_ms and len(times) < min(most, MOST_MISSED):
                times.append(following)
                following = schedule.next(following)
            return DueRun(times, following)
        is_missed = definition.missed == Missed.NONE and now_ms - due_ms > LATE_MS
        return DueRun([] if is_missed else [due_ms], schedule.next_beyond(due_ms, max(due_ms, now_ms)))

    def _schedule(self, definition: Definition) -> Recurrence:
        key = definition.cron, definition.zone
        found = self._schedules.get(key)
        if found is None:
            try:
                found = parse_schedule(*key)
            except BadRequest as error:  # another machine, with other time zones, has taken it
                logger.error("schedule read in UTC name=%s reason=%s", definition.name, error)
                found = parse_schedule(definition.cron, "UTC")
            if len(self._schedules) >= MOST_SCHEDULES:
                self._schedules.clear()
            self._schedules[key] = found
        return found

    def next_run(self, definition: Definition, record: Record | None, due_ms: int) -> NextRun | None:
        """Return the next run, made from the park of this one or, when that is damaged, from the definition."""
        added = properties_of_park(due_ms, definition.topic, self._partition(definition.topic, definition.partition))
        if record is not None:
            pairs = {name: value for name, value in pairs_of(record).items() if name not in added} | added
            return NextRun(definition, due_ms, again(record, *PARKS, pairs))
        recurring = self.recurring(definition)
        if recurring is None:
            logger.error("recurring message lost name=%s", definition.name)
            return None
        return NextRun(definition, due_ms, self.draft(recurring, due_ms))

    def recurring(self, definition: Definition) -> Recurring | None:
        """Return a definition in full; ``None`` when its record is damaged or lost. Raise the ``StoreError`` of the disk."""
        try:
            stored = self._store.record_at_offset(definition.place, self._read)
        except ReadFailed:
            return None
        if stored is None:
            return None
        return recurring_of(decode_record(bytes(stored.buffer[stored.at : stored.at + stored.size])).body)

    def draft(self, recurring: Recurring, due_ms: int) -> Draft:
        """Return the park of a run."""
        pairs = {} if recurring.attribute is None else {TAGS: recurring.attribute}
        pairs |= properties_of_park(due_ms, recurring.topic, self._partition(recurring.topic, recurring.partition))
        return Draft(
            topic=PARKS.topic,
            partition=PARKS.partition,
            body=recurring.body,
            properties=pairs,
            flag=recurring.flag,
            sys_flag=0,
            born_ms=self._store.clock.now_ms(),
            born_host=self._context.store_host,
        )

    def _partition(self, name: str, partition: int) -> int:
        """Return the partition of the next run: each in turn when the definition leaves it open."""
        if partition >= 0:
            return partition
        topic = self._context.topics.get(name)
        self._turn += 1
        return self._turn % max(1, 1 if topic is None else topic.partitions)


class RecurringMessages:
    """Defines and ends recurring messages; its calls wait, so they run in greenlets of their own."""

    def __init__(self, timers: Timers, cancels: Cancels, runs: Runs) -> None:
        self._timers = timers
        self._context = timers.context
        self._store = timers.context.store
        self._cancels = cancels
        self._runs = runs

    def define(self, recurring: Recurring) -> int:
        """Define a recurring message, in place of one with this name; return when it comes first, in Unix milliseconds.

        Returns when that is as safe as the broker promises of messages. Raises ``BadRequest`` for what cannot be defined,
        ``UnknownTopic``, and whatever keeps messages from being stored.
        """
        schedule = recurring.check()
        topic = self._context.topics.get(recurring.topic)
        if recurring.topic in FORBIDDEN or recurring.topic.startswith((RETRY_PREFIX, DEAD_PREFIX)):
            raise BadRequest(f"no messages are sent to the topic {recurring.topic}")
        if topic is None:
            raise UnknownTopic(f"the topic {recurring.topic[:127]} does not exist; create it first")
        if recurring.partition >= topic.partitions:
            raise BadRequest(f"the topic {topic.name} has {topic.partitions} partitions, none is {recurring.partition}")
        self._store.check_master()
        self._store.check_writable()
        self._timers.turns.check_load()
        if not self._timers.is_used:
            self._timers.ready()
        table, old, ended = self._claim(recurring.name)
        if old is None and len(table.definitions) + len(self._timers.names_in_flight) >= MOST:
            raise Overloaded(f"there are already {MOST} recurring messages on this broker", retry_after_ms=60_000)
        self._timers.ready()
        self._timers.begin_recurring()
        now_ms = self._store.clock.now_ms()
        due_ms = schedule.next(now_ms)
        stage_definition(self._timers, recurring, ended, self._runs.draft(recurring, due_ms), due_ms)
        self._wait("the definition")
        return due_ms

    def undefine(self, name: str) -> None:
        """End a recurring message: no run of it comes any more. Raises ``UnknownTimer`` when there is none with this name."""
        _, definition, ended = self._claim(name)
        if definition is None or ended is None:
            raise UnknownTimer(f"this broker has no recurring message {name[:100]}")
        self._store.check_writable()
        self._timers.turns.check_load()
        stage_end(self._timers, definition, ended)
        self._wait("the end of it")

    def _wait(self, what: str) -> None:
        outcome = Awaited(what)
        self._timers.turns.staged(outcome)
        outcome.get()

    def _claim(self, name: str) -> tuple[Pending, Definition | None, Ended | None]:
        """Return the table, and a definition with its pending run that nobody changes at the moment of the return."""
        deadline = self._store.clock.monotonic() + TAKEN_WAIT_S
        while True:
            table = self._cancels.table()
            definition = table.definitions.get(name)
            if name in self._timers.names_in_flight:
                if self._store.clock.monotonic() >= deadline:
                    raise NotWritable(f"the recurring message {name} is being changed; try again in a second")
                self._timers.wait(0.05)
                continue
            if definition is None:
                return table, None, None
            key = table.definitions.run(definition)
            if key is None:  # lost with a damaged log
                return table, definition, Ended(definition.number, key_of(0, 0), -1)
            try:
                place = self._cancels.place(table, key)
            except (TimerDelivered, UnknownTimer):
                if table.definitions.run(definition) != key and self._store.clock.monotonic() < deadline:
                    continue  # delivered meanwhile, and followed by the next run
                place = -1
            if self._timers.table is table and table.definitions.get(name) is definition:
                return table, definition, Ended(definition.number, key, -1 if place is None else place)

    def list_(self, after: str, most: int) -> list[tuple[Definition, int | None, int]]:
        """Return definitions by name, after one, with the time of the next run and the bytes of the body."""
        if not self._timers.is_used:
            return []
        table = self._cancels.table()
        found = sorted((each for each in table.definitions if each.name > after), key=lambda each: each.name)
        rows = []
        for definition in islice(found, most):
            key = table.definitions.run(definition)
            recurring = self._runs.recurring(definition)
            rows.append(
                (definition, None if key is None else int.from_bytes(key[:8]), 0 if recurring is None else len(recurring.body))
            )
        return rows
