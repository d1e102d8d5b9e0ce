"""The upkeep of the index of timers: what takes long there is done a little at a time, and others go on in between."""

from collections.abc import Callable
from typing import Final

import gevent
from gevent.lock import BoundedSemaphore

from metaq.clock import Clock
from metaq.errors import Overloaded
from metaq.timers.entering import IndexStep
from metaq.timers.pending import MANY, Pending
from metaq.timers.records import Key

WORK_S: Final = 0.001
"""How long the index is worked on before others go on: one in a hundred sends may wait for it."""
LONG_WORK_S: Final = 0.006
"""The same while many events wait: a turn of the loop brings as many as enter in half of that."""
REST_S: Final = 0.001
SORTED_A_ROUND: Final = 16
"""How often a round sorts in timers of packs, which takes about a millisecond each time."""
SORT_REST_S: Final = 0.01
PAGE_S: Final = 10.0
"""How long a page of timers may take: to sort in a million takes some 5 s, to pass over 100,000 cancelled ones 0.7 s."""


class Upkeep:
    """Changes the index of timers, and reads long stretches of it; one at a time does either."""

    def __init__(self, clock: Clock, lasting_end: Callable[[], int]) -> None:
        """Begin; ``lasting_end`` returns the log offset before which nothing can be taken back."""
        self._clock = clock
        self._lasting_end = lasting_end
        self.lock = BoundedSemaphore(1)
        """Held by whoever applies changes to the index or scans it: a scan must not miss what is applied meanwhile."""

    def enter(self, table: Pending) -> None:
        """Enter what is safe into the index. Raises ``IndexFailed`` and ``DiskFull``.

        Others may have the index in between: where requests fill the turns of the loop, a rest takes 20 ms, and all rests a
        second.
        """
        while self._enter_some(table):
            gevent.sleep(REST_S)

    def _enter_some(self, table: Pending) -> bool:
        """Enter events for a while; return false when there are no more."""
        began = self._clock.monotonic()
        with self.lock:
            while table.apply(self._lasting_end()):
                if self._clock.monotonic() - began >= (LONG_WORK_S if table.waiting > MANY else WORK_S):
                    return True
        return False

    def sort_in(self, table: Pending) -> None:
        """Sort in the timers of some packs, in a tenth of the time: nobody waits. Raises ``IndexFailed`` and ``DiskFull``."""
        for _ in range(SORTED_A_ROUND):
            if table.waiting > MANY:  # what comes is entered first
                return
            with self.lock:
                if table.index.sort_in() is not IndexStep.MORE:
                    return
            gevent.sleep(SORT_REST_S)

    def load(self, table: Pending, until: Key, most: int) -> IndexStep:
        """Read timers into memory for a while, up to a key or until there are so many; return ``MORE`` when that is not all.

        Raises ``IndexFailed`` and ``DiskFull``.
        """
        began = self._clock.monotonic()
        with self.lock:
            while table.near < most:
                step = table.load(until)
                if step is not IndexStep.MORE or self._clock.monotonic() - began >= WORK_S:
                    return step
        return IndexStep.DONE

    def page(self, table: Pending, after: Key, most: int) -> list[tuple[Key, int]]:
        """Return the first pending timers after a key, and their places: fewer than ``most`` only when there are no more.

        Raises ``Overloaded`` when that takes longer than ``PAGE_S``, and ``IndexFailed``.
        """
        deadline = self._clock.monotonic() + PAGE_S
        found: list[tuple[Key, int]] = []
        while self._clock.monotonic() < deadline:
            with self.lock:  # for each step: deliveries must not wait for all of them
                if table.index.sort_in() is IndexStep.DONE:
                    timers, following = table.page(after, most - len(found))
                    found += timers
                    if following is None or len(found) == most:
                        return found
                    after = following
            gevent.sleep(REST_S)
        reason = f"the index did not sort in all timers, and find {most}, within {PAGE_S:.0f} s"
        raise Overloaded(reason, retry_after_ms=round(PAGE_S * 1000))
