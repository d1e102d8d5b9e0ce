"""Runs of adjacent records, against the plain definition."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from metaq.store.log.segments import SMALLEST_RECORD
from metaq.store.queues.consumequeue import FILLER_SIZE, UNIT
from metaq.store.runs import leading_runs

BASE, END = 1000, 3000
SIZES = st.sampled_from([0, -1, SMALLEST_RECORD - 1, SMALLEST_RECORD, 200, 300, FILLER_SIZE])


@given(st.lists(st.tuples(st.sampled_from([0, 0, 0, 0, 50, -5000]), SIZES), max_size=12), st.integers(0, 1500))
def test_runs_are_those_of_the_units(steps: list[tuple[int, int]], most_bytes: int) -> None:
    """Records next to one another are one run; nothing that is no record is in any, and together they are not too large."""
    units, offset = [], BASE
    for gap, size in steps:
        offset += gap
        units.append((offset, size))
        offset += size if 0 < size < FILLER_SIZE else 0
    runs, messages, total = leading_runs(b"".join(UNIT.pack(*unit, 7) for unit in units), BASE, END, most_bytes)
    found = units[:messages]
    assert all(SMALLEST_RECORD <= size < FILLER_SIZE and at >= BASE and at + size <= END for at, size in found)
    assert total == sum(size for _, size in found)
    assert total <= most_bytes or messages == 1
    assert sum(count for _, _, count in runs) == messages
    first = 0
    for begin, end, count in runs:
        part = found[first : first + count]
        assert begin == part[0][0]
        assert [at + size for at, size in part] == [*(at for at, _ in part[1:]), end]
        first += count
    assert all(before[1] != after[0] for before, after in itertools.pairwise(runs))
    if messages < len(units):
        at, size = units[messages]
        is_record = SMALLEST_RECORD <= size < FILLER_SIZE and at >= BASE and at + size <= END
        assert not is_record or total + size > most_bytes
