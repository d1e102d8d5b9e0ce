"""Pages of the pending timers, the first due first, while the index has some that are pending no more."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, cast

import pytest

from metaq.store.log.commitlog import CommitLog
from metaq.store.ordered.ordered import open_ordered
from metaq.timers.entering import SLICE, IndexStep
from metaq.timers.pending import Pending
from metaq.timers.records import Cancelled, Key, Parks, key_of
from tests.timers.test_pending import RECORD_BYTES, FakeLog

COUNT: Final = 2 * SLICE + 88
MOST: Final = 101
BEGIN: Final = key_of(0, 0)


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Pending]:
    """A table whose timers have all entered the index."""
    index, _ = open_ordered(tmp_path / "timerindex", "sqlite3")
    log = FakeLog()
    log.end = 1 << 40
    table = Pending(index, cast(CommitLog, log))
    for first in range(0, COUNT, SLICE):
        table.follow(parked(range(first, min(first + SLICE, COUNT))))
    while table.apply(log.end):
        pass
    while table.index.sort_in() is IndexStep.MORE:
        pass
    yield table
    index.close()


def timer(number: int) -> tuple[Key, int]:
    place = RECORD_BYTES * number
    return key_of(1000 + number, place), place


def parked(numbers: range) -> Parks:
    run = Parks()
    for key, place in map(timer, numbers):
        run.add(key, place, place + RECORD_BYTES)
    return run


def cancelled(table: Pending, numbers: range) -> None:
    """Cancel timers, which the index learns later."""
    table.follow(Cancelled([timer(number) for number in numbers], RECORD_BYTES * (COUNT + 1)))


def walk(table: Pending, most: int) -> list[tuple[Key, int]]:
    """Return what all pages have, each of which goes on where the one before ends."""
    found: list[tuple[Key, int]] = []
    after: Key | None = BEGIN
    while after is not None:
        page, after = table.page(after, most)
        assert len(page) <= most
        found += page
    return found


def test_a_page_is_full_although_the_index_has_cancelled_ones(table: Pending) -> None:
    """ES-101: and although one is taken, which is about to be cancelled, too."""
    cancelled(table, range(1))
    table.take(*timer(2))
    expected = [timer(number) for number in (1, *range(3, COUNT))]
    assert table.page(BEGIN, MOST) == (expected[:MOST], expected[MOST - 1][0])
    assert walk(table, MOST) == expected


@pytest.mark.parametrize("gone", [range(COUNT), range(SLICE), range(SLICE - 1, SLICE + 1), range(50, COUNT - 1)])
@pytest.mark.parametrize("most", [1, MOST, SLICE, 1000])
def test_all_pages_together_have_all_timers(table: Pending, gone: range, most: int) -> None:
    """ES-101: also where a slice of the index has nothing that is pending, and where memory has some between its timers."""
    cancelled(table, gone)
    table.follow(parked(range(COUNT + 1, COUNT + 3)))
    if 0 not in gone:
        table.take(*timer(0))
        table.release(timer(0)[0])  # memory has it, too
    expected = [timer(number) for number in (*range(COUNT), COUNT + 1, COUNT + 2) if number not in gone]
    assert walk(table, most) == expected
