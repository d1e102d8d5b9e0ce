"""The upkeep of the index of timers, by little steps between which others go on."""

from typing import Any, Final, cast

import gevent

from metaq.engine.timers.upkeep import WORK_S, Upkeep
from metaq.timers.entering import IndexStep
from metaq.timers.pending import Pending
from metaq.timers.records import key_of
from tests.support.manualclock import ManualClock

STEPS: Final = 5


class Table:
    """A table in which each step takes as long as others wait at most."""

    waiting = near = 0

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.left = STEPS

    def apply(self, before: int) -> bool:
        self._clock.advance(WORK_S)
        self.left -= 1
        return self.left > 0

    def load(self, until: bytes) -> IndexStep:
        return IndexStep.MORE if self.apply(0) else IndexStep.DONE


def begin() -> tuple[Upkeep, Any]:
    clock = ManualClock()
    return Upkeep(clock, lambda: 0), Table(clock)


def test_others_have_the_index_while_much_enters() -> None:
    """N-6: deliveries that need more timers in memory would wait for a second."""
    upkeep, table = begin()
    found = list[int]()

    def ask() -> None:
        with upkeep.lock:
            found.append(table.left)

    entering = gevent.spawn(upkeep.enter, cast(Pending, table))
    gevent.sleep(0)
    asking = gevent.spawn(ask)
    entering.get()
    asking.get()
    assert (found, table.left) == ([STEPS - 1], 0)


def test_timers_are_read_a_little_at_a_time() -> None:
    """N-6: what is due already does not wait for the rest."""
    upkeep, table = begin()
    steps = [upkeep.load(cast(Pending, table), key_of(1, 1), 10) for _ in range(STEPS)]
    assert steps == [IndexStep.MORE] * (STEPS - 1) + [IndexStep.DONE]
    assert upkeep.load(cast(Pending, table), key_of(1, 1), 0) is IndexStep.DONE
