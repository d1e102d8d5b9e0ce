"""A sample of the kills under messages with ids."""

import pytest

from tests.crash.duplicates import one_case, run
from tests.support.samples import seed_of_tree


def test_a_few_kills_double_no_id_and_swallow_none() -> None:
    """D-1, D-2: other moments for each commit."""
    counts = one_case(seed_of_tree(), kills=4)
    assert counts["stored"] > 50
    assert counts["duplicates"] > 50


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_double_no_id_and_swallow_none() -> None:
    """D-1, D-2, F-23: 40 kills, with the index spoiled between them."""
    result = run(seed=0, count=40)
    assert result.cases >= 40
    for name in ("stored", "duplicates", "index: older", "index: deleted"):
        assert result.details[name] > 0, name
