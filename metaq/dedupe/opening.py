"""The opening of the index of ids: one that does not fit the log is made anew from it, as far as windows reach back."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import Final

from metaq.dedupe.records import INTERNAL, SeenId, seen_in, topic_in
from metaq.dedupe.seen import SeenIds, Windows, windows_in
from metaq.errors import CorruptRecord, IndexFailed, StoreError
from metaq.store.files.filecache import Read, Run, read_around, read_here
from metaq.store.log.commitlog import CommitLog
from metaq.store.log.window import Window
from metaq.store.messagestore import MessageStore
from metaq.store.ordered.following import has_end
from metaq.store.ordered.ordered import EngineName, Ordered, open_ordered, remove_ordered

logger = logging.getLogger(__name__)

WRITE_BUFFER_BYTES: Final = 3 * 1024**2
"""Fewer ids than stay in memory (``metaq.dedupe.seen.KEPT``), so that the index is not asked for what it has not sorted."""
READ_BYTES: Final = 256 * 1024
"""Bytes of the log that are read at a time, about 5 ms of work when messages are small."""


class IdReader:
    """A reader of the ids in the log, from a log offset on."""

    def __init__(self, log: CommitLog, at: int, windows: Windows) -> None:
        self._log = log
        self._topics = windows.keys() | INTERNAL
        self._window = READ_BYTES
        self.at = at
        """The log offset before which all is read."""

    def next(self, end: int, read: Read) -> list[SeenId]:
        """Return the ids in the next part of the log before ``end``, and move on after it."""
        at = max(self.at, self._log.begin)
        segment = self._log.find(at)
        if segment is None or at >= end:  # retention may have deleted all before ``end``
            self.at = end
            return []
        stop = min(segment.end, end)
        size = min(self._window, stop - at)
        data = read_around(read, self._log.file(segment), size, at - segment.base).ljust(size, b"\0")
        window = Window(memoryview(data), at, stop, segment.end)
        found = [seen for record, offset in window.records() if (seen := self._seen(record, offset)) is not None]
        self.at = window.at
        self._window = max(READ_BYTES, window.wanted)
        return found

    def _seen(self, record: memoryview, log_offset: int) -> SeenId | None:
        if topic_in(record) not in self._topics:
            return None
        try:
            return seen_in(record, log_offset)
        except (CorruptRecord, ValueError, KeyError) as error:
            logger.error("id of a message cannot be read log_offset=%d reason=%s", log_offset, error)
            return None


def open_seen(store: MessageStore, folder: Path, engine: EngineName, windows: Windows, run: Run) -> tuple[SeenIds, IdReader]:
    """Open the index in ``folder``; return the ids that it holds, and the reader of what the log has beyond it.

    ``run`` is where the index waits later, once other work goes on.
    """
    index, reason = _opened(folder, engine)
    try:
        if reason is None and index.covered is not None and (reason := _misfit(store.log, index)) is not None:
            index = _anew(index, folder, engine)
        elif index.covered is not None and not windows.items() <= windows_in(index).items():
            logger.info("index of ids read again for other windows topics=%d", len(windows))
            index = _anew(index, folder, engine)
        seen = SeenIds(index, store.log, windows, run)
    except IndexFailed as error:
        reason = str(error)
        seen = SeenIds(_anew(index, folder, engine), store.log, windows, run)
    if reason is not None:
        logger.error("index of ids rebuilt reason=%s", reason)
    since_ms = store.clock.now_ms() - 2 * max(windows.values())
    return seen, IdReader(store.log, max(seen.covered, _place_of(store.log, since_ms)), windows)


def _misfit(log: CommitLog, index: Ordered) -> str | None:
    """Return why an index does not fit the log."""
    assert index.covered is not None
    if not has_end(log, index.covered):
        return f"it covers the log up to {index.covered.log_offset}, where this log has no record, or another one"
    return None


def _place_of(log: CommitLog, since_ms: int) -> int:
    """Return the base of a segment before which nothing is as new as ``since_ms``."""
    for segment in reversed(log.segments):
        begun_ms = log.begun_ms(segment, read_here)
        if begun_ms is not None and begun_ms < since_ms:
            return segment.base
    return log.begin


def _anew(index: Ordered, folder: Path, engine: EngineName) -> Ordered:
    """Return an empty index in place of one."""
    with suppress(StoreError):
        index.close()
    remove_ordered(folder)
    return _opened(folder, engine)[0]


def _opened(folder: Path, engine: EngineName) -> tuple[Ordered, str | None]:
    return open_ordered(folder, engine, write_buffer_bytes=WRITE_BUFFER_BYTES, seldom_asked=True)
