"""Numbers that are kept in one come back as they were."""

from hypothesis import given
from hypothesis import strategies as st

from metaq.leases.bunch import Bunch

TIMES_MS = st.one_of(st.integers(0, 1 << 42), st.integers(0, 3))


@given(TIMES_MS, TIMES_MS, st.one_of(st.integers(0, 3), st.integers(0, (1 << 31) - 1)), st.booleans())
def test_what_is_kept_comes_back(pop_ms: int, first_ms: int, times: int, is_given_back: bool) -> None:
    """Also when clocks were set back between the deliveries; the end of a delay changes nothing else."""
    bunch = Bunch(7, 0b101, pop_ms, 4711, times, first_ms, given_back=is_given_back)
    for expected in (is_given_back, False):
        assert (bunch.first, bunch.open, bunch.pop_ms, bunch.due_ms) == (7, 0b101, pop_ms, 4711)
        assert (bunch.times, bunch.first_ms, bunch.given_back) == (times, first_ms, expected)
        assert list(bunch.ordinals()) == [7, 9]
        bunch.end_delay()
