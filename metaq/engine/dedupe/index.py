"""The index of the ids of one broker: it follows the log, and is opened again when it fails.

A master reads the log up to its end at the start, and then enters what it stages; a slave goes on reading. What can still be
taken back enters the index later (``metaq.dedupe.seen``).
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import gevent
from gevent.lock import BoundedSemaphore

from metaq.dedupe.opening import IdReader, open_seen
from metaq.dedupe.records import First
from metaq.dedupe.seen import SeenIds
from metaq.engine.context import Context
from metaq.engine.reading.catchup import read_in_the_end
from metaq.engine.turn import Turns
from metaq.errors import DiskFull, IndexFailed, StoreError
from metaq.message import DEAD_PREFIX, RETRY_PREFIX
from metaq.store.copies.discarding import DEDUPE_INDEX
from metaq.store.files.filecache import Run, read_through
from metaq.store.ordered.ordered import remove_ordered

logger = logging.getLogger(__name__)

MOST_WAITING: Final = 200_000
"""Ids that may wait to enter the index; beyond it messages with ids are refused."""
APPLY_S: Final = 0.003
"""How long the index is written to before others go on."""
WAIT_S: Final = 0.05
"""Pause of a slave that has read all of its log."""


class IdIndex:
    """The index of one broker, as a master that stores messages or as a slave that follows."""

    def __init__(self, context: Context, turns: Turns, run: Run) -> None:
        """Open the index if a topic has a window; ``ConfigError`` without the package that it needs.

        Where the disk has no room for that, it is opened later: until then messages with ids are refused.
        """
        self._context = context
        self._turns = turns
        self._store = context.store
        self._run = run
        self._read = read_through(run)
        self._folder: Path = context.settings.data / DEDUPE_INDEX
        self.windows: dict[str, int] = {}
        """The windows of the topics that have one, in milliseconds. It is always the same dictionary."""
        self._seen: SeenIds | None = None
        self._fold: IdReader | None = None
        self._fold_end = 0
        self._failure: type[StoreError] | None = None  # why the index is opened again; an error itself would hold its files
        self._flushed = self._mark = 0
        self._greenlets: list[Any] = []
        self._lock = BoundedSemaphore(1)  # held by whoever changes the index
        for topic in context.topics:
            self._take_window(topic.name)
        if self.windows:
            try:
                self._open()
            except DiskFull as error:
                self.failed(error)

    def _take_window(self, name: str) -> None:
        topics = self._context.topics
        topic = topics.get(name)
        is_ours = topics.is_system(name) or name.startswith((RETRY_PREFIX, DEAD_PREFIX))
        if topic is not None and topic.dedupe_window_ms and not is_ours:
            self.windows[name] = topic.dedupe_window_ms
        else:
            self.windows.pop(name, None)

    def _open(self) -> None:
        engine = self._context.settings.timer_engine
        self._seen, self._fold = open_seen(self._store, self._folder, engine, self.windows, self._run)
        self._fold_end = self._store.log.end
        self._flushed, self._mark = self._seen.covered, 0

    # -- life ---------------------------------------------------------------------------------------------------------

    @property
    def _is_master(self) -> bool:
        return self._context.replicas.is_master

    def start(self) -> None:
        """Begin to read what the log has and the index has not."""
        if self._fold is not None and self._seen is not None:
            self._greenlets.append(gevent.spawn(self._fold_forever, self._fold, self._seen))

    def stop(self) -> None:
        """End the reading."""
        gevent.killall(self._greenlets)

    def topic_changed(self, name: str) -> None:
        """Learn that a topic was made, changed or removed. Another window counts for what is stored from now on."""
        self._take_window(name)
        if self._seen is not None and self._fold is None:
            self._seen.windows = dict(self.windows)

    def failed(self, error: StoreError) -> None:
        """Take note that the index is damaged, or could not be written: it is opened again, anew when it is damaged."""
        if self._failure is None:
            logger.error("index of ids failed reason=%s", error)
            self._failure = type(error)

    def _fold_forever(self, fold: IdReader, seen: SeenIds) -> None:
        """Read what the log has and the index has not; a slave goes on with it as its log grows."""
        while self._fold is fold:
            end = self._fold_end if self._is_master else min(self._store.published_end, self._store.log.end)
            if fold.at >= end:
                if self._is_master:
                    self._fold = None
                    seen.windows = dict(self.windows)
                    return
                gevent.sleep(WAIT_S)
                continue
            before, found = fold.at, read_in_the_end("ids", fold.next, end, self._read)
            if self._fold is not fold:  # the index was opened again meanwhile
                return
            now_ms = self._store.clock.now_ms()
            for each in found:
                seen.follow(each, now_ms)
            gevent.sleep(WAIT_S if fold.at == before else 0.001)
            while seen.waiting > MOST_WAITING and self._fold is fold:
                gevent.sleep(WAIT_S)

    def apply(self) -> None:
        """Enter what cannot be taken back into the index; called every sweep interval."""
        seen, clock = self._seen, self._store.clock
        if seen is None and self._failure is None:
            if self.windows and not self._is_master:
                self._open()
                self.start()
            return
        if not self.windows:
            self._drop()
            return
        if not self._is_master and seen is not None and seen.windows != self.windows and self._failure is None:
            self._failure = IndexFailed  # what it has passed may have ids that it did not take
        if self._failure is not None and not self._open_again():
            return
        began = clock.monotonic()
        with self._lock:
            seen = self._seen
            try:
                while seen is not None and seen.apply(self._lasting_end()):
                    if clock.monotonic() - began >= APPLY_S:
                        gevent.sleep(0.001)
                        began = clock.monotonic()
            except (IndexFailed, DiskFull) as error:
                self.failed(error)

    def _open_again(self) -> bool:
        """Open the index again, once nobody works with it and nothing is staged; return whether that is done."""
        with self._lock:
            seen = self._seen
            if self._store.shortage is not None:
                return False
            if seen is not None:
                if seen.asked or seen.is_staging:
                    return False
                with suppress(StoreError):
                    seen.index.close()
            if self._failure is IndexFailed:
                remove_ordered(self._folder)
            try:
                self._open()
            except DiskFull:  # tried again at the next sweep
                return False
            self._failure = None
            self.start()
        return True

    def _drop(self) -> None:
        """Remove the index: no topic has a window any more."""
        with self._lock:
            seen = self._seen
            if seen is not None:
                if seen.asked or seen.is_staging:
                    return
                self._seen = self._fold = None
                with suppress(StoreError):
                    seen.index.close()
            remove_ordered(self._folder)
            self._failure = None

    def _lasting_end(self) -> int:
        """Return the log offset before which nothing can be taken back."""
        return self._turns.lasting_end() if self._is_master else min(self._store.durable_end, self._store.published_end)

    def flush(self) -> None:
        """Write the index to the disk, so that a start reads less of the log again."""
        seen = self._seen
        if seen is None or self._failure is not None:
            return
        try:
            with self._lock:
                if self._mark <= self._lasting_end():
                    seen.cover(self._mark)
                now_ms, covered = self._store.clock.now_ms(), seen.covered
                seen.drop_filters(now_ms)
                if covered != self._flushed:
                    seen.forget(now_ms)
            self._mark = self._store.log.end if self._fold is None else self._fold.at
            if covered != self._flushed:
                seen.flush(self._run)
                self._flushed = covered
        except (IndexFailed, DiskFull) as error:
            self.failed(error)

    def close(self) -> None:
        """Enter everything durable into the index and close it; nothing writes to the store any more."""
        seen, self._seen = self._seen, None
        if seen is None:
            return
        try:
            while self._failure is None and seen.apply(self._lasting_end()):
                pass
            seen.index.close()
        except (IndexFailed, DiskFull) as error:  # the log has everything
            logger.error("index of ids not closed reason=%s", error)
            with suppress(StoreError):
                seen.index.close()

    def begin(self) -> None:
        """Make an index for the first window; ``ConfigError`` without the package that it needs."""
        remove_ordered(self._folder)  # of an earlier window
        self._open()
        self._fold = None  # ids count from now on

    def find(self, keys: list[bytes]) -> dict[bytes, First] | None:
        """Return what the index has of some keys; ``None`` when it failed or was opened again meanwhile. May wait."""
        seen = self._seen
        if seen is None:
            return None
        try:
            found = seen.find(keys, self._run)
        except IndexFailed as error:
            self.failed(error)
            return None
        return found if self._seen is seen else None

    # -- figures ------------------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of ids that wait to enter the index."""
        return 0 if self._seen is None else self._seen.waiting

    @property
    def behind_bytes(self) -> int:
        """The bytes of the log that the index does not cover; 0 without an index."""
        return 0 if self._seen is None else self._store.log.end - self._seen.covered

    @property
    def index_bytes(self) -> int:
        """The size of the index's files; 0 without an index."""
        return 0 if self._seen is None else self._seen.index.size_bytes

    def numbers(self) -> Mapping[str, object]:
        """Return figures for stats: values by name."""
        return {
            "dedupe_index": "unused" if self._seen is None else "yes" if self._fold is None else "reading the log",
            "dedupe_index_waiting": self.waiting,
        }
