"""Packs: timers that the index holds as they came, many in one row, until they are sorted in.

A row of its own costs RocksDB two microseconds for each timer, more than all else that parking takes beyond a send. So the
first parks of a batch, when they are many, become one row of 16 bytes each. They are *sorted in*, each to a row of its own,
when one of them is about to come into memory, or when there is time. Most of those that are due soon are delivered before that.

::

    P end (8)    → the keys (16 each) of timers that were parked before the log offset ``end``
    R due id     → empty: a timer of a pack that was cancelled or stored again since
    D            → the greatest key that a delivery has reached

A pack gets only keys beyond the greatest that a delivery had reached by then. So of a pack those are pending that are beyond
the greatest that a delivery has reached by now, and not among the removed ones. The id of a timer is a log offset, which says
what pack may have it.
"""

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Final

from metaq.store.ordered.engine import DeleteKey, Entry, Operation
from metaq.timers.records import Key, parts_of

PACK, REMOVED, REACHED = b"P", b"R", b"D"
KEY_BYTES: Final = 16


class Packs:
    """The packs of one index: where they are, not their timers."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}  # by their ends
        self._ends: list[int] = []  # sorted
        self._far: list[tuple[Key, int]] = []  # a heap: the least key beyond the horizon, and the end of its pack
        self._greatest: list[tuple[Key, int]] = []  # a heap: the greatest key, and the end of its pack
        self._removed: dict[int, set[Key]] = {}  # by the end of their pack
        self.reached: Key = b""
        """The greatest key that a delivery has reached."""
        self.count = 0
        """The number of timers in packs, whatever became of them."""

    def load(self, scan: Callable[[bytes, bytes], list[Entry]]) -> None:
        """Take what the index has; ``scan`` returns the first entries of a range."""
        for row, value in scan(REACHED, REACHED + b"\0"):
            assert row == REACHED
            self.reached = value
        for kind in (PACK, REMOVED):
            begin = kind
            while rows := scan(begin, kind + b"\xff" * 17):
                for row, value in rows:
                    if kind == PACK:
                        self.add(int.from_bytes(row[1:]), keys_in(value), b"")
                    else:
                        self.remove(row[1:])
                begin = rows[-1][0] + b"\0"

    def add(self, end: int, keys: Sequence[Key], horizon: Key) -> None:
        """Take a new pack; its keys below the horizon are in memory."""
        self._sizes[end] = len(keys)
        heappush(self._greatest, (max(keys), end))
        insort(self._ends, end)
        self.count += len(keys)
        low = max(horizon, self.reached + b"\0")
        least: Key | None = min(keys)
        if least is not None and least < low:
            least = min((key for key in keys if key >= low), default=None)
        if least is not None:
            heappush(self._far, (least, end))

    def end_of(self, key: Key) -> int | None:
        """Return the end of the pack that may have a timer."""
        at = bisect_right(self._ends, parts_of(key)[1])
        return self._ends[at] if at < len(self._ends) else None

    def remove(self, key: Key) -> None:
        """Take note of a timer that counts no more in its pack, if it is in one."""
        end = self.end_of(key)
        if end is not None:
            self._removed.setdefault(end, set()).add(key)

    def is_pending(self, key: Key, end: int) -> bool:
        """Return whether a timer that is in a pack counts there."""
        return key > self.reached and key not in self._removed.get(end, ())

    def far(self, most: int, until: Key | None = None) -> list[int]:
        """Return the ends of packs with timers beyond the horizon, and before ``until`` if it is given, the first due first."""
        found: list[tuple[Key, int]] = []
        while self._far and len(found) < most and (until is None or self._far[0][0] < until):
            first = heappop(self._far)
            if first[1] in self._sizes:
                found.append(first)
        for each in found:
            heappush(self._far, each)
        return [end for _, end in found]

    def over(self, most: int) -> list[int]:
        """Return the ends of packs of which all timers were delivered."""
        found: list[tuple[Key, int]] = []
        while self._greatest and len(found) < most and self._greatest[0][0] <= self.reached:
            first = heappop(self._greatest)
            if first[1] in self._sizes:
                found.append(first)
        for each in found:
            heappush(self._greatest, each)
        return [end for _, end in found]

    def rows_of(self, end: int) -> list[Operation]:
        """Return what removes a pack from the index."""
        return [DeleteKey(pack_row(end)), *(DeleteKey(REMOVED + key) for key in self._removed.get(end, ()))]

    def drop(self, end: int) -> None:
        """Forget a pack that was removed from the index."""
        self.count -= self._sizes.pop(end)
        del self._ends[bisect_right(self._ends, end) - 1]
        self._removed.pop(end, None)


def pack_row(end: int) -> bytes:
    """Return the key of a pack's row."""
    return PACK + end.to_bytes(8)


def keys_in(pack: bytes) -> list[Key]:
    """Return the keys of the timers in a pack."""
    return [pack[at : at + KEY_BYTES] for at in range(0, len(pack), KEY_BYTES)]


def has_key(pack: bytes, key: Key) -> bool:
    """Return whether a pack has a timer."""
    at = pack.find(key)
    while at % KEY_BYTES and at >= 0:
        at = pack.find(key, at + 1)
    return at >= 0
