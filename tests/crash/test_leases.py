"""A sample of the kills under leases."""

import pytest

from tests.crash.leases import one_case, run
from tests.support.samples import seed_of_tree


def test_a_few_kills_undo_no_ack_and_end_no_lease() -> None:
    """E-08, F-9: other moments for each commit."""
    counts = one_case(seed_of_tree(), kills=4)
    assert counts["acked"] > 50
    assert counts["given again"] > 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_undo_no_ack_and_end_no_lease() -> None:
    """E-08, L-1 to L-8, L-11, F-9, F-15: 40 kills, with segments deleted between them."""
    result = run(seed=0, count=40)
    assert result.cases >= 40
    for name in ("acked", "changed", "rejected", "given again", "too late", "dead: times", "dead: rejected"):
        assert result.details[name] > 0, name
