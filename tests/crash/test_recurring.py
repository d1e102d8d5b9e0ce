"""A sample of the kills under recurring messages."""

from tests.crash.recurring import one_case
from tests.support.samples import seed_of_tree


def test_a_few_kills_leave_each_due_time_delivered_once() -> None:
    """E-13, T-11: other moments for each commit."""
    counts = one_case(seed_of_tree(), kills=4)
    assert counts["runs"] > 5
