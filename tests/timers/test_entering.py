"""How timers enter their index: many in one row, sorted in later, and removed by ranges that do not overlap."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from metaq.store.files.filecache import Run, run_here
from metaq.store.log.commitlog import CommitLog
from metaq.store.ordered.engine import DeleteRange, Operation
from metaq.store.ordered.ordered import Covered, Ordered, open_ordered
from metaq.timers.entering import MOST_PACKED, OVER_AT_ONCE, PACK_FROM, TIMER, IndexStep, TimerState
from metaq.timers.packs import PACK, REMOVED
from metaq.timers.pending import Pending
from metaq.timers.records import Cancelled, Delivered, Key, Park, Parks, key_of
from tests.timers.test_pending import RECORD_BYTES, FakeLog

MANY = PACK_FROM + 8


class Spied(Ordered):
    """An index that keeps the batches that it is given."""

    batches: list[Sequence[Operation]]

    def apply(self, batch: Sequence[Operation], covered: Covered, run: Run = run_here) -> bool:
        self.batches.append(batch)
        return super().apply(batch, covered, run)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Spied]:
    opened, _ = open_ordered(tmp_path / "timerindex", "sqlite3")
    spied = Spied(opened._engine, None)
    spied.batches = []
    yield spied
    spied.close()


def table_of(index: Spied) -> Pending:
    log = FakeLog()
    log.end = 1 << 40
    return Pending(index, cast(CommitLog, log))


def rows(index: Spied, kind: bytes) -> list[bytes]:
    with index.scan(kind, kind + b"\xff" * 17) as scan:
        return [key for key, _ in scan.next(10_000)]


def parked(first: int, due_ms: Sequence[int]) -> Parks:
    """Return parks whose records follow one another."""
    run = Parks()
    run.places = [first + RECORD_BYTES * at for at in range(len(due_ms))]
    run.keys = [key_of(due, place) for due, place in zip(due_ms, run.places, strict=True)]
    run.end = run.places[-1] + RECORD_BYTES
    return run


def entered(table: Pending, *events: Parks | Park | Delivered | Cancelled) -> None:
    for event in events:
        table.follow(event)
    assert table.apply(events[-1].end)
    assert table.waiting == 0


def found(table: Pending, key: Key) -> tuple[TimerState, int]:
    """Return what the index says, which does not know what is in memory."""
    return table.find([key], run_here)[0]


def test_many_parks_become_one_row_and_few_do_not(index: Spied) -> None:
    table = table_of(index)
    many, few = parked(0, [5_000] * MANY), parked(10_000, [5_000] * 3)
    entered(table, many)
    assert (len(rows(index, PACK)), len(rows(index, TIMER)), table.index.packs.count) == (1, 0, MANY)
    entered(table, few)
    assert (len(rows(index, PACK)), len(rows(index, TIMER))) == (1, 3)
    assert all(found(table, key) == (TimerState.PENDING, place) for key, place in zip(many.keys, many.places, strict=True))
    assert found(table, key_of(4_999, 0))[0] is TimerState.GONE
    assert table.load(key_of(6_000, 0)) is IndexStep.MORE  # sorts it in
    assert table.load(key_of(6_000, 0)) is IndexStep.DONE
    assert (table.near, len(rows(index, PACK)), len(rows(index, TIMER)), table.index.packs.count) == (MANY + 3, 0, MANY + 3, 0)


def test_what_is_delivered_soon_never_gets_a_row(index: Spied) -> None:
    """N-2: parks that were due soon cost the index a row for all, and its end."""
    table = table_of(index)
    assert table.load(key_of(10_000, 0)) is IndexStep.DONE
    run = parked(0, [5_000] * MANY)
    entered(table, run)
    assert table.index.sort_in() is IndexStep.DONE
    assert (len(rows(index, PACK)), len(rows(index, TIMER))) == (1, 0)
    entered(table, Delivered(run.keys[-1], {0: MANY}, run.end + RECORD_BYTES))
    assert table.index.sort_in() is IndexStep.DONE
    assert (rows(index, PACK), rows(index, TIMER), table.index.packs.count) == ([], [], 0)
    assert found(table, run.keys[0])[0] is TimerState.GONE


def test_cancelled_and_moved_timers_count_no_more_in_their_pack(index: Spied) -> None:
    """ES-101, I-1: also after the index was opened again."""
    table = table_of(index)
    run = parked(0, [5_000] * MANY)
    cancelled, moved = run.keys[3], run.keys[5]
    entered(table, run)
    entered(table, Cancelled([(cancelled, run.places[3])], 9_100), Park(moved, 9_100, run.places[5], 9_200))
    for each in (table, table_of(index)):
        assert found(each, cancelled)[0] is TimerState.CANCELLED
        assert found(each, moved) == (TimerState.PENDING, 9_100)
        assert found(each, run.keys[0]) == (TimerState.PENDING, 0)
    assert table.index.sort_in() is IndexStep.MORE
    assert len(rows(index, TIMER)) == MANY - 1
    assert rows(index, REMOVED) == []
    assert (found(table, cancelled)[0], found(table, moved)) == (TimerState.CANCELLED, (TimerState.PENDING, 9_100))


def test_deliveries_remove_ranges_that_do_not_overlap(index: Spied) -> None:
    """N-7: a read through n ranges that begin alike takes n² steps."""
    table = table_of(index)
    place = 0
    for due_ms in range(1_000, 3_000, 100):
        run = parked(place, [due_ms, due_ms + 50, 10_000])
        place = run.end + RECORD_BYTES
        entered(table, run, Delivered(key_of(due_ms + 60, 1 << 40), {0: 2}, place))
    ranges = [each for batch in index.batches for each in batch if isinstance(each, DeleteRange)]
    assert len(ranges) == 20
    assert all(before.end == after.begin for before, after in pairwise(ranges))
    assert len(rows(index, TIMER)) == 20


def test_what_is_parked_behind_a_delivery_is_removed_by_the_next_one(index: Spied) -> None:
    """T-1: as when the clock was set back."""
    table = table_of(index)
    entered(table, parked(0, [1_000, 9_000]), Delivered(key_of(1_000, 1 << 40), {0: 1}, 300))
    late = parked(300, [400, 600])
    entered(table, late)
    assert found(table, late.keys[0]) == (TimerState.PENDING, 300)
    entered(table, Delivered(key_of(500, 1 << 40), {0: 1}, 600))
    assert rows(index, TIMER) == [TIMER + late.keys[1], TIMER + key_of(9_000, 100)]
    entered(table, Delivered(key_of(2_000, 1 << 40), {0: 1}, 700))
    assert rows(index, TIMER) == [TIMER + key_of(9_000, 100)]


def test_beyond_so_many_in_packs_each_gets_its_row(index: Spied) -> None:
    table = table_of(index)
    table.index.packs.count = MOST_PACKED
    entered(table, parked(0, [5_000] * MANY))
    assert (rows(index, PACK), len(rows(index, TIMER))) == ([], MANY)


def test_packs_of_which_all_was_delivered_are_removed_until_none_is_left(index: Spied) -> None:
    """N-2: else they would count as timers in packs, of which there may be so many."""
    table = table_of(index)
    assert table.load(key_of(10_000, 0)) is IndexStep.DONE
    end = 0
    for _ in range(OVER_AT_ONCE + 1):
        run = parked(end, [5_000] * MANY)
        end = run.end
        entered(table, run)
    entered(table, Delivered(run.keys[-1], {0: MANY * (OVER_AT_ONCE + 1)}, end + RECORD_BYTES))
    assert table.index.sort_in() is IndexStep.MORE
    assert (len(rows(index, PACK)), table.index.packs.count) == (1, MANY)
    assert table.index.sort_in() is IndexStep.DONE
    assert (rows(index, PACK), table.index.packs.count) == ([], 0)


def test_a_run_is_found_before_and_after_it_has_entered(index: Spied) -> None:
    """ES-101: single timers of a run that nobody has asked for until then."""
    table = table_of(index)
    runs = [parked(first, [5_000 + first] * 3) for first in (0, 1_000, 2_000)]
    for run in runs:
        table.follow(run)
    assert table.apply(runs[0].end)
    (gone, *_), first, last = runs[0].keys, runs[1].keys[1], runs[2].keys[2]
    assert table.state(gone) is TimerState.FAR  # the index has it
    assert [table.state(key) for key in (first, last)] == [TimerState.PENDING] * 2
    assert (table.place(first), table.place(last)) == (runs[1].places[1], runs[2].places[2])
    table.follow(Cancelled([(last, runs[2].places[2])], runs[2].end + RECORD_BYTES))
    assert table.state(last) is TimerState.CANCELLED
    while table.apply(runs[2].end + RECORD_BYTES):
        pass
    assert [table.state(key) for key in (first, last)] == [TimerState.FAR] * 2
    assert (found(table, first)[0], found(table, last)[0]) == (TimerState.PENDING, TimerState.CANCELLED)


def test_a_delivery_ends_a_part_of_a_run_that_has_not_entered(index: Spied) -> None:
    """T-1: as where a start reads both from the log, and nothing is in memory yet."""
    table = table_of(index)
    run = parked(0, [5_000, 6_000, 7_000])
    table.follow(run)
    table.follow(Delivered(run.keys[1], {0: 2}, run.end + RECORD_BYTES))
    assert [table.state(key) for key in run.keys] == [TimerState.FAR, TimerState.FAR, TimerState.PENDING]
    assert table.load(key_of(10_000, 0)) is IndexStep.DONE
    assert (table.near, table.first) == (1, run.keys[2])
