"""The order of keys against a sorted list."""

from bisect import insort

from hypothesis import given
from hypothesis import strategies as st

from metaq.timers.dueorder import DueOrder
from metaq.timers.records import Key, key_of

KEYS = st.builds(key_of, st.sampled_from((0, 1, 2, 255, 256, 1 << 40)), st.integers(0, 300))


@given(st.lists(KEYS | st.none()))
def test_the_least_is_first_whatever_comes(steps: list[Key | None]) -> None:
    """N-6: those of one span are in their order, too; ``None`` takes the least."""
    order, wanted = DueOrder(), list[Key]()
    for key in steps:
        if key is not None:
            order.add(key)
            insort(wanted, key)
        elif wanted:
            assert order.pop() == wanted.pop(0)
        assert order.first == (wanted[0] if wanted else None)
    assert [order.pop() for _ in wanted] == wanted
    assert order.first is None
