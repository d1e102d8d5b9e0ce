"""The upkeep of the index of timers, by little steps between which others go on."""

from typing import Any, Final, cast

import gevent
import pytest

from metaq.engine.timers.upkeep import PAGE_S, WORK_S, Upkeep
from metaq.errors import Overloaded
from metaq.timers.entering import IndexStep
from metaq.timers.pending import Pending
from metaq.timers.records import key_of, parts_of
from tests.support.manualclock import ManualClock

STEPS: Final = 5


class Slices:
    """A table of one timer in each slice of its index, each of which takes some time."""

    def __init__(self, clock: ManualClock, slice_s: float) -> None:
        self._clock = clock
        self._slice_s = slice_s
        self.index = self
        self.read = 0

    def sort_in(self) -> IndexStep:
        return IndexStep.DONE

    def page(self, after: bytes, most: int) -> tuple[list[tuple[bytes, int]], bytes | None]:
        self._clock.advance(self._slice_s)
        self.read += 1
        key = key_of(parts_of(after)[0] + 1, 0)
        return [(key, 0)], None if self.read == STEPS else key


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


def test_others_have_the_index_while_a_page_is_read() -> None:
    """N-6: the index may have many timers that are pending no more."""
    clock = ManualClock()
    upkeep, table = Upkeep(clock, lambda: 0), Slices(clock, WORK_S)
    found = list[int]()

    def ask() -> None:
        with upkeep.lock:
            found.append(table.read)

    paging = gevent.spawn(upkeep.page, cast(Pending, table), key_of(0, 0), 2 * STEPS)
    gevent.sleep(0)
    asking = gevent.spawn(ask)
    assert [parts_of(key)[0] for key, _ in paging.get()] == [*range(1, STEPS + 1)]
    asking.get()
    assert found == [1]


def test_a_page_ends_when_it_is_full_or_takes_too_long() -> None:
    """N-6."""
    clock = ManualClock()
    upkeep, table = Upkeep(clock, lambda: 0), Slices(clock, PAGE_S / 2)
    assert len(upkeep.page(cast(Pending, table), key_of(0, 0), 2)) == table.read == 2
    with pytest.raises(Overloaded, match="find 3, within 10 s"):
        upkeep.page(cast(Pending, table), key_of(0, 0), 3)
