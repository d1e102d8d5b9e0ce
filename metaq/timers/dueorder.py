"""PURE: the keys of many timers in their order: a heap of milliseconds, each with a heap of its own.

One heap of all keys costs a microsecond for each when it has 300,000: every step down in it misses the processor's cache. Those of
one millisecond are few, or came in the order of the log, which is theirs. A heap of these takes a third of that.
"""

from heapq import heappop, heappush
from typing import Final

from metaq.timers.records import Key

_TIME_BYTES: Final = 8
"""The begin of a key: when it is due."""


class DueOrder:
    """Keys, of which the least can be had. One that was added twice is there twice."""

    def __init__(self) -> None:
        self._times: list[bytes] = []  # a heap
        self._keys: dict[bytes, list[Key]] = {}  # a heap for each time

    def add(self, key: Key) -> None:
        """Take a key."""
        time = key[:_TIME_BYTES]
        keys = self._keys.get(time)
        if keys is None:
            self._keys[time] = [key]
            heappush(self._times, time)
        else:
            heappush(keys, key)

    @property
    def first(self) -> Key | None:
        """The least key; ``None`` without any."""
        return self._keys[self._times[0]][0] if self._times else None

    def pop(self) -> Key:
        """Remove the least key and return it; there must be one."""
        time = self._times[0]
        keys = self._keys[time]
        key = heappop(keys)
        if not keys:
            del self._keys[time]
            heappop(self._times)
        return key
