"""The open messages of each key in one partition, in order: of a key, only the first may be given."""

from collections import deque
from collections.abc import Mapping


class KeyLines:
    """The lines of all keys that have open messages."""

    def __init__(self, keys: Mapping[int, str]) -> None:
        """Learn the keys of the messages that are open, by ordinal."""
        self._keys: dict[int, str] = {}
        self._lines: dict[str, deque[int]] = {}
        for ordinal in sorted(keys):
            self.add(ordinal, keys[ordinal])

    def is_busy(self, key: str) -> bool:
        """Return whether messages with a key are open."""
        return key in self._lines

    def add(self, ordinal: int, key: str) -> None:
        """Put a message, which comes after all others of its key, at the end of the line."""
        self._keys[ordinal] = key
        self._lines.setdefault(key, deque()).append(ordinal)

    def closed(self, ordinal: int) -> int | None:
        """Take out a message that is not open any more; return the message that is the first of its key now."""
        key = self._keys.pop(ordinal, None)
        if key is None:
            return None
        line = self._lines[key]
        if line[0] == ordinal:
            line.popleft()
        else:
            line.remove(ordinal)
        if not line:
            del self._lines[key]
            return None
        return line[0]

    def firsts(self) -> list[int]:
        """Return the first message of each key."""
        return [line[0] for line in self._lines.values()]
