"""Lines of keys: whatever is closed in whatever order, the first of each key is known."""

from hypothesis import given
from hypothesis import strategies as st

from metaq.leases.keylines import KeyLines


@given(st.lists(st.sampled_from("abc"), max_size=20), st.randoms(use_true_random=False))
def test_the_first_of_each_key_is_known(keys: list[str], chance: object) -> None:
    """E-22: ``closed`` returns the message whose turn it is."""
    open_ = dict(enumerate(keys))
    lines = KeyLines(open_)
    order = list(open_)
    chance.shuffle(order)  # type: ignore[attr-defined]
    for ordinal in order:
        key = open_.pop(ordinal)
        left = sorted(other for other, its in open_.items() if its == key)
        assert lines.closed(ordinal) == (left[0] if left else None)
        assert lines.is_busy(key) == bool(left)
        firsts = sorted(min(other for other, its in open_.items() if its == name) for name in set(open_.values()))
        assert sorted(lines.firsts()) == firsts
    assert lines.closed(99) is None


def test_messages_come_behind_those_of_their_key() -> None:
    lines = KeyLines({3: "a", 1: "a"})
    lines.add(7, "a")
    assert lines.firsts() == [1]
    assert [lines.closed(ordinal) for ordinal in (1, 3, 7)] == [3, 7, None]
