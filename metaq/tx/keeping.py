"""The log that undecided branches need: its segments stay, or the branches are put again before retention deletes them."""

import logging
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Final

from metaq.errors import BadRequest, CorruptRecord
from metaq.store.files.filecache import Read
from metaq.store.messagestore import MessageStore
from metaq.tx.journal import Journal
from metaq.tx.places import bytes_of, offset_of, packed
from metaq.tx.snapshot import Snapshots
from metaq.tx.steps import Step, Steps, nothing
from metaq.tx.topics import Topics, topics_of
from metaq.tx.undecided import Undecided
from metaq.tx.xacodes import XaCode

logger = logging.getLogger(__name__)

KEPT_A_ROUND: Final = 64 << 20
"""About how many bytes of branches one round stores again before retention deletes their segments."""


class Keeping:
    """The needs of the branches of one store."""

    def __init__(self, store: MessageStore, journal: Journal, steps: Steps, undecided: Undecided, snapshots: Snapshots) -> None:
        self._store = store
        self._journal = journal
        self._steps = steps
        self._undecided = undecided
        self._snapshots = snapshots
        self._left: deque[tuple[int, int]] = deque()  # log offsets: an end, and a place needed until that is durable
        self._unreadable: set[int] = set()  # places of damaged branches; no segment is kept for them

    @property
    def oldest(self) -> int | None:
        """The lowest log offset that an undecided branch or the next snapshot still needs; ``None`` without one."""
        self._forget_left()
        places = (offset_of(place) for _, place in self._undecided.branches.places() if place not in self._unreadable)
        needed = self._snapshots.needed_from
        return min(chain(places, (left for _, left in self._left), () if needed is None else (needed,)), default=None)

    def leave(self, place: int, end: int) -> None:
        """Keep a place until the log is durable up to ``end``: before that a power cut could undo the record that freed it."""
        self._forget_left()
        if end > self._store.durable_end:
            self._left.append((end, offset_of(place)))

    def _forget_left(self) -> None:
        while self._left and self._left[0][0] <= self._store.durable_end:
            self._left.popleft()

    def keep(self, before: int, read: Read) -> Iterator[Step]:
        """Stage branches that lie before a log offset again, up to a limit of bytes: their segments are about to be deleted.

        A damaged branch is not kept: it is lost with its segment, and can only be rolled back until then.
        """
        room = KEPT_A_ROUND
        for key, place in [(key, place) for key, place in self._undecided.branches.places() if offset_of(place) < before]:
            if room <= 0 or self._store.failure is not None:
                return
            if place in self._unreadable:
                continue
            try:
                step = self._kept(key, place, read)
            except CorruptRecord as error:
                self._unreadable.add(place)
                logger.error("a prepared branch cannot be kept, it can only be rolled back key=%s reason=%s", key, error)
            except BadRequest as error:
                logger.error("a prepared branch cannot be put again, its segment stays key=%s reason=%s", key, error)
            else:
                if step is not None:
                    room -= bytes_of(place)
                    yield step

    def _kept(self, key: str, place: int, read: Read) -> Step | None:
        messages = self._journal.messages(offset_of(place), read)
        since_ms = self._journal.prepared(offset_of(place), read).since_ms
        if not self._is_still_at(key, place):  # decided while this greenlet read
            return None
        counts, topics = {"messages": len(messages), "bytes": bytes_of(place)}, topics_of(messages)
        mark = {"do": "prepare", "key": key, **counts, "topics": topics, "since_ms": since_ms}
        log_offset = self._steps.stage(mark, self._journal.parked(messages))
        moved = packed(log_offset, bytes_of(place))
        succeeded = partial(self._moved, key, place, moved, self._store.log.staged_end, topics)
        return self._steps.begun(log_offset, succeeded, nothing, XaCode.RMFAIL)

    def _moved(self, key: str, place: int, moved: int, end: int, topics: Topics) -> None:
        if self._is_still_at(key, place):  # a decision in progress may still read it at its old place
            self.leave(place, end)
            self._undecided.moved(key, moved, topics)

    def _is_still_at(self, key: str, place: int) -> bool:
        branches = self._undecided.branches
        return branches.place(key) == place and not branches.is_busy(key)
