"""A sample of the kills under delayed messages."""

from pathlib import Path

import pytest

from tests.crash.timers import aim, one_case, run
from tests.support.samples import seed_of_tree


def test_a_few_kills_lose_no_timer_and_double_none() -> None:
    """T-1 to T-4: other moments for each commit."""
    counts = one_case(seed_of_tree(), kills=5)
    assert counts["parked"] > 20
    assert counts["delivered"] > 10


@pytest.mark.parametrize(("durability", "count"), [("memory", 400), ("disk", 160)])
def test_a_cancel_at_the_last_moment_is_answered_as_it_is(tmp_path: Path, durability: str, count: int) -> None:
    """T-3, T-4, F-5: whatever the answer, readers see the same."""
    counts = aim(0, count, tmp_path, durability)
    assert counts["cancelled"] + counts["cancelled too late"] == counts["parked"]
    assert min(counts["cancelled"], counts["cancelled too late"]) > 5, counts


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_lose_no_timer_and_double_none() -> None:
    """T-1 to T-4, T-7, T-8, F-1, F-6, F-13, F-15: 40 kills, with the index spoiled and the clock set between them."""
    result = run(seed=0, count=40)
    assert result.cases >= 40
    for name in ("delivered", "cancelled", "cancelled too late", "segments deleted", "clock set", "kills while starting"):
        assert result.details[name] > 0, name
    assert sum(count for name, count in result.details.items() if name.startswith("index: ")) > 2
