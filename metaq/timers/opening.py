"""The opening of the table of timers: an index that does not fit the log is made anew from it."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

from metaq.errors import IndexFailed, StoreError
from metaq.store.files.filecache import Run, read_here
from metaq.store.log.commitlog import CommitLog
from metaq.store.messagestore import MessageStore
from metaq.store.ordered.ordered import Covered, EngineName, Ordered, open_ordered, remove_ordered
from metaq.timers.fold import Fold, checksum_before, place_of
from metaq.timers.pending import Pending

logger = logging.getLogger(__name__)

FEATURE: Final = "timers"
"""What a data folder with timers is marked with, so that no older version opens it."""


def open_pending(store: MessageStore, folder: Path, engine: EngineName, run: Run) -> tuple[Pending, Fold]:
    """Open the index in ``folder``; return the table that it holds, and the reader of what the log has beyond it.

    ``run`` is where the index waits later, once other work goes on.
    """
    index, reason = open_ordered(folder, engine)
    if reason is None and index.covered is not None and not _fits(store.log, index.covered):
        reason = f"it covers the log up to {index.covered.log_offset}, where this log has no record, or another one"
        index = _anew(index, folder, engine)
    try:
        pending = Pending(index, store.log, run)
    except IndexFailed as error:
        reason = str(error)
        pending = Pending(_anew(index, folder, engine), store.log, run)
    if reason is not None:
        logger.error("timer index rebuilt reason=%s", reason)
    return pending, Fold(store, place_of(store, pending.covered, read_here))


def _anew(index: Ordered, folder: Path, engine: EngineName) -> Ordered:
    """Return an empty index in place of one."""
    with suppress(StoreError):
        index.close()
    remove_ordered(folder)
    return open_ordered(folder, engine)[0]


def _fits(log: CommitLog, covered: Covered) -> bool:
    """Return whether the log still has the record at which the index ends.

    Before a segment is deleted, all that is pending in it is stored again: an index that ends there does not know of
    that, or nothing is pending.
    """
    return log.begin < covered.log_offset <= log.end and checksum_before(log, covered.log_offset) == covered.checksum
