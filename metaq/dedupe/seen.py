"""The ids that were stored lately: a fold over the records of the log, in memory and in an ordered index.

::

                         X                       end of the log
    log      ────────────┃───────────────────────┃
              in the index   waits in memory

Ids enter the index when neither a power cut nor a failover can take their records back (``apply``), together with the log
offset X before which all of them are there. The newest ``KEPT`` ids stay in memory as well.

Nearly all ids are new, and the index is not asked for those: each generation has a filter of the ids that it has got since the
index was opened. What the index had then is in none. So it is asked as long as a generation counts that had begun by then.

A later record of an id replaces an earlier one: the fold may be done again from any earlier X.

Beside the generations (``metaq.dedupe.records``) the index has::

    M    the latest time at which a record before X was stored, in Unix milliseconds (8)
    V    the windows by topic, as JSON: an index that was made with others lacks ids. One without V has
         keys of an earlier form, and is made anew
"""

import struct
from collections.abc import Mapping
from typing import Final

import orjson

from metaq.dedupe.filter import IdFilter, spot_of
from metaq.dedupe.records import (
    GENERATION,
    First,
    SeenId,
    end_of_range,
    generation_of,
    latest_of,
    name_of,
    over_ms,
    read_value,
    value_of,
)
from metaq.store.files.filecache import Run, run_here
from metaq.store.log.commitlog import CommitLog
from metaq.store.ordered.engine import DeleteRange, Operation, SetKey
from metaq.store.ordered.following import checksum_before
from metaq.store.ordered.ordered import Covered, Ordered

KEPT: Final = 50_000
"""As many ids at least stay in memory although the index has them, and twice as many at most: about 25 MB, without those that
wait."""
PORTION: Final = 64
"""Ids in one batch of the index. A batch holds the interpreter's lock, so a large one would stop the loop."""
LARGE_PORTION: Final = 256
"""The same while many ids wait."""
MANY: Final = 10_000
PASSED: Final = 4096
"""Ids that have entered the index and are dropped together."""
SET_BACK_MS: Final = 60_000
"""A filter is kept so long after its generation is over, in case the clock is set back."""
_LATEST, _WINDOWS = b"M", b"V"
_NUMBER: Final = struct.Struct(">Q")

_new: Final = tuple.__new__
"""Costs a third of a named tuple's own constructor."""

Windows = Mapping[str, int]
"""The windows of topics that have one, in milliseconds."""


def windows_in(index: Ordered) -> Windows:
    """Return the windows that an index was made with."""
    (found,) = index.find([_WINDOWS])
    windows: Windows = {} if found is None else orjson.loads(found)
    return windows


class _Around:
    """The generations of a window in which an id may be known while the newest one lasts."""

    def __init__(self, over: int, window_ms: int, newest_ids: IdFilter, older_ids: IdFilter, dropped_ms: int) -> None:
        self.end_ms = over - window_ms
        self.begin_ms = self.end_ms - window_ms
        self.older_begin_ms = self.begin_ms - window_ms
        self.newest = generation_of(over)
        """The beginning of all keys of the generation that a message of now belongs to."""
        self.older = generation_of(over - window_ms)
        self.later = generation_of(over + window_ms)
        self.newest_ids = newest_ids
        self.older_ids = older_ids
        self.dropped_ms = dropped_ms
        """No filter has the ids of generations of this window that had begun by then."""


class _Line:
    """Ids in the order of the log, in columns; those that have entered the index come first, and are dropped many at a time."""

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.ends: list[int] = []
        """Where their records end."""
        self.entered = 0

    def add(self, key: bytes, value: bytes, end: int) -> None:
        self.keys.append(key)
        self.values.append(value)
        self.ends.append(end)

    def add_all(self, line: "_Line") -> None:
        self.keys += line.keys
        self.values += line.values
        self.ends += line.ends

    def shorten(self) -> None:
        """Drop those that have entered."""
        entered, self.entered = self.entered, 0
        del self.keys[:entered], self.values[:entered], self.ends[:entered]


class SeenIds:
    """The ids of the topics with a window."""

    def __init__(self, index: Ordered, log: CommitLog, windows: Windows, run: Run = run_here) -> None:
        """Begin with what the index has; ``run`` is where an engine waits later, if it has to."""
        self.index = index
        self._log = log
        self._run = run
        # Keys and values are bytes, of which garbage collection knows nothing: a tuple for each id would cost twice as much.
        self._newer: dict[bytes, bytes] = {}
        self._older: dict[bytes, bytes] = {}
        self._waiting = _Line()  # in the log, and not yet in the index
        self._known = 0  # so many of these are in ``_newer``
        self._staged = _Line()
        self._staged_known: dict[bytes, bytes] = {}  # those that were looked for
        (latest,) = index.find([_LATEST])
        self._latest_ms: int = 0 if latest is None else _NUMBER.unpack(latest)[0]
        self._unfiltered_ms = self._latest_ms
        """No filter has the ids of generations that had begun by then."""
        self._filters: dict[int, IdFilter] = {}  # by when a generation is over
        self._dropped_ms: dict[int, int] = {}  # by window: when the newest generation began whose filter was dropped
        self._around: dict[str, _Around] = {}
        self._windows: Windows = dict(windows)
        self._told_windows: Windows = windows_in(index)
        self.asked = 0
        """The number of calls that read or flush the index now, off the loop."""

    @property
    def windows(self) -> Windows:
        """The windows of the topics that have one."""
        return self._windows

    @windows.setter
    def windows(self, windows: Windows) -> None:
        self._windows = dict(windows)
        self._around = {}

    @property
    def covered(self) -> int:
        """X: the index has all ids before this log offset."""
        return 0 if self.index.covered is None else self.index.covered.log_offset

    @property
    def waiting(self) -> int:
        """The number of ids that wait to enter the index."""
        return len(self._waiting.keys) - self._waiting.entered + len(self._staged.keys)

    # -- asking -------------------------------------------------------------------------------------------------------

    def is_new(self, topic: str, name: bytes, now_ms: int) -> bool:
        """Return true when an id of a topic with a window is certainly new; never wait, and do not ask the index."""
        around, spot = self._generations(topic, now_ms), spot_of(name)
        return self._is_filtered(around) and not (around.newest_ids.has(spot) or around.older_ids.has(spot))

    def meet(self, topic: str, name: bytes, now_ms: int) -> bool:
        """Return what ``is_new`` does. The id is met now, whatever becomes of its message: it must be, before it is staged."""
        around, spot = self._generations(topic, now_ms), spot_of(name)
        is_met = around.newest_ids.meet(spot) or around.older_ids.has(spot)
        return not is_met and self._is_filtered(around)

    def new_key(self, topic: str, name: bytes, now_ms: int) -> bytes | None:
        """Return the ``key`` of an id if ``meet`` finds it to be certainly new, at the cost of one of the two."""
        around, spot = self._generations(topic, now_ms), spot_of(name)
        if around.newest_ids.meet(spot) or around.older_ids.has(spot) or not self._is_filtered(around):
            return None
        return around.newest + name

    def _is_filtered(self, around: _Around) -> bool:
        """Return whether filters have all ids that count for a message of now."""
        return self._latest_ms < around.end_ms and max(self._unfiltered_ms, around.dropped_ms) < around.older_begin_ms

    def key(self, topic: str, name: bytes, now_ms: int) -> bytes:
        """Return the key under which an id is staged now."""
        return self._generations(topic, now_ms).newest + name

    def keys(self, topic: str, name: bytes, now_ms: int) -> list[bytes]:
        """Return the keys under which an id of a topic with a window may be known, the newest first.

        A clock that was set back by less than a window finds the ids of later.
        """
        around = self._generations(topic, now_ms)
        keys = [around.newest + name]
        if not self._is_filtered(around) or around.older_ids.has(spot_of(name)):
            keys.append(around.older + name)
        if self._latest_ms >= around.end_ms:
            keys.insert(0, around.later + name)
        return keys

    def _generations(self, topic: str, now_ms: int) -> _Around:
        around = self._around.get(topic)
        if around is None or not around.begin_ms <= now_ms < around.end_ms:
            over, window_ms = over_ms(now_ms, self._windows[topic]), self._windows[topic]
            newest, older = self._filter(over), self._filter(over - window_ms)
            around = self._around[topic] = _Around(over, window_ms, newest, older, self._dropped_ms.get(window_ms, 0))
        return around

    def _filter(self, over: int) -> IdFilter:
        ids = self._filters.get(over)
        if ids is None:
            ids = self._filters[over] = IdFilter()
        return ids

    def look(self, keys: list[bytes]) -> First | None:
        """Return what memory has. That an id was released counts only where no message with it came since."""
        self._learn()
        staged = self._staged
        for at in range(len(self._staged_known), len(staged.keys)):
            self._staged_known[staged.keys[at]] = staged.values[at]
        staged_known, newer, older = self._staged_known, self._newer, self._older
        found: list[First] = []
        for key in keys:
            value = staged_known.get(key)
            if value is None:
                value = newer.get(key)
            if value is None:
                value = older.get(key)
            if value is not None:
                found.append(read_value(value))
        return latest_of(found)

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

    def follow(self, seen: SeenId, now_ms: int) -> None:
        """Take an id of the log; the next one in its order comes with the next call. Ids of other topics do not matter.

        A new replica reads all that its master has kept, and makes no filters for generations that are over.
        """
        window_ms = self._windows.get(seen.topic)
        if window_ms is None:
            return
        name, over = name_of(seen.topic, seen.ident), over_ms(seen.store_ms, window_ms)
        if over + SET_BACK_MS <= now_ms:
            self._pass_over(over, window_ms)
        else:
            self.meet(seen.topic, name, seen.store_ms)
        self._latest_ms = max(self._latest_ms, seen.store_ms)
        self._waiting.add(generation_of(over) + name, value_of(seen.first), seen.end)
        self._trim()

    def stage(self, key: bytes, value: bytes, end: int, now_ms: int) -> None:
        """Take an id whose record is staged; ``appended`` says what became of it."""
        self._staged.add(key, value, end)
        self._latest_ms = max(self._latest_ms, now_ms)

    def appended(self, *, is_stored: bool) -> None:
        """Learn whether what was staged is in the log."""
        if is_stored:
            self._waiting.add_all(self._staged)
        self._staged = _Line()
        if self._staged_known:
            self._staged_known = {}
        self._trim()

    @property
    def is_staging(self) -> bool:
        """True when something is staged that is not yet appended."""
        return bool(self._staged.keys)

    def _learn(self) -> None:
        """Have all that wait in ``_newer``: together, and only once somebody asks or they enter the index."""
        waiting, newer = self._waiting, self._newer
        keys, values = waiting.keys, waiting.values
        for at in range(self._known, len(keys)):
            newer[keys[at]] = values[at]
        self._known = len(keys)

    def _trim(self) -> None:
        """Forget the older ones, once the index has them and there are enough newer ones."""
        if len(self._newer) >= KEPT + self.waiting and not self._staged.keys:
            self._older, self._newer = self._newer, {}

    # -- the index ----------------------------------------------------------------------------------------------------

    def apply(self, before: int) -> bool:
        """Enter one batch of the ids whose records end at or before a log offset into the index.

        Return false when there is none, or when the index would have to wait; nothing has changed then, nor when it fails.
        """
        waiting = self._waiting
        portion = LARGE_PORTION if self.waiting > MANY else PORTION
        begin = end = waiting.entered
        last = min(len(waiting.keys), begin + portion)
        while end < last and waiting.ends[end] <= before:
            end += 1
        if end == begin:
            return False
        self._learn()
        batch: list[Operation] = [_new(SetKey, (waiting.keys[at], waiting.values[at])) for at in range(begin, end)]
        if not self._enter(batch, waiting.ends[end - 1]):
            return False
        waiting.entered = end
        if end >= PASSED:
            waiting.shorten()
            self._known -= end
        self._trim()
        return True

    def cover(self, end: int) -> bool:
        """Have the index cover the log up to the end of a record, before which no id waits; return whether it does."""
        if (
            end <= self.covered
            or (self._waiting.entered < len(self._waiting.ends) and self._waiting.ends[self._waiting.entered] <= end)
            or checksum_before(self._log, end) == 0
        ):
            return False
        return self._enter([], end)

    def _enter(self, batch: list[Operation], end: int) -> bool:
        batch.append(SetKey(_LATEST, _NUMBER.pack(self._latest_ms)))
        is_told = self._told_windows == self._windows
        if not is_told:
            batch.append(SetKey(_WINDOWS, orjson.dumps(self._windows)))
        if not self.index.apply(batch, Covered(end, checksum_before(self._log, end)), self._run):
            return False
        if not is_told:
            self._told_windows = self._windows
        return True

    def forget(self, now_ms: int) -> None:
        """Remove the generations that are over from the index, which is to be flushed then.

        RocksDB keeps all such ranges until a flush, and to read through n of them costs n² steps.
        """
        if self.index.covered is not None:
            self.index.apply([DeleteRange(GENERATION, end_of_range(now_ms))], self.index.covered, self._run)

    def drop_filters(self, now_ms: int) -> None:
        """Drop the filters of the generations that are over."""
        gone = [over for over in self._filters if over + SET_BACK_MS <= now_ms]
        for over in gone:
            del self._filters[over]
            for window_ms in set(self._windows.values()):
                if over % window_ms == 0:
                    self._pass_over(over, window_ms)
        if gone:
            self._around = {}

    def _pass_over(self, over: int, window_ms: int) -> None:
        """Take note that no filter has the ids of a generation, nor of those before it."""
        begin_ms = over - 2 * window_ms
        if begin_ms > self._dropped_ms.get(window_ms, 0):
            self._dropped_ms[window_ms] = begin_ms
            self._around = {}

    def flush(self, run: Run) -> None:
        """Make durable what has entered the index."""
        self.asked += 1
        try:
            self.index.flush(run)
        finally:
            self.asked -= 1
