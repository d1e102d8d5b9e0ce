"""The opening of the table of timers: an index that does not fit the log is made anew from it."""

import logging
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

from metaq.errors import IndexFailed, StoreError
from metaq.store.files.filecache import Run, read_here
from metaq.store.messagestore import MessageStore
from metaq.store.ordered.following import has_end
from metaq.store.ordered.ordered import EngineName, Ordered, open_ordered, remove_ordered
from metaq.timers.fold import READ_BYTES, Fold, place_of
from metaq.timers.pending import Pending
from metaq.timers.records import MARKS, Secret, event_of_mark

logger = logging.getLogger(__name__)

FEATURE: Final = "timers"
"""What a data folder with timers is marked with, so that no older version opens it."""
FIRST_MARKS: Final = 64
"""Marks that are looked at for the secret before the log is folded, so that the first messages after a start get handles."""


def open_pending(store: MessageStore, folder: Path, engine: EngineName, run: Run) -> tuple[Pending, Fold]:
    """Open the index in ``folder``; return the table that it holds, and the reader of what the log has beyond it.

    ``run`` is where the index waits later, once other work goes on.
    """
    index, reason = open_ordered(folder, engine)
    # Before a segment is deleted, all that is pending in it is stored again: what an index that ends there lacks is in the log.
    if reason is None and index.covered is not None and not has_end(store.log, index.covered):
        reason = f"it covers the log up to {index.covered.log_offset}, where this log has no record, or another one"
        index = _anew(index, folder, engine)
    try:
        pending = Pending(index, store.log, run)
    except IndexFailed as error:
        reason = str(error)
        pending = Pending(_anew(index, folder, engine), store.log, run)
    if reason is not None:
        logger.error("timer index rebuilt reason=%s", reason)
    if pending.secret is None:
        pending.secret = _first_secret(store)
    return pending, Fold(store, place_of(store, pending.covered, read_here))


def _first_secret(store: MessageStore) -> Secret | None:
    """Return the secret of the handles if it is among the first marks, as it is until retention has passed it."""
    queue = store.queues.get(MARKS)
    if queue is not None:
        first = store.first(queue, read_here)[0]
        for stored in islice(store.records(queue, first, READ_BYTES, read_here), FIRST_MARKS):
            if stored is not None and isinstance(event := event_of_mark(stored), Secret):
                return event
    return None


def _anew(index: Ordered, folder: Path, engine: EngineName) -> Ordered:
    """Return an empty index in place of one."""
    with suppress(StoreError):
        index.close()
    remove_ordered(folder)
    return open_ordered(folder, engine)[0]
