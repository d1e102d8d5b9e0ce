"""Deleting expired segments of the log, and the files derived from them."""

from metaq.store.files.disk import MAKE_ROOM, Usage
from metaq.store.files.filecache import Rest, Run, go_on, read_through, run_here
from metaq.store.log.retention import Plan, plan
from metaq.store.messagestore import MessageStore


def delete_expired(
    store: MessageStore,
    run: Run = run_here,
    rest: Rest = go_on,
    *,
    at_any_hour: bool = False,
    needed_from: int | None = None,
) -> Plan:
    """Delete the segments that are due, check whether there is room to write, and return what was decided and done.

    The log from ``needed_from`` on is kept. A segment also stays until both the checkpoint and its backup cover all of it: once
    it is gone, they alone remember the ordinals and text positions of its messages.
    """
    log, now_ms, read = store.log, store.clock.now_ms(), read_through(run)
    used, available = store.disk.usage(store.directory)
    usage = Usage(used + store.reserved_bytes, available - store.reserved_bytes)
    decision = plan(log.ages(now_ms, read), now_ms, usage, store.settings.retention, at_any_hour=at_any_hour)
    last = log.find(decision.delete[-1]) if decision.delete else None
    deleted = []
    for base in decision.delete:
        segment = log.segments[0]
        assert segment.base == base
        if segment.end > store.checkpointing.covered or (needed_from is not None and segment.end > needed_from):
            break
        log.remove(segment, run)
        deleted.append(base)
    if deleted:
        for queue in store.in_slices(list(store.queues.values()), rest):
            # not ``first``: a deleted topic hides messages whose records are still in the log, and their units must stay too
            queue.drop_before(store.reader.oldest(queue, queue.base, read), run)
            queue.cursors.clear()
        store.indexing.index.drop_before(log.begin, store.checkpointing.index_covered, run)
    store.no_room = None if decision.refuse is None else f"{decision.refuse}; {MAKE_ROOM}"
    return Plan(deleted, decision.refuse, None if last is None else last.end)
