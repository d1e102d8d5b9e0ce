"""The place of a sent message: its own partition, or where it waits for its time, a decision or an operator."""

from metaq.engine.deadletters import dead_letter, report_dead_letter
from metaq.engine.halfmessages import HalfMessages, is_half
from metaq.engine.tables.groups import Group
from metaq.engine.timers.timers import Timers
from metaq.engine.writing import Draft, Placed, delayed, stage
from metaq.protocol import properties
from metaq.protocol.delays import due_of


def place(halves: HalfMessages, timers: Timers, draft: Draft, producer_group: str, given_up_by: Group | None) -> Placed:
    """Stage a message as its properties want it, and return its place; as a dead letter if a group has given it up.

    The caller has checked that the topic may be written, and stages an outcome (``Turns.staged``). Raises ``MessageIllegal``
    for properties that contradict each other or are too long, and ``DiskFull`` when the log cannot grow.
    """
    context = halves.context
    if given_up_by is not None:
        draft = dead_letter(context, given_up_by, draft)
    if properties.REPLY_TO in draft.properties:  # the consumer derives the reply topic from the cluster's name
        draft.properties[properties.CLUSTER] = context.settings.cluster_name
    if is_half(draft):
        placed = halves.park(draft, producer_group)
    else:
        level = delayed(draft)
        due_ms = due_of(draft.properties, context.store.clock.now_ms()) if level is draft else None
        placed = stage(context, level) if due_ms is None else timers.send(draft, due_ms)
    if given_up_by is not None:
        report_dead_letter(context, halves.turns, draft)
    return placed
