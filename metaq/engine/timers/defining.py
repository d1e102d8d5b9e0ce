"""Definitions of recurring messages, staged: with their first runs, at their end, and again before retention deletes them."""

from metaq.engine.timers.staged import NextRun
from metaq.engine.timers.timers import Timers
from metaq.engine.writing import Draft, internal_mark, new_record, stage
from metaq.store.recordgroups import END_SIZE, put_record_group
from metaq.timers.definitions import Recurring, define_mark, undefine_mark
from metaq.timers.pending import Pending
from metaq.timers.records import MARKS, Defined, Definition, Ended, Key, Undefined


def stage_definition(timers: Timers, recurring: Recurring, replaced: Ended | None, draft: Draft, due_ms: int) -> None:
    """Stage a definition with its first run; a definition that it replaces ends, whose run is taken.

    Raises what ``ready`` and ``put_record_group`` raise; then nothing is staged.
    """
    context, store, table = timers.context, timers.context.store, timers.ready()
    mark = new_record(context, internal_mark(context, MARKS, define_mark(recurring, replaced)))
    size = mark.size + END_SIZE
    number = store.log.end_of([size]) - size
    _, cron, topic, _, zone, partition, _, _, missed = recurring
    definition = Definition(recurring.name, number, number, cron, zone, topic, partition, missed)
    run = NextRun(definition, due_ms, draft)
    offsets = put_record_group(store, mark, [new_record(context, draft, run.own)])
    assert offsets[0] == number
    _stage_ended(timers, table, Defined(definition, replaced, offsets[1]), replaced)
    timers.stage_runs([run], offsets[1:], [store.log.staged_end])


def stage_end(timers: Timers, definition: Definition, ended: Ended) -> None:
    """Stage the end of a definition, whose run is taken. Raises what ``ready`` and ``stage`` raise; then nothing is staged."""
    table = timers.ready()
    stage(timers.context, internal_mark(timers.context, MARKS, undefine_mark(definition.name, ended)))
    _stage_ended(timers, table, Undefined(definition.name, ended, timers.context.store.log.staged_end), ended)


def _stage_ended(timers: Timers, table: Pending, event: Defined | Undefined, ended: Ended | None) -> None:
    taken: tuple[Key, ...] = ()
    if ended is not None and ended.place >= 0:
        table.take(ended.key, ended.place)
        table.flight.add(ended.key)
        taken = (ended.key,)
    timers.stage_event(event, taken)


def stage_definition_again(timers: Timers, definition: Definition, recurring: Recurring) -> None:
    """Stage a definition once more: the segment that holds it is about to be deleted."""
    mark = internal_mark(timers.context, MARKS, define_mark(recurring, None, definition.number))
    place = stage(timers.context, mark).log_offset
    timers.stage_event(Defined(definition._replace(place=place), None, timers.context.store.log.staged_end))
