"""Power cuts under leases: what was synced is not lost, whatever the disk kept of the rest."""

from typing import Final

import pytest

from tests.engine.leases.cut import Cut
from tests.support.samples import seed_of_tree

CASES: Final = 25


@pytest.mark.parametrize(("case", "by_key"), [*((case, False) for case in range(4)), (4, True), (5, True)])
def test_a_power_cut_loses_no_message_that_was_safe(case: int, by_key: bool) -> None:
    """E-08, L-2, L-7, L-10, F-3: other seeds for each commit."""
    seeds = range(seed_of_tree() + case * CASES, seed_of_tree() + (case + 1) * CASES)
    for seed in seeds:
        life = Cut(seed, by_key=by_key)
        life.work()
        life.cut()
        try:
            life.check()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
