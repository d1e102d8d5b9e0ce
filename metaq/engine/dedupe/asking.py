"""Asking the index of ids what memory cannot answer, in the order in which it was asked.

The handler of a request gives it to ``ask``, and handles it again when the index has answered. What comes meanwhile waits after
it, but the index is not asked for what memory can answer: so the queue ends, however fast messages come.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import gevent

from metaq.dedupe.records import First, latest_of
from metaq.errors import Overloaded, StoreError
from metaq.store.files.filecache import Read

MOST_ASKED: Final = 10_000
"""Requests that may wait for the index at once."""
ASKED_AT_ONCE: Final = 256
RETRY_MS: Final = 100

Again = Callable[[], Callable[[], None]]
"""Handles a request again, and returns what sends the answer; neither raises. With an answer the client may send more, so none
is sent before all that waited have been handled."""


class ColdIds(Exception):
    """Memory does not know whether an id was stored, and the asker may not wait for the disk."""

    def __init__(self, keys: list[bytes], touch: Callable[[Read], object] | None = None) -> None:
        """Name the keys to look up, none when others are only to be waited for, and what has to be read from the disk."""
        super().__init__()
        self.keys = keys
        self.touch = touch
        self.failure: StoreError | None = None
        """Why that cannot be read: who asked must not ask again, as it would without end."""


class Asking:
    """The requests that wait, and the answers for those that are being handled again."""

    def __init__(self, find: Callable[[list[bytes]], dict[bytes, First] | None], read: Read) -> None:
        """Ask ``find``, which may wait: it returns what the index has of some keys, or ``None`` when the index cannot say."""
        self._find = find
        self._read = read
        self._asked: deque[tuple[ColdIds, Again]] = deque()
        self._greenlet: Any = None
        self.is_again = False
        """True while a request is handled again."""
        self.has_read = False
        """True while one is handled again for which the disk was read: what was read then is in the page cache."""
        self._found: dict[bytes, First] = {}  # what the index has of what it was asked for
        self._absent: frozenset[bytes] = frozenset()  # and what it lacks

    @property
    def is_busy(self) -> bool:
        """True while requests wait."""
        return self._greenlet is not None

    @property
    def has_room(self) -> bool:
        """True while less than half of the requests wait that may: others than those that must ask may wait, too."""
        return len(self._asked) < MOST_ASKED // 2

    def stop(self) -> None:
        """Answer no more."""
        if self._greenlet is not None:
            self._greenlet.kill()

    def first_of(self, keys: Sequence[bytes]) -> First | None:
        """Return what the index has of these keys, as far as it was asked for them."""
        return latest_of([self._found[key] for key in keys if key in self._found]) if self._found else None

    def lacks(self, keys: Sequence[bytes]) -> bool:
        """Return whether the index was asked for all of these keys and has none of them."""
        return bool(self._absent) and self._absent.issuperset(keys)

    def ask(self, cold: ColdIds, again: Again) -> None:
        """Have the index asked, and call ``again``: what it asks then is known.

        Raises ``Overloaded`` when too many wait already.
        """
        if len(self._asked) >= MOST_ASKED:
            raise Overloaded(f"{MOST_ASKED} messages wait for the index of ids", retry_after_ms=RETRY_MS)
        self.is_again = False  # if this is asked once more, those after it have to wait for it
        self._asked.append((cold, again))
        if self._greenlet is None:
            self._greenlet = gevent.spawn(self._ask_all)

    def _ask_all(self) -> None:
        try:
            while self._asked:
                portion = [self._asked.popleft() for _ in range(min(len(self._asked), ASKED_AT_ONCE))]
                for cold, _ in portion:
                    if cold.touch is not None:
                        try:
                            cold.touch(self._read)
                        except StoreError as error:
                            cold.failure = error
                keys = list(dict.fromkeys(key for cold, _ in portion for key in cold.keys))
                found = self._find(keys) if keys else None
                if found is not None:
                    self._found, self._absent = found, frozenset([key for key in keys if key not in found])
                self._handle(portion)
        finally:
            self._greenlet = None

    def _handle(self, portion: list[tuple[ColdIds, Again]]) -> None:
        """Handle requests again, before anything else is done; then have them answered.

        One may have to ask once more: the index, which has written a file meanwhile, may not exclude its id any more. It goes
        before those that came since, and with it the rest of the portion.
        """
        later, self._asked = self._asked, deque()
        self.is_again = True
        try:
            answers = []
            for cold, again in portion:
                self.has_read = cold.touch is not None
                answers.append(again())
        finally:
            self._asked += later
            self.is_again, self.has_read, self._found, self._absent = False, False, {}, frozenset()
        for answer in answers:
            answer()
