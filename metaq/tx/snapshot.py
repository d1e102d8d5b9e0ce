"""The snapshot of undecided branches, and the start that reads it and the marks after it.

``config/transactions.json`` holds the undecided branches, each with the log offset of its mark and the bytes reserved for it,
their topics, and the ordinal of the first mark whose outcome was open when the snapshot was taken::

    {"crc32c":"…","log":[1,0,0,81920],"next":204,"ids":1880000000000000000,"prepared":[["XID:1:0a:0b:app",8123904,1024]],
     "heuristic":[["XID:1:0a:0c:app","commit"]],"topics":{"XID:1:0a:0b:app":["orders"],"XID:1:0a:0c:app":["orders"]}}

A start reads the snapshot and applies the marks from there on; to apply a mark that it covers changes nothing. A snapshot is
written once the log is durable up to its end when the snapshot was taken: ``log``. ``ids`` is beyond any id that is given out
before the next snapshot, unless the clock goes back; the marks also say how far ids were.
"""

import logging
from pathlib import Path
from typing import Any, Final, NamedTuple

from metaq.store.copies.epochs import Epochs
from metaq.store.copies.snapshots import moment, read_snapshot
from metaq.store.files.documents import write_document
from metaq.store.files.filecache import Run, read_here, run_here
from metaq.store.messagestore import MessageStore
from metaq.tx.journal import content_of
from metaq.tx.places import bytes_of, offset_of, packed
from metaq.tx.states import Decision
from metaq.tx.steps import MARK_QUEUE, Steps
from metaq.tx.undecided import Undecided

logger = logging.getLogger(__name__)

SNAPSHOT: Final = "transactions.json"
READ_BYTES: Final = 256 * 1024
IDS_AHEAD: Final = 1 << 40


class _Snapshot(NamedTuple):
    content: dict[str, Any]
    log_end: int
    needed_from: int
    """The log offset of the first mark that it does not cover."""
    version: int
    """How many steps had ended."""


class Snapshots:
    """The snapshots of one store."""

    def __init__(self, store: MessageStore, steps: Steps, undecided: Undecided, folder: Path) -> None:
        """Restore the undecided branches from the snapshot, which is in ``folder``, and the log."""
        self._store = store
        self._epochs = Epochs(store)
        self._steps = steps
        self._undecided = undecided
        self._path = folder / SNAPSHOT
        self._uncovered = store.log.end  # log offset of the first mark that the written snapshot may not cover
        self._covered: int | None = 0  # steps that had ended when the written one was taken; ``None`` when it lacks older ones
        self._waiting: _Snapshot | None = None  # until the log is durable up to it
        self._restore_marks(self._restore_snapshot())
        self._drop_aged()

    # -- at a start ---------------------------------------------------------------------------------------------------

    def _restore_snapshot(self) -> int:
        """Restore what the snapshot holds; return the ordinal of the first mark that it may not cover."""
        content, problems = read_snapshot(self._store.disk, self._path, self._epochs)
        for problem in problems:
            logger.error("snapshot of transactions damaged, made good from the log problem=%s", problem)
        content = content or {"next": 0, "ids": 0, "prepared": [], "heuristic": []}
        following: int = content["next"]
        topics = content.get("topics", {})  # older versions wrote none
        if following > self._steps.next_mark:
            logger.error("the log has lost marks of transactions that the snapshot covers, the other marks count")
            following, content["prepared"] = 0, []
        self._steps.ids = max(self._steps.ids, content["ids"])
        for key, outcome in content["heuristic"]:  # before a branch of the same name that was prepared later
            self._undecided.restore_heuristic(key, Decision(outcome), topics.get(key))
        for key, log_offset, size in content["prepared"]:
            self._undecided.restore_prepared(key, packed(log_offset, size), topics.get(key))
        return following

    def _restore_marks(self, following: int) -> None:
        queue = self._store.queues.get(MARK_QUEUE)
        if queue is None:
            return
        first = max(following, self._store.first(queue, read_here)[0])
        for stored in self._store.records(queue, first, READ_BYTES, read_here):
            if stored is not None:
                self._covered = None
                self._uncovered = min(self._uncovered, stored.log_offset)
                self._apply(content_of(stored), stored.log_offset)

    def _apply(self, mark: dict[str, Any], log_offset: int) -> None:
        key, undecided = mark["key"], self._undecided
        self._steps.ids = max(self._steps.ids, mark["ids"])
        match mark["do"]:
            case "prepare":
                undecided.restore_prepared(key, packed(log_offset, mark["bytes"]), mark.get("topics"))
            case "commit" | "rollback":
                undecided.restore_decided(key)
            case "heuristic":
                undecided.restore_heuristic(key, Decision(mark["outcome"]), mark.get("topics"))
            case "forget":
                undecided.restore_forgotten(key)

    def _drop_aged(self) -> None:
        """Drop branches of an old snapshot whose segments are gone: undecided ones would have been stored again before."""
        begin = self._store.log.begin
        for key in [key for key, place in self._undecided.branches.places() if offset_of(place) < begin]:
            logger.warning("a branch was decided long ago, or lost with its damaged messages key=%s", key)
            self._undecided.restore_decided(key)

    # -- while the broker runs ----------------------------------------------------------------------------------------

    @property
    def needed_from(self) -> int | None:
        """The log offset of the first mark that a start would need now; ``None`` when the written snapshot covers all."""
        covers_all = self._covered == self._steps.ended and self._steps.first_open is None
        return None if covers_all else self._uncovered

    def save(self, run: Run) -> None:
        """Take a snapshot if something has changed, and write it once the log is durable up to it. Call it at intervals."""
        if self._store.failure is not None:
            return
        if self._waiting is None and self._covered != self._steps.ended:
            self._waiting = self._taken()
        waiting = self._waiting
        if waiting is not None and self._store.durable_end >= waiting.log_end:
            self._write(waiting, run)
            self._waiting = None

    def save_last(self, run: Run = run_here) -> None:
        """Sync the log and write a snapshot, at an orderly stop, when nothing else writes to the store any more."""
        if self._store.failure is None:
            self._store.sync(run)
            self._write(self._taken(), run)

    def _taken(self) -> _Snapshot:
        end, branches = self._store.log.end, self._undecided.branches
        following, needed_from = self._steps.first_open or (self._steps.next_mark, end)
        content = {
            **moment(self._epochs, end),
            "next": following,
            "ids": self._steps.ids + IDS_AHEAD,
            "prepared": [[key, offset_of(place), bytes_of(place)] for key, place in branches.places()],
            "heuristic": [[key, outcome.value] for key, outcome in branches.heuristics()],
            "topics": self._undecided.topics.all(),
        }
        return _Snapshot(content, end, needed_from, self._steps.ended)

    def _write(self, snapshot: _Snapshot, run: Run) -> None:
        disk = self._store.disk
        run(lambda: disk.make_directories(self._path.parent))
        run(lambda: write_document(disk, self._path, snapshot.content))
        self._covered, self._uncovered = snapshot.version, snapshot.needed_from
