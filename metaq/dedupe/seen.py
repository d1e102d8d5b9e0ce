"""The ids that were stored lately: a fold over the records of the log, in memory and in an ordered index.

::

                         X                       end of the log
    log      ────────────┃───────────────────────┃
              in the index   waits in memory

Ids enter the index when neither a power cut nor a failover can take their records back (``apply``), together with the log
offset X before which all of them are there. The newest ``KEPT`` ids stay in memory as well.

A later record of an id replaces an earlier one: the fold may be done again from any earlier X.

Beside the generations (``metaq.dedupe.records``) the index has::

    M    the latest time at which a record before X was stored, in Unix milliseconds (8)
    W    the windows by topic, as JSON: an index that was made with others lacks ids
"""

import struct
from collections import deque
from collections.abc import Mapping
from typing import Final

import orjson

from metaq.dedupe.records import GENERATION, First, SeenId, end_of_range, hash_of, id_key, over_ms, read_value, value_of
from metaq.store.files.filecache import Run, run_here
from metaq.store.log.commitlog import CommitLog
from metaq.store.ordered.engine import DeleteRange, Operation, SetKey
from metaq.store.ordered.following import checksum_before
from metaq.store.ordered.ordered import Covered, Ordered

KEPT: Final = 50_000
"""As many ids at least stay in memory although the index has them, and twice as many at most: about 25 MB."""
PORTION: Final = 64
"""Ids in one batch of the index. A batch holds the interpreter's lock, so a large one would stop the loop."""
LARGE_PORTION: Final = 256
"""The same while many ids wait."""
MANY: Final = 10_000
_LATEST, _WINDOWS = b"M", b"W"
_NUMBER: Final = struct.Struct(">Q")

_new: Final = tuple.__new__
"""Costs a third of a named tuple's own constructor."""

Staged = tuple[bytes, First, int, First | None]
"""A key, its value, the end of the record, and what it replaces until that record is in the log."""
Windows = Mapping[str, int]
"""The windows of topics that have one, in milliseconds."""


def windows_in(index: Ordered) -> Windows:
    """Return the windows that an index was made with."""
    (found,) = index.find([_WINDOWS])
    windows: Windows = {} if found is None else orjson.loads(found)
    return windows


class SeenIds:
    """The ids of the topics with a window."""

    def __init__(self, index: Ordered, log: CommitLog, windows: Windows, run: Run = run_here) -> None:
        """Begin with what the index has; ``run`` is where an engine waits later, if it has to."""
        self.index = index
        self._log = log
        self._run = run
        self._newer: dict[bytes, First] = {}  # has all that wait
        self._older: dict[bytes, First] = {}
        self._waiting: deque[Staged] = deque()  # in the log, and not yet in the index
        self._staged: list[Staged] = []
        (latest,) = index.find([_LATEST])
        self._latest_ms: int = 0 if latest is None else _NUMBER.unpack(latest)[0]
        self.windows = dict(windows)
        self._told_windows: Windows = windows_in(index)
        self.asked = 0
        """The number of calls that read or flush the index now, off the loop."""

    @property
    def covered(self) -> int:
        """X: the index has all ids before this log offset."""
        return 0 if self.index.covered is None else self.index.covered.log_offset

    @property
    def waiting(self) -> int:
        """The number of ids that wait to enter the index."""
        return len(self._waiting) + len(self._staged)

    # -- asking -------------------------------------------------------------------------------------------------------

    def keys(self, topic: str, ident: str, now_ms: int) -> list[bytes]:
        """Return the keys under which an id of a topic with a window may be known, the newest first.

        The first one that counts for a message of now is the one before the last; a clock that was set back by less than a
        window finds the ids of later.
        """
        window_ms, digest = self.windows[topic], hash_of(topic, ident)
        over = over_ms(now_ms, window_ms)
        keys = [id_key(over, digest), id_key(over - window_ms, digest)]
        if self._latest_ms >= over - window_ms:
            keys.insert(0, id_key(over + window_ms, digest))
        return keys

    def look(self, keys: list[bytes]) -> First | None:
        """Return what memory has."""
        newer, older = self._newer, self._older
        for key in keys:
            first = newer.get(key)
            if first is None:
                first = older.get(key)
            if first is not None:
                return first
        return None

    def may_have(self, keys: list[bytes]) -> bool:
        """Return false when the index certainly lacks all keys; never wait."""
        return self.index.may_have(keys)

    def find(self, keys: list[bytes], run: Run) -> dict[bytes, First]:
        """Return what the index has; the call may wait for the disk."""
        self.asked += 1
        try:
            rows = self.index.find(keys, run)
        finally:
            self.asked -= 1
        return {key: read_value(row) for key, row in zip(keys, rows, strict=True) if row is not None}

    # -- the fold -----------------------------------------------------------------------------------------------------

    def follow(self, seen: SeenId) -> None:
        """Take an id of the log; the next one in its order comes with the next call. Ids of other topics do not matter."""
        window_ms = self.windows.get(seen.topic)
        if window_ms is None:
            return
        key = id_key(over_ms(seen.store_ms, window_ms), hash_of(seen.topic, seen.ident))
        self._latest_ms = max(self._latest_ms, seen.store_ms)
        self._newer[key] = seen.first
        self._waiting.append((key, seen.first, seen.end, None))
        self._trim()

    def stage(self, key: bytes, first: First, end: int, now_ms: int) -> None:
        """Take an id whose record is staged; ``appended`` says what became of it."""
        newer = self._newer
        before = newer.get(key)
        newer[key] = first
        self._latest_ms = max(self._latest_ms, now_ms)
        self._staged.append((key, first, end, before))

    def appended(self, *, is_stored: bool) -> None:
        """Learn whether what was staged is in the log."""
        staged, self._staged = self._staged, []
        if is_stored:
            self._waiting.extend(staged)
        else:
            for key, _, _, before in reversed(staged):
                del self._newer[key]
                if before is not None:
                    self._newer[key] = before
        self._trim()

    @property
    def is_staging(self) -> bool:
        """True when something is staged that is not yet appended."""
        return bool(self._staged)

    def _trim(self) -> None:
        """Forget the older ones, once the index has them and there are enough newer ones."""
        if KEPT <= len(self._newer) >= len(self._waiting) and not self._staged:
            self._older, self._newer = self._newer, {}

    # -- the index ----------------------------------------------------------------------------------------------------

    def apply(self, before: int) -> bool:
        """Enter one batch of the ids whose records end at or before a log offset into the index.

        Return false when there is none, or when the index would have to wait; nothing has changed then, nor when it fails.
        """
        portion = LARGE_PORTION if len(self._waiting) > MANY else PORTION
        taken: list[Staged] = []
        while self._waiting and len(taken) < portion and self._waiting[0][2] <= before:
            taken.append(self._waiting.popleft())
        if not taken:
            return False
        is_applied = False
        try:
            is_applied = self._enter([_new(SetKey, (key, value_of(first))) for key, first, _, _ in taken], taken[-1][2])
        finally:
            if not is_applied:
                self._waiting.extendleft(reversed(taken))
        if is_applied:
            self._trim()
        return is_applied

    def cover(self, end: int) -> bool:
        """Have the index cover the log up to the end of a record, before which no id waits; return whether it does."""
        if end <= self.covered or (self._waiting and self._waiting[0][2] <= end) or checksum_before(self._log, end) == 0:
            return False
        return self._enter([], end)

    def _enter(self, batch: list[Operation], end: int) -> bool:
        batch.append(SetKey(_LATEST, _NUMBER.pack(self._latest_ms)))
        is_told = self._told_windows == self.windows
        if not is_told:
            batch.append(SetKey(_WINDOWS, orjson.dumps(self.windows)))
        if not self.index.apply(batch, Covered(end, checksum_before(self._log, end)), self._run):
            return False
        if not is_told:
            self._told_windows = dict(self.windows)
        return True

    def forget(self, now_ms: int) -> None:
        """Remove the generations that are over."""
        if self.index.covered is not None:
            self.index.apply([DeleteRange(GENERATION, end_of_range(now_ms))], self.index.covered, self._run)

    def flush(self, run: Run) -> None:
        """Make durable what has entered the index."""
        self.asked += 1
        try:
            self.index.flush(run)
        finally:
            self.asked -= 1
